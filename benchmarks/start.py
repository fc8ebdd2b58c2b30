"""Time and memory of whole commands, as ratios to importing what they stand on.

    python benchmarks/start.py [--runs 5]

Commands take turns within each round, so that a busy machine slows them alike.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time

COMMANDS = {
    "import": [sys.executable, "-c", "import torch, lightning.pytorch"],
    "--help": [sys.executable, "-m", "train", "--help"],
    "compare": [
        sys.executable,
        "-m",
        "train",
        "compare",
        "--config",
        "sts.yaml",
        "--draws",
        "0",
    ],  # fmt: skip
    "fit": [sys.executable, "-m", "train", "fit", "--config", "sts.yaml"],
}


def measure(command: list[str], folder: str) -> tuple[float, float]:
    """Seconds and peak resident megabytes of one process."""
    started = time.perf_counter()
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    if os.waitstatus_to_exitcode(status):
        raise SystemExit(f"{' '.join(command)} failed")
    scale = 1 if sys.platform == "darwin" else 1024
    return seconds, usage.ru_maxrss * scale / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    memory: dict[str, float] = dict.fromkeys(COMMANDS, 0.0)
    with tempfile.TemporaryDirectory() as folder:
        for command in COMMANDS.values():
            measure(command, folder)  # the first run fills the disk cache
        for _ in range(runs):
            for name, command in COMMANDS.items():
                taken, peak = measure(command, folder)
                seconds[name].append(taken)
                memory[name] = max(memory[name], peak)
    print("command   seconds (min, median, max)   × import (median)   peak MB")
    for name, taken in seconds.items():
        ratio = statistics.median(
            one / base for one, base in zip(taken, seconds["import"], strict=True)
        )
        low, middle, high = min(taken), statistics.median(taken), max(taken)
        spread = f"{low:5.2f} {middle:5.2f} {high:5.2f}"
        print(f"{name:8}  {spread:29}{ratio:8.2f}{memory[name]:21.0f}")


if __name__ == "__main__":
    main()
