"""Peak memory of an elicitation, above its process with imports and model: flat in the items?

    python benchmarks/memory.py [--items 1000 10000 100000] [--judge FOLDER]

Without `--judge`, a one-layer network with random weights, made here. Linux.
"""

import argparse
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tiny import WORDS, save_tiny_judge


def resident(what: str) -> float:
    """Megabytes: `VmRSS` now, `VmHWM` at most."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    found = re.search(rf"{what}:\s+(\d+) kB", status)
    assert found
    return int(found[1]) * 1024 / 1e6


def measure(judge_folder: str, count: int) -> None:
    """Elicit `count` items in this process and print what it took."""
    import torch

    from scorecal.judging.elicit import elicit
    from scorecal.judging.judge import Prompt
    from scorecal.judging.plan import item_questions
    from scorecal.judging.task import Item, Task, templates
    from scorecal.judging.transformers import TransformersJudge

    torch.set_num_threads(1)  # memory is measured, not speed
    judge = TransformersJudge(judge_folder, dtype="float32", device="cpu")
    list(judge.judge([Prompt("Which of these?", "", "", "", (("1",), ("2",)))]))
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is the loading's
    before, started = resident("VmRSS"), time.perf_counter()

    task = Task("memory", "sts.j2", {"sentence1": "sentence1", "sentence2": "sentence2"})
    asked, source = templates(task), random.Random(0)
    items = []
    for number in range(count):
        fields = {name: " ".join(source.choices(WORDS, k=6)) for name in task.fields}
        items.append(Item(f"i{number}", f"i{number}", "dev", None, False, fields, ""))
    questions = item_questions(asked, items)
    data = resident("VmRSS") - before
    with tempfile.TemporaryDirectory() as folder:
        elicit(judge, task, asked, items, questions, str(Path(folder) / "store"))
    seconds = time.perf_counter() - started
    peak = resident("VmHWM") - before
    print(f"{count:8} {before:11.0f} {data:12.0f} {peak:14.0f} {seconds:9.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--judge", default="")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        measure(given.judge, *given.items)
        return
    print("   items   before MB   + its data   + peak of all   seconds", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        judge = given.judge
        if not judge:
            save_tiny_judge(Path(folder))
            judge = folder
        for count in given.items:  # each in a process of its own
            command = [sys.executable, __file__, "--measure", "--judge", judge]
            subprocess.run([*command, "--items", str(count)], check=True)


if __name__ == "__main__":
    main()
