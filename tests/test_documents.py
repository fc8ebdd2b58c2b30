"""What README and docs tell a user to type is understood, and what they link to is there."""

import re
import shlex
from pathlib import Path

import pytest

from scorecal.commands import compare_parser, read_data, report_parser

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS = sorted(
    {
        line.strip()
        for document in DOCUMENTS
        for line in document.read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
        if re.match(r"\s*(python -m train|scorecal) [a-z]+ ", line)
    }
)


@pytest.mark.parametrize("line", COMMANDS)
def test_a_documented_command_is_understood(line: str, command) -> None:
    _, _, typed = line.partition(" train ") if "train" in line else line.partition(" ")
    arguments = shlex.split(typed, comments=True)
    if arguments[0] == "compare":  # no single config to print
        for config in compare_parser().parse_args(arguments[1:]).config:
            assert read_data(config).task.name
        return
    if arguments[0] == "report":  # nor any
        assert report_parser().parse_args(arguments[1:]).runs
        return
    finished = command(*arguments, "--print_config")
    assert finished.status == 0, finished.err
    assert "model:" in finished.out


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\((?!https?://|#)([^)#]+)", document.read_text(encoding="utf-8"))
    for link in links:
        assert (document.parent / link).exists(), link


def test_every_table_and_config_that_a_config_names_ships() -> None:
    for config in (ROOT / "configs").glob("*.yaml"):
        for table in re.findall(r"^  table: ([\w.-]+)", config.read_text(), re.MULTILINE):
            assert (ROOT / "src" / "scorecal" / "tables" / table / "manifest.json").is_file()
