"""Rows of JSONL, CSV and Parquet files, in and out."""

import contextlib
import csv
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def read_records(path: Path) -> list[Record]:
    """Rows of a `.jsonl`, `.csv` or `.parquet` file as dicts.

    Raises:
        ValueError: the file is missing, empty, not UTF-8 or not of its suffix's format.
    """
    if not path.is_file():
        raise ValueError(f"no file {str(path)!r}. Check the path.")
    try:
        records = _READERS[path.suffix](path)
    except KeyError:
        raise ValueError(
            f"{str(path)!r} is none of {', '.join(_READERS)}. Convert it, or rename it."
        ) from None
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{str(path)!r} is not UTF-8 (byte {error.start}). Convert it, for example with iconv."
        ) from None
    if not records:
        raise ValueError(f"{str(path)!r} holds no rows.")
    return records


def _read_jsonl(path: Path) -> list[Record]:
    records = []
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{str(path)!r} row {number} is not JSON: {error.msg}.") from None
            except RecursionError:
                raise ValueError(f"{str(path)!r} row {number} is nested too deeply.") from None
            if not isinstance(record, dict):
                raise ValueError(f"{str(path)!r} row {number} is not a JSON object.")
            records.append(record)
    return records


def _read_csv(path: Path) -> list[Record]:
    with path.open(encoding="utf-8-sig", newline="") as lines:
        csv.field_size_limit(1 << 30)  # an article is longer than the default cell
        try:
            records = list(csv.DictReader(lines, strict=True))
        except csv.Error as error:
            raise ValueError(f"{str(path)!r} is not CSV: {error}.") from None
    for number, record in enumerate(records, 2):
        if None in record or None in record.values():
            raise ValueError(f"{str(path)!r} line {number} has not as many cells as the header.")
    return records


def _read_parquet(path: Path) -> list[Record]:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{str(path)!r} is not a Parquet file: {reason}") from None


_READERS = {".jsonl": _read_jsonl, ".csv": _read_csv, ".parquet": _read_parquet}
SUFFIXES = tuple(_READERS)


def write_records(path: Path, records: Sequence[Record]) -> None:
    """Write rows as JSONL, CSV or Parquet by suffix; the file appears whole or not at all.

    Raises:
        ValueError: the suffix names no such format.
    """
    check_suffix(path)
    with replacing(path) as partial:
        if path.suffix == ".parquet":
            import pyarrow
            import pyarrow.parquet

            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(records)), partial)
        elif path.suffix == ".csv":
            with partial.open("w", encoding="utf-8", newline="") as target:
                writer = csv.DictWriter(target, list(records[0]) if records else [])
                writer.writeheader()
                writer.writerows(records)
        else:
            lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
            partial.write_text("".join(lines), encoding="utf-8")


def check_suffix(path: Path) -> None:
    """Raise ValueError where a suffix names no format, before any work is done."""
    if path.suffix not in _READERS:
        raise ValueError(
            f"can't write {str(path)!r}: give it one of the suffixes {', '.join(_READERS)}."
        )


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name that takes the place of `path` if the block succeeds."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
