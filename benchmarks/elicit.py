"""Elicitation by every engine that a user could pick: same judge, same tokens, one run.

    benchmarks/peers/make.sh VENVS
    python benchmarks/elicit.py --judge FOLDER --gguf FILE --data FOLDER --venvs VENVS --out F.json

`--data` holds `stsb/dev.jsonl` and `summeval/all.jsonl`. Engines take turns within each repeat. A
run that `--out` holds already is not repeated, so a later command adds engines, workloads, repeats.
"""

import argparse
import contextlib
import hashlib
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from floor import linear_shapes, seconds_a_token

from scorecal.judging.judge import Prompt
from scorecal.judging.task import Item, Task, Template, load_items
from scorecal.judging.transformers import TransformersJudge
from scorecal.judging.trie import trie_tokens
from scorecal.judging.weights import folder_names

HERE = Path(__file__).parent
OURS, REFERENCE = "scorecal", "loop"
BATCH = 16


class Engine(NamedTuple):
    """A script in peers/, the virtual environment that runs it, and its batch size."""

    script: str
    venv: str = ""
    batch: int = BATCH


ENGINES = {
    REFERENCE: Engine("plain.py", batch=1),
    "batches": Engine("plain.py"),
    "lm-eval": Engine("harness.py", "lmeval"),
    "vllm": Engine("offline.py", "vllm"),
    "llama.cpp Q4": Engine("llama.py", "llamacpp"),
    OURS: Engine("own.py"),
}
WORKLOADS = ("sts", "summeval", "ranges")
PAIRS, ARTICLES, SUMMARIES = 500, 4, 16


