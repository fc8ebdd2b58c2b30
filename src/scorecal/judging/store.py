"""Judgements on disk: written whole, checked on reading, resumable while being made.

A store holds one judge's answers for one task:

    manifest.json        who judged what, and a checksum of each file
    items.parquet        id, group, split, gold, leak; no text
    judgements.parquet   a row for each prompt; the text that the judge wrote for it, if any.
                         Answers in the judge's own words are rows without log-probabilities

While it is being made it holds `plan.json`, what the judge has written so far in `generated/`, and
finished chunks in `parts/` instead.
"""

import hashlib
import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from scorecal.judging.records import replacing
from scorecal.judging.task import Item

FORMAT = 1
_FILES = ("items.parquet", "judgements.parquet")
ITEMS = pa.schema(
    [
        ("id", pa.string()),
        ("group", pa.string()),
        ("split", pa.string()),
        ("gold", pa.float64()),
        ("leak", pa.bool_()),
    ]
)
JUDGEMENTS = pa.schema(
    [
        ("kind", pa.string()),
        ("key", pa.string()),
        ("scale", pa.string()),
        ("order", pa.string()),
        ("logprobs", pa.list_(pa.float32())),
        ("censored", pa.list_(pa.bool_())),
        ("label_mass", pa.float32()),
        ("logsumexp", pa.float32()),
        ("perplexity", pa.float32()),
        ("tokens", pa.int32()),
        ("prompt", pa.string()),
        ("text", pa.string()),
    ]
)


