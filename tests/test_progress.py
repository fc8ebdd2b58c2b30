"""Notices and bars: on stderr, bars on a terminal only, nothing when quiet."""

import os
import pty
import subprocess
import sys

import pytest
from test_commands import BRING, logprob_rows
from test_report_command import write

from scorecal import progress

FIT = ("fit", *BRING, "--data.table", "mine.jsonl")


@pytest.fixture(autouse=True)
def loud():
    yield
    progress.set_quiet(False)


def test_things_come_one_by_one_and_unchanged():
    assert list(progress.tracked({"a": 1, "b": 2}.items(), "letters")) == [("a", 1), ("b", 2)]


def test_a_notice_is_a_line_on_stderr_unless_quiet(capsys):
    progress.notice("once")
    progress.set_quiet(True)
    progress.notice("never")
    assert capsys.readouterr() == ("", "once\n")


def test_a_quiet_fit_says_nothing_but_its_results(command, tmp_path):
    write(
        tmp_path / "mine.jsonl",
        [*logprob_rows(), {**logprob_rows()[0], "id": "new", "score": None}],
    )
    loud, quiet = command(*FIT), command(*FIT, "--quiet", "true")
    assert "left out 1 items without a gold score" in loud.err
    assert quiet.err == ""
    assert quiet.out.splitlines()[:-1] == loud.out.splitlines()[:-1]
    assert "quiet" not in (tmp_path / quiet.out.splitlines()[-1] / "config.yaml").read_text()


def test_an_error_is_said_even_when_quiet(command):
    finished = command("fit", "--config", "sts.yaml", "--data.table", "nowhere", "--quiet", "true")
    assert (finished.status, finished.err.count("\n")) == (2, 1)


def test_there_are_bars_on_a_terminal_and_none_in_a_pipe(command, tmp_path):
    write(tmp_path / "mine.jsonl", logprob_rows())
    assert "━" not in command(*FIT).err
    ours, theirs = pty.openpty()
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONWARNINGS"}
    environment |= {"TERM": "xterm", "COLUMNS": "80"}
    with subprocess.Popen(
        [sys.executable, "-m", "train", *FIT],
        cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, stderr=theirs,
    ) as process:  # fmt: skip
        os.close(theirs)
        shown = b""
        while True:
            try:
                part = os.read(ours, 4096)
            except OSError:  # the terminal is gone
                break
            if not part:
                break
            shown += part
    os.close(ours)
    assert process.returncode == 0
    text = shown.decode()
    assert "━" in text
    assert "fitting" in text
    assert "bootstrap 9/9" in text


def test_the_final_table_fits_a_terminal(command, tmp_path):
    write(tmp_path / "mine.jsonl", logprob_rows())
    lines = command(*FIT).out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.endswith("test items"))
    table = lines[start : start + 13]
    assert max(map(len, table)) <= 80
    assert table[1].split() == ["raw", "calibrated", "difference"]
    assert table[-2].startswith("constant: Spearman –, MSE ")
    assert table[-1].startswith("ridge reference: Spearman .")