def sts_prompts(data: Path, limit: int) -> list[Prompt]:
    """Pairs spread over the dev split, as `sts.yaml` asks about them."""
    fields = {"sentence1": "sentence1", "sentence2": "sentence2"}
    task = Task("sts", "sts.j2", fields, gold_range=(0, 5))
    items = load_items(task, str(data / "stsb"), roles=["dev"])
    count = min(limit or PAIRS, PAIRS)
    template = Template(task)
    return [template.prompt(items[number * len(items) // count]) for number in range(count)]


def summeval_prompts(data: Path, limit: int, scales: Iterable[str]) -> list[Prompt]:
    """Whole articles with all their summaries, on each scale."""
    lines = (data / "summeval" / "all.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines[: ARTICLES * SUMMARIES]]
    fields = {"article": "article", "summary": "summary"}
    prompts = []
    for scale in scales:
        template = Template(Task("coherence", str(HERE / "coherence.j2"), fields, scale=scale))
        for row in rows[: limit or None]:
            texts = {name: row[name] for name in fields}
            prompts.append(template.prompt(Item(row["id"], "", "", None, False, texts, row["id"])))
    return prompts


def workload_prompts(name: str, data: Path, limit: int) -> list[Prompt]:
    if name == "sts":
        return sts_prompts(data, limit)
    if name == "summeval":
        return summeval_prompts(data, limit, ["1-5"])
    return summeval_prompts(data, -(-limit // 4), ["0-4", "1-5", "2-6", "3-7"])


def job_rows(judge: TransformersJudge, prompts: list[Prompt]) -> list[dict[str, Any]]:
    """Prompts as scorecal's judge tokenises them, sorted so that prefix caches hit."""
    rows = []
    for prompt, encoded in zip(prompts, judge.encode(prompts), strict=True):
        labels = [form for level in judge.label_ids(prompt) for form in level]
        if any(len(label) > 1 for label in labels):
            raise SystemExit("this judge writes a label in several tokens; peers can't compare")
        ids = [int(token) for token in encoded.input_ids]
        rows.append({"ids": ids, "labels": [label[0] for label in labels], "prompt": prompt[:5]})
    return sorted(rows, key=lambda row: row["ids"])


def run(command: list[str], job: dict[str, Any]) -> dict[str, Any]:
    """Run one engine's process; what it reports and what it took."""
    with tempfile.TemporaryDirectory() as folder:
        paths = Path(folder) / "job.json", Path(folder) / "result.json"
        paths[0].write_text(json.dumps(job), encoding="utf-8")
        with (Path(folder) / "log").open("w+", encoding="utf-8", errors="replace") as log:
            started = time.time()
            process = subprocess.Popen(
                [*command, *map(str, paths)],
                stdout=log,
                stderr=log,
                cwd=folder,
                start_new_session=True,
            )
            try:
                process.wait()
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # what an engine leaves behind
            if process.returncode or not paths[1].exists():
                log.seek(0)
                raise RuntimeError("\n".join(log.read().splitlines()[-12:]))
        result = json.loads(paths[1].read_text(encoding="utf-8"))
        result["startup"] = result.pop("ready") - started
        result["process"] = paths[1].stat().st_mtime - started
        result["logprobs"] = {
            hashlib.sha256(json.dumps([row["ids"], row["labels"]]).encode()).hexdigest()[:12]: [
                round(value, 6) for value in values
            ]
            for row, values in zip(job["rows"], result["logprobs"], strict=True)
        }
    return result


def largest_difference(
    runs: list[dict[str, Any]], references: list[dict[str, Any]]
) -> float | None:
    """Largest difference in a label's probability over the prompts that both judged."""
    reference = {key: row for r in references for key, row in r["logprobs"].items()}
    pairs = [
        pair
        for r in runs
        for key, row in r["logprobs"].items()
        if key in reference
        for pair in zip(row, reference[key], strict=True)
    ]
    return max((abs(math.exp(one) - math.exp(other)) for one, other in pairs), default=None)


def spread(values: list[float], form: str = ".2f") -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    if len(values) == 1:
        return f"{middle:{form}}"
    return f"{middle:{form}} ({low:{form}}–{high:{form}})"


def summary(runs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Figures of each workload and engine; ratios are within a repeat, so that load cancels."""
    table: dict[str, dict[str, Any]] = {}
    runs = sorted(runs, key=lambda r: r["prompts"])  # the largest of several comes last
    ours = {(r["workload"], r["repeat"]): r for r in runs if r["engine"] == OURS}
    for workload, engine in sorted(
        {(r["workload"], r["engine"]) for r in runs},
        key=lambda pair: (WORKLOADS.index(pair[0]), list(ENGINES).index(pair[1])),
    ):
        mine = [r for r in runs if (r["workload"], r["engine"]) == (workload, engine)]
        largest = max(r["prompts"] for r in mine)
        mine = [r for r in mine if r["prompts"] == largest]
        pairs = [(r, ours[workload, r["repeat"]]) for r in mine if (workload, r["repeat"]) in ours]
        loops = [r for r in runs if (r["workload"], r["engine"]) == (workload, REFERENCE)]
        table.setdefault(workload, {})[engine] = {
            "prompts": largest,
            "startup": [r["startup"] for r in mine],
            "rate": [r["prompts"] / r["seconds"] for r in mine],
            "process": [r["process"] for r in mine],
            "peak_mb": max(r["peak_mb"] for r in mine),
            "floor": [r["seconds"] / r["floor"] for r in mine],
            # By prompt tokens: the same ratio as by prompts where both judged the same prompts.
            "slower": [r["seconds"] / r["tokens"] / (o["seconds"] / o["tokens"]) for r, o in pairs],
            "process_slower": [
                r["process"] / o["process"] for r, o in pairs if r["prompts"] == o["prompts"]
            ],
            "difference": largest_difference(mine, loops),
            "computed": [
                r["facts"]["tokens_computed"] / r["trie"]
                for r in mine
                if "tokens_computed" in r["facts"]
            ],
        }
    return table


def markdown(judge: str, table: dict[str, dict[str, Any]]) -> str:
    """The summary, to read."""
    lines = [
        f"{judge}; median (lowest–highest) of the repeats. Ratios: an engine's time over "
        f"{OURS}'s, by prompt tokens.",
        "",
        "| workload | engine | prompts | start-up s | prompts/s | × floor | steady ratio "
        "| process s | process ratio | peak MB | largest Δp |",
        "|---" * 11 + "|",
    ]
    for workload, engines in table.items():
        for engine, row in engines.items():
            cells = [
                workload,
                engine,
                str(row["prompts"]),
                spread(row["startup"], ".1f"),
                spread(row["rate"], ".1f"),
                spread(row["floor"]),
                spread(row["slower"]) if row["slower"] else "–",
                spread(row["process"], ".1f"),
                spread(row["process_slower"]) if row["process_slower"] else "–",
                f"{row['peak_mb']:.0f}",
                "–" if row["difference"] is None else f"{row['difference']:.1e}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
        if OURS in engines and engines[OURS]["computed"]:
            computed = engines[OURS]["computed"][0]
            lines.append(f"\n{workload}: {OURS} computes {computed:.3f} × the trie's tokens.\n")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--judge", type=Path, required=True, help="folder with safetensors")
    parser.add_argument("--gguf", type=Path, help="the same judge, for llama.cpp")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--venvs", type=Path, required=True, help="made by peers/make.sh")
    parser.add_argument("--out", type=Path, required=True, help="JSON, made or added to")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit", type=int, default=0, help="prompts at most; 0: all")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    return parser.parse_args()


def main() -> None:
    given = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no engine is left behind
    label = {**folder_names(given.judge), "dtype": given.dtype}
    record: dict[str, Any] = {**label, "runs": []}
    if given.out.exists():
        record = json.loads(given.out.read_text(encoding="utf-8"))
        if any(record[name] != value for name, value in label.items()):
            raise SystemExit(f"{given.out} is of another judge or dtype. Name another --out.")
    judge = TransformersJudge(str(given.judge), dtype=given.dtype, device="cpu")
    [warm_up] = job_rows(judge, [Prompt("Which of these? ", "", "", "", (("1",), ("2",)))])
    jobs = {
        name: job_rows(judge, workload_prompts(name, given.data, given.limit))
        for name in given.workloads
    }
    shapes, dtype = linear_shapes(str(given.judge)), getattr(torch, given.dtype)
    done = {(r["engine"], r["workload"], r["prompts"], r["repeat"]) for r in record["runs"]}
    failed = []
    for repeat in range(given.repeats):
        for workload, rows in jobs.items():
            lengths = [len(row["ids"]) for row in rows]
            sizes = {
                "prompts": len(rows),
                "tokens": sum(lengths),
                "trie": trie_tokens([array("i", row["ids"]) for row in rows]),
            }
            before = seconds_a_token(shapes, dtype)
            for name in given.engines:
                engine = ENGINES[name]
                if (name, workload, len(rows), repeat) in done:
                    continue
                python = given.venvs.absolute() / engine.venv / "bin/python"
                command = [str(python) if engine.venv else sys.executable]
                job = {
                    "judge": str(given.judge.absolute()),
                    "gguf": str(given.gguf.absolute()) if given.gguf else "",
                    "dtype": given.dtype,
                    "batch": engine.batch,
                    "warm_up": warm_up,
                    "rows": rows,
                }
                try:
                    result = run([*command, str(HERE.absolute() / "peers" / engine.script)], job)
                except RuntimeError as error:
                    failed.append(f"{name} on {workload}:\n{error}")
                    continue
                after = seconds_a_token(shapes, dtype)
                floor = sizes["trie"] * (before + after) / 2
                before = after
                key = {"engine": name, "workload": workload, "repeat": repeat}
                record["runs"].append({**key, **sizes, "floor": floor, **result})
                record["summary"] = summary(record["runs"])
                given.out.write_text(json.dumps(record), encoding="utf-8")
                rate = len(rows) / result["seconds"]
                sys.stderr.write(f"{repeat} {workload} {name}: {rate:.1f} prompts/s\n")
    print(markdown(f"{label['judge']}, {given.dtype}", summary(record["runs"])))
    if failed:
        raise SystemExit("\n".join(failed))


if __name__ == "__main__":
    main()
