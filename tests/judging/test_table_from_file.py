"""Log-probabilities of the user's own: one column a label, or `top_logprobs` lists."""

import csv
import json
import math

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scorecal.judging.table import load_table, table_from_file
from scorecal.judging.task import Task

P = {"0": 0.05, "1": 0.15, "2": 0.4, "3": 0.2}
LOGPROBS = {label: math.log(p) for label, p in P.items()}


def a_task(**changes):
    return Task("own", "sts.j2", {"text": "text"}, **{"scale": "0-3", **changes})


def write(path, rows):
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        with path.open("w", newline="") as target:
            writer = csv.DictWriter(target, list(rows[0]))
            writer.writeheader()
            writer.writerows(
                {
                    name: json.dumps(cell) if isinstance(cell, list | dict) else cell
                    for name, cell in row.items()
                }
                for row in rows
            )
    return path


FORMATS = pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])


@FORMATS
def test_one_column_a_label_is_read_as_it_stands(suffix, tmp_path):
    rows = [
        {"id": "a", "split": "validation", "group": "g1", "score": 2.5, **LOGPROBS},
        {"id": "b", "split": "test", "group": "g1", "score": None, **LOGPROBS, "3": -30.0},
    ]
    file = write(tmp_path / f"own{suffix}", rows)
    table = load_table(str(file), a_task(splits={"dev": "validation", "test": "test"}))
    assert (table.ids, table.groups, table.splits) == (["a", "b"], ["g1", "g1"], ["dev", "test"])
    assert table.labels == ("0", "1", "2", "3")
    assert table.values.tolist() == [0, 1, 2, 3]
    assert table.logprobs[0].tolist() == pytest.approx(list(LOGPROBS.values()))
    assert table.logprobs[1].tolist()[3] == -30
    assert table.label_mass.tolist() == pytest.approx([0.8, 0.6])
    assert table.gold[0] == 2.5
    assert table.gold[1].isnan()
    assert not table.censored.any()
    assert not table.leak.any()
    assert table.identity == table.evidence == {}


TOP = [
    {"token": "2", "logprob": math.log(0.4)},
    {"token": "The", "logprob": math.log(0.3)},
    {"token": "1", "logprob": math.log(0.1)},
]


@FORMATS
@pytest.mark.parametrize("form", ["list", "dict"])
def test_top_logprobs_are_read_in_the_forms_that_servers_return(form, suffix, tmp_path):
    cells = [TOP, [*TOP[:2], {"token": "0", "logprob": math.log(0.05)}]]
    if form == "dict":
        cells = [{entry["token"]: entry["logprob"] for entry in cell} for cell in cells]
    rows = [{"score": 1.0, "top_logprobs": cell} for cell in cells]
    table = table_from_file(write(tmp_path / f"own{suffix}", rows), a_task())
    assert table.ids == ["1", "2"]
    assert table.splits == ["dev", "dev"]
    assert table.censored.tolist() == [[True, False, False, True], [False, True, False, True]]
    # Listed 0.8: what is left, 0.2, is more than the lowest listed, 0.1.
    expected = [[0.1, 0.1, 0.4, 0.1], [0.05, 0.05, 0.4, 0.05]]
    for row, probabilities in zip(table.logprobs.exp().tolist(), expected, strict=True):
        assert row == pytest.approx(probabilities)
    assert table.label_mass.isnan().all()


@pytest.mark.parametrize(
    ("listed", "bound"),
    [
        ({"2": 0.5, "3": 0.3}, 0.2),  # left: 0.2 < lowest: 0.3
        ({"2": 0.5, "3": 0.1}, 0.1),  # left: 0.4 > lowest: 0.1
        ({"2": 0.5, "x": 0.25, "y": 0.2}, 0.05),  # tokens that are no label count
        ({"2": 0.9, " 2": 0.06, "x": 0.01}, 0.01),
    ],
)
def test_a_label_absent_from_the_list_is_bounded_by_lowest_and_by_what_is_left(
    listed, bound, tmp_path
):
    cell = [{"token": token, "logprob": math.log(p)} for token, p in listed.items()]
    file = write(tmp_path / "own.jsonl", [{"score": 1, "top_logprobs": cell}])
    table = table_from_file(file, a_task())
    assert table.censored[0].tolist()[0]
    assert table.logprobs[0, 0].exp().item() == pytest.approx(bound)
    assert table.logprobs[0, 0].item() <= min(math.log(p) for p in listed.values()) + 1e-9


def test_a_list_that_leaves_nothing_bounds_by_next_to_nothing(tmp_path):
    cell = [{"token": "2", "logprob": 0.0}]
    file = write(tmp_path / "own.jsonl", [{"score": 1, "top_logprobs": cell}])
    table = table_from_file(file, a_task())
    assert table.logprobs.isfinite().all()
    assert table.logprobs[0, 0] < -80


def test_surface_forms_of_a_label_are_added(tmp_path):
    listed = {"3": 0.2, " 3": 0.3, "\n2": 0.1, "0": 0.05, "1": 0.05}
    cell = [{"token": t, "logprob": math.log(p), "bytes": None} for t, p in listed.items()]
    file = write(tmp_path / "own.jsonl", [{"score": 1, "top_logprobs": cell}])
    table = table_from_file(file, a_task())
    assert table.logprobs.exp()[0].tolist() == pytest.approx([0.05, 0.05, 0.1, 0.5])
    assert table.label_mass.tolist() == pytest.approx([0.7])
    assert not table.censored.any()


