"""Several processes, as Lightning starts them, fill one store."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest


class _Ranks:
    """`python -m train elicit` on a job's pairs, in processes of its own."""

    def __init__(self, job, judge: str, cache: Path) -> None:
        job.parts()
        self.job, self.judge, self.cache = job, judge, cache

    def start(self, store: Path, devices: int, *more: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-m", "train", "elicit", "--config", "sts.yaml",
             "--data.path", str(self.job.data), "--data.store", str(store),
             "--data.judge.model", self.judge, "--data.judge.init_args.dtype", "float32",
             "--data.judge.init_args.batch_tokens", "150", "--trainer.devices", str(devices),
             *more],
            cwd=self.job.data.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "SCORECAL_CACHE": str(self.cache)}, start_new_session=True,
        )  # fmt: skip


def parts(store: Path) -> list[Path]:
    return sorted((store / "parts").glob("*.parquet"))


def equal(one: Path, other: Path) -> None:
    left, right = (pq.read_table(path / "judgements.parquet").to_pylist() for path in (one, other))
    assert [row["prompt"] for row in left] == [row["prompt"] for row in right]
    for ours, theirs in zip(left, right, strict=True):
        # Each process has fewer threads, which add in another order.
        assert ours["logprobs"] == pytest.approx(theirs["logprobs"], abs=1e-5)
        if ours["kind"].startswith("random"):
            assert ours["perplexity"] == pytest.approx(theirs["perplexity"], rel=1e-5)


def test_two_processes_fill_one_store_and_a_killed_one_is_made_up_for(job, tiny, tmp_path):
    ranks = _Ranks(job, tiny("llama"), tmp_path / "cache")
    alone = tmp_path / "alone"
    out, err = ranks.start(alone, 1).communicate(timeout=300)
    assert out == f"{alone}\n", err

    both = tmp_path / "both"
    running = ranks.start(both, 2)
    while not parts(both) and running.poll() is None:
        time.sleep(0.01)
    children = subprocess.run(
        ["pgrep", "-P", str(running.pid)], capture_output=True, text=True, check=False
    ).stdout.split()
    for child in children[-1:]:
        os.kill(int(child), signal.SIGKILL)
    running.communicate(timeout=300)
    assert running.returncode != 0
    assert not (both / "manifest.json").exists()
    left = len(parts(both))

    out, err = ranks.start(both, 2).communicate(timeout=300)
    assert out == f"{both}\n", err  # one rank speaks
    assert left > 0
    assert not (both / "parts").exists()
    equal(alone, both)
    assert not list(job.data.parent.glob("runs*"))


def test_what_the_first_process_has_written_all_processes_judge(job, tiny, tmp_path):
    ranks = _Ranks(job, tiny("llama"), tmp_path / "cache")
    stores = tmp_path / "alone", tmp_path / "both"
    for devices, store in enumerate(stores, 1):
        out, err = ranks.start(store, devices, "--data.samples", "5").communicate(timeout=300)
        assert out == f"{store}\n", err
    equal(*stores)
    texts = [pq.read_table(store / "judgements.parquet")["text"].to_pylist() for store in stores]
    assert texts[0] == texts[1]
    assert len(list(filter(None, texts[0]))) == 5