class Store:
    """A folder of judgements."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def is_complete(self) -> bool:
        """Whether the folder holds finished judgements."""
        return (self.folder / "manifest.json").is_file()

    @property
    def is_foreign(self) -> bool:
        """Whether the folder holds anything that a store being made doesn't leave behind."""
        return self.folder.is_dir() and any(
            path.name != "parts" and path.suffix != ".partial" for path in self.folder.iterdir()
        )

    def manifest(self, *, unchecked: str = "") -> dict[str, Any]:
        """The manifest, after the checksum of every file but `unchecked` has been compared.

        Raises:
            ValueError: the store is absent, unfinished, or not as it was written.
        """
        path = self.folder / "manifest.json"
        if not path.is_file():
            hint = "is unfinished; run `elicit` again to go on" if self.plan() else "is no store"
            raise ValueError(f"{str(self.folder)!r} {hint}.")
        try:
            manifest = json.loads(path.read_text(encoding="utf-8"))
            if manifest["format"] != FORMAT:
                raise ValueError(
                    f"store {str(self.folder)!r} has format {manifest['format']}, this version "
                    f"reads {FORMAT}. Elicit it again."
                )
            checksums = {name: manifest["files"][name] for name in _FILES}
            kinds = {"identity": dict, "digest": str, "scales": dict, "engine": dict, "task": str}
            if not all(isinstance(manifest[name], kind) for name, kind in kinds.items()):
                raise TypeError
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError):
            raise ValueError(f"{str(path)!r} is damaged. Elicit the store again.") from None
        for name, checksum in checksums.items():
            file = self.folder / name
            if name != unchecked and not (file.is_file() and file_checksum(file) == checksum):
                raise ValueError(
                    f"{str(file)!r} was truncated or edited: its checksum differs from the "
                    "manifest's. Restore it, or delete the store and elicit it again."
                )
        return manifest

    def items(self) -> pa.Table:
        """The items table."""
        return _read(self.folder / "items.parquet")

    def judgements(self) -> pa.Table:
        """The judgements table."""
        return _read(self.folder / "judgements.parquet")

    # Making one

    def plan(self) -> dict[str, Any] | None:
        """The plan of an unfinished store."""
        path = self.folder / "plan.json"
        if not path.is_file():
            return None
        try:
            plan = json.loads(path.read_text(encoding="utf-8"))
            _ = plan["identity"], plan["digest"], [chunk["prompts"] for chunk in plan["chunks"]]
        except (json.JSONDecodeError, KeyError, TypeError):
            raise ValueError(f"{str(path)!r} is damaged. Delete its folder, elicit anew.") from None
        return plan

    def begin(self, plan: dict[str, Any]) -> None:
        """Fix the plan that parts follow, before the first forward pass."""
        _write_json(self.folder / "plan.json", plan)

    def _texts(self, stage: str, batch: int) -> Path:
        return self.folder / "generated" / f"{stage}-{batch:06d}.json"

    def texts(self, stage: str, batch: int) -> list[str] | None:
        """What the judge has written, if that batch of it is on disk and whole."""
        try:
            return json.loads(self._texts(stage, batch).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):  # a machine that lost its power can leave half
            return None

    def write_texts(self, stage: str, batch: int, texts: Sequence[str]) -> None:
        """Put a batch of what the judge has written on disk."""
        _write_json(self._texts(stage, batch), list(texts))

    def _part(self, chunk: int) -> Path:
        return self.folder / "parts" / f"{chunk:06d}.parquet"

    def has_part(self, chunk: int) -> bool:
        """Whether a chunk's judgements are on disk."""
        return self._part(chunk).is_file()

    def parts(self) -> list[int]:
        """The chunks whose judgements are on disk."""
        return sorted(int(path.stem) for path in (self.folder / "parts").glob("*.parquet"))

    def write_part(self, chunk: int, rows: Sequence[dict[str, Any]], halved: Sequence[int]) -> None:
        """Put a finished chunk on disk, with the sizes of batches that ran out of memory."""
        table = pa.Table.from_pylist(list(rows), JUDGEMENTS)
        table = table.replace_schema_metadata({"halved": json.dumps(list(halved))})
        with replacing(self._part(chunk)) as partial:
            pq.write_table(table, partial)

    def finish(
        self,
        chunks: int,
        row_order: Sequence[int],
        answers: Sequence[dict[str, Any]],
        items: Iterable[Item],
        manifest: dict[str, Any],
    ) -> None:
        """Join the parts in the order of the questions, add answers, write the manifest last."""
        parts = [_read(self._part(chunk)) for chunk in range(chunks)]
        halved = {
            str(chunk): sizes
            for chunk, part in enumerate(parts)
            if (sizes := json.loads(part.schema.metadata[b"halved"]))
        }
        joined = pa.concat_tables([part.replace_schema_metadata(None) for part in parts])
        position = pa.array(sorted(range(len(row_order)), key=row_order.__getitem__))
        table = joined.take(position)
        if answers:
            table = pa.concat_tables([table, pa.Table.from_pylist(list(answers), JUDGEMENTS)])
            table = table.combine_chunks()
        with replacing(self.folder / "judgements.parquet") as partial:
            pq.write_table(table, partial, compression="zstd")
        self.refresh_items(items, {**manifest, "format": FORMAT, "out_of_memory": halved})
        self.tidy()

    def tidy(self) -> None:
        """Remove from a finished store what making it, or a kill at its very end, has left."""
        (self.folder / "plan.json").unlink(missing_ok=True)
        for made_of in ("parts", "generated"):
            shutil.rmtree(self.folder / made_of, ignore_errors=True)
        for partial in self.folder.glob(".*.partial"):
            partial.unlink()

    def refresh_items(self, items: Iterable[Item], manifest: dict[str, Any]) -> None:
        """Write items (new gold scores invalidate no judgement) and the manifest."""
        rows = [{name: getattr(item, name) for name in ITEMS.names} for item in items]
        with replacing(self.folder / "items.parquet") as partial:
            pq.write_table(pa.Table.from_pylist(rows, ITEMS), partial, compression="zstd")
        files = {name: file_checksum(self.folder / name) for name in _FILES}
        _write_json(self.folder / "manifest.json", {**manifest, "files": files})


def _read(path: Path) -> pa.Table:
    # Not `pq.read_table`, which imports all of pyarrow.dataset: half a second of every start.
    with pq.ParquetFile(path) as file:
        return file.read()


def file_checksum(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def _write_json(path: Path, content: dict[str, Any] | list[str]) -> None:
    with replacing(path) as partial:
        partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