ROW = {"score": 1, **LOGPROBS}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"2": 0.4}, "row 2: 0.4 for label '2' is no log-probability"),
        ({"2": "low"}, "row 2: 'low' for label '2' is no log-probability"),
        ({"2": None}, "row 2: None for label '2' is no log-probability"),
        ({"2": float("nan")}, "row 2: nan for label '2' is no log-probability"),
        ({"2": -0.01}, "row 2: the labels' probabilities sum to 1.39, more than 1"),
        ({"score": 3.5}, r"0\.\.3, got 3.5 in .*row 2"),
        ({"score": "good"}, "row 2: the gold score 'good' is not a number"),
    ],
)
def test_a_row_of_columns_that_is_not_log_probabilities_is_named(change, message, tmp_path):
    file = write(tmp_path / "own.jsonl", [ROW, {**ROW, **change}])
    with pytest.raises(ValueError, match=message):
        table_from_file(file, a_task())


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ([], "row 1: `top_logprobs` is no list"),
        (None, "row 1: `top_logprobs` is no list"),
        ("not JSON", "row 1: `top_logprobs` is no list"),
        ([-1.0], r"holds -1.0, not \{token, logprob\}"),
        ([{"token": "2"}], r"holds .*, not \{token, logprob\}"),
        ([{"token": "2", "logprob": 1.5}], "1.5 for label '2' is no log-probability"),
        ([{"token": "2", "logprob": -0.01}, {"token": "3", "logprob": -0.5}], "sum to 1.6"),
    ],
)
def test_a_list_that_is_no_list_of_log_probabilities_is_named(cell, message, tmp_path):
    file = write(tmp_path / "own.jsonl", [{"score": 1, "top_logprobs": cell}])
    with pytest.raises(ValueError, match=message):
        table_from_file(file, a_task())


def test_a_missing_label_column_is_named_with_what_there_is(tmp_path):
    row = {name: value for name, value in ROW.items() if name != "3"}
    file = write(tmp_path / "own.jsonl", [row])
    with pytest.raises(ValueError, match=r"a column for the label '3'; it has score, 0, 1, 2"):
        table_from_file(file, a_task())


def test_a_missing_gold_column_is_named_unless_the_rows_are_new(tmp_path):
    file = write(tmp_path / "own.jsonl", [LOGPROBS])
    with pytest.raises(ValueError, match="row 1 has no column 'score'"):
        table_from_file(file, a_task())
    assert table_from_file(file, a_task(), new=True).gold.isnan().all()


def test_a_top_list_cannot_tell_a_label_from_one_that_begins_with_it(tmp_path):
    file = write(tmp_path / "own.jsonl", [{"score": 1, "top_logprobs": TOP}])
    with pytest.raises(ValueError, match="can't tell the label '1' from one that begins with it"):
        table_from_file(file, a_task(scale="1-10"))
    columns = {str(label): math.log(0.1) for label in range(1, 11)}
    file = write(tmp_path / "columns.jsonl", [{"score": 1, **columns}])
    assert table_from_file(file, a_task(scale="1-10")).logprobs.shape == (1, 10)


def test_ids_must_be_unique(tmp_path):
    file = write(tmp_path / "own.jsonl", [{"id": "x", **ROW}, {"id": "x", **ROW}])
    with pytest.raises(ValueError, match="the id 'x' stands twice"):
        table_from_file(file, a_task())


def test_zero_probability_is_a_finite_log_probability(tmp_path):
    file = tmp_path / "own.csv"
    file.write_text("score,0,1,2,3\n1,-inf,-1,-1,-inf\n")
    table = table_from_file(file, a_task())
    assert table.logprobs.isfinite().all()
    assert table.logprobs[0, 0] < -80


def test_gold_factor_and_range_and_a_group_column_of_ones_own_apply(tmp_path):
    task = a_task(gold="mark", gold_factor=10.0, gold_range=(0.0, 30.0), group="document")
    file = write(tmp_path / "own.jsonl", [{"mark": 2.5, "document": 7, **LOGPROBS}])
    table = table_from_file(file, task)
    assert table.gold.tolist() == [25]
    assert table.values.tolist() == [0, 10, 20, 30]
    assert table.groups == ["7"]


@pytest.mark.parametrize("name", ["no-such-table", "no-such-file.jsonl"])
def test_a_table_that_is_not_there_is_named(name):
    with pytest.raises(ValueError, match=rf"no (table|file) '{name}'"):
        load_table(name, a_task())


def test_rows_of_a_table_are_kept_together(tmp_path):
    rows = [{"id": str(i), "group": f"g{i}", "score": i, **LOGPROBS} for i in range(4)]
    table = table_from_file(write(tmp_path / "own.jsonl", rows), a_task())
    kept = table.rows(table.gold > 1)
    assert (kept.ids, kept.groups, kept.gold.tolist()) == (["2", "3"], ["g2", "g3"], [2, 3])
    assert kept.logprobs.shape == kept.censored.shape == (2, 4)
    assert kept.labels == table.labels
