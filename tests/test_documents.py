"""What README and docs tell a user to type is understood, and what they link to is there."""

import json
import re
import shlex
from pathlib import Path

import pytest

from scorecal.commands import read_comparison, report_parser

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
        assert all(data.task.name for data in read_comparison(arguments[1:])[1])
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


def test_the_readmes_result_table_is_that_of_the_results() -> None:
    tasks = json.loads((ROOT / "results" / "tables.json").read_text())["tasks"]
    found: dict[str, dict[tuple[str, str], dict]] = {}
    for records in tasks.values():
        for record in records:
            methods = {(row["name"], row["temperature"]): row for row in record["methods"]}
            found[record["table"]] = methods
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = text.partition("<!-- results/tables.json -->\n")[2].partition("\n\n")[0]
    header, _, *lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()
    ]
    names = ["stsb", "semrel", "summeval-coherence", "helpsteer2-helpfulness", "hanna-engagement"]
    columns = [
        next(key for key in found if key.startswith(name) and f"-{size.lower()}-" in key)
        for cell in header[1:]
        for short, size in [cell.split(" ", 1)]
        for name in names
        if name.startswith(short.lower().replace("-", "")[:4])
    ]
    assert len(columns) == len(header) - 1
    assert len(lines) >= 7
    for label, *cells in lines:
        name, _, temperature = label.replace("*", "").partition(", T = ")
        for key, cell in zip(columns, cells, strict=True):
            row = next(
                row
                for (own, stated), row in found[key].items()
                if own == name and (not temperature or stated == temperature)
            )
            shown = []
            for metric, digits in (("spearman", 3), ("mse", 2)):
                value = row["figures"][metric]["estimate"]
                shown.append("–" if value is None else f"{value:.{digits}f}".replace("0.", ".", 1))
            assert cell.replace("*", "") == " / ".join(shown), (label, key)
