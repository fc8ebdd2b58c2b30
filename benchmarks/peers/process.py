"""What every peer's process does: load, answer one prompt, judge the rest, write what it took.

    python PEER.py JOB.json RESULT.json

A job's rows hold `ids`, the prompt's token ids; `labels`, one token id a label; and `prompt`, the
text behind them.
"""

import importlib.metadata
import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Judge = Callable[[list[Row]], list[list[float]]]


def peak_mb() -> float:
    """Sum of the peak resident sets of this session's processes, this one and those it started."""
    total = 0
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            if os.getsid(int(status.parent.name)) == os.getsid(0):
                found = re.search(r"VmHWM:\s+(\d+)", status.read_text(encoding="utf-8"))
                total += int(found[1]) if found else 0
        except OSError:  # it ended meanwhile
            continue
    return total * 1024 / 1e6


def run(load: Callable[[dict[str, Any], dict[str, Any]], Judge], *packages: str) -> None:
    """Time the judge that `load(job, facts)` returns; `facts` goes into the result."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    facts: dict[str, Any] = {name: importlib.metadata.version(name) for name in packages}
    judge = load(job, facts)
    judge([job["warm_up"]])
    ready = time.time()
    logprobs = judge(job["rows"])
    seconds = time.time() - ready
    result = {"ready": ready, "seconds": seconds, "peak_mb": peak_mb(), "facts": facts}
    result["logprobs"] = logprobs
    Path(sys.argv[2]).write_text(json.dumps(result), encoding="utf-8")
