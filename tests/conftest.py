"""What tests of several wings share."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import hypothesis
import pytest

from scorecal.cli import main

# The same examples on every run, however slow the machine is.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")


class Finished(NamedTuple):
    """A command that has ended."""

    status: int
    out: str
    err: str


Command = Callable[..., Finished]


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Command:
    """Runs a command line in `tmp_path`, as a shell would."""

    def run(*arguments: object) -> Finished:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["train", *map(str, arguments)])
        status = 0
        try:
            main()
        except SystemExit as stop:
            status = int(stop.code or 0)
        out, err = capsys.readouterr()
        return Finished(status, out, err)

    return run


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`fit --config demo.yaml` in an empty folder: SmolLM2 judges, then the head is fitted."""
    folder = tmp_path_factory.mktemp("demo")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONWARNINGS"}
    finished = subprocess.run(
        [sys.executable, "-m", "train", "fit", "--config", "demo.yaml"],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.splitlines()[-1] == "runs/demo/version_0"
    return folder


@pytest.fixture(scope="session")
def store(demo: Path) -> Path:
    [folder] = (demo / "stores").iterdir()
    return folder
