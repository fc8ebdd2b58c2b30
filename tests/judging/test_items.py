"""Items from files, folders and the hub, and what is said about bad rows."""

import csv
import json
import math

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scorecal.judging.task import Task, load_items, load_new_items

FIELDS = {"sentence1": "sentence1", "sentence2": "sentence2"}


def a_task(**changes):
    return Task("sts", "sts.j2", **{"fields": FIELDS, **changes})


def rows(count=4):
    return [
        {
            "id": f"r{number}",
            "split": "dev" if number % 2 == 0 else "test",
            "sentence1": f"left {number}",
            "sentence2": f"right {number}",
            "score": float(number),
        }
        for number in range(count)
    ]


def write(path, records):
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in records), encoding="utf-8")
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(records), path)
    else:
        with path.open("w", newline="", encoding="utf-8") as target:
            writer = csv.DictWriter(target, list(records[0]))
            writer.writeheader()
            writer.writerows(records)
    return str(path)


FORMATS = pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])


@FORMATS
def test_a_single_file_says_by_its_split_column_which_row_is_which(suffix, tmp_path):
    records = [*rows(), {**rows(5)[4], "split": "train"}]
    items = load_items(a_task(), write(tmp_path / f"pairs{suffix}", records))
    assert [(item.id, item.split, item.gold) for item in items] == [
        ("r0", "dev", 0), ("r2", "dev", 2), ("r1", "test", 1), ("r3", "test", 3),
    ]  # fmt: skip
    assert items[0].fields == {"sentence1": "left 0", "sentence2": "right 0"}
    assert items[0].group == "r0"
    assert items[3].where.endswith(f"pairs{suffix} row 4")
    assert not any(item.leak for item in items)


@FORMATS
@pytest.mark.parametrize("names", [("dev", "test"), ("validation", "test")])
def test_a_folder_holds_one_file_a_split_under_either_name(names, suffix, tmp_path):
    records = [{**row, "split": None} for row in rows()]
    for name, part in zip(names, (records[:3], records[3:]), strict=True):
        write(tmp_path / f"{name}{suffix}", part)
    write(tmp_path / f"train{suffix}", rows())  # of no concern
    items = load_items(a_task(splits={"dev": "validation", "test": "test"}), str(tmp_path))
    assert [(item.id, item.split) for item in items] == [
        ("r0", "dev"), ("r1", "dev"), ("r2", "dev"), ("r3", "test"),
    ]  # fmt: skip


def test_a_split_column_may_use_the_sources_names(tmp_path):
    records = [{**row, "split": {"dev": "validation"}.get(row["split"], row["split"])}
               for row in rows()]  # fmt: skip
    task = a_task(splits={"dev": "validation", "test": "test"})
    items = load_items(task, write(tmp_path / "pairs.jsonl", records))
    assert [item.split for item in items] == ["dev", "dev", "test", "test"]


def test_columns_are_mapped_and_groups_kept(tmp_path):
    records = [{"split": split, "a": 1, "b": "x", "gold": 2, "doc": doc}
               for split, doc in (("dev", 7), ("dev", 7), ("test", 8))]  # fmt: skip
    task = a_task(fields={"sentence1": "a", "sentence2": "b"}, gold="gold", group="doc")
    items = load_items(task, write(tmp_path / "pairs.jsonl", records))
    assert [item.id for item in items] == ["dev-0", "dev-1", "test-2"]
    assert [item.group for item in items] == ["7", "7", "8"]
    assert items[0].fields == {"sentence1": "1", "sentence2": "x"}


def test_a_split_that_is_a_list_is_no_split(tmp_path):
    records = [
        {**row, "split": ["dev"]} if number == 0 else row for number, row in enumerate(rows())
    ]
    items = load_items(a_task(), write(tmp_path / "pairs.jsonl", records))
    assert len(items) == len(records) - 1


def test_new_items_need_no_group(tmp_path):
    path = write(tmp_path / "new.jsonl", [{"id": "a", "sentence1": "x", "sentence2": "y"}])
    [item] = load_new_items(a_task(group="doc"), path)
    assert (item.id, item.gold) == ("a", None)


def test_text_survives_every_format(tmp_path):
    text = 'naïve "quoted", 犬\nnew line <|im_end|> \\n'
    records = [{**row, "sentence1": text} for row in rows(2)]
    for suffix in (".jsonl", ".csv", ".parquet"):
        items = load_items(a_task(), write(tmp_path / f"pairs{suffix}", records))
        assert items[0].fields["sentence1"] == text


def test_a_byte_order_mark_is_no_part_of_the_first_column(tmp_path):
    for suffix in (".jsonl", ".csv"):
        file = tmp_path / f"pairs{suffix}"
        write(file, rows())
        file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
        assert load_items(a_task(), str(file))[0].id == "r0"


# Gold


@pytest.mark.parametrize(
    ("task", "gold", "expected"),
    [
        ({}, 3.5, 3.5),
        ({"gold_factor": 5.0}, 0.7, 3.5),
        ({"gold_range": (0.0, 1.0)}, 0.7, 0.7),
        ({"gold_range": (0.0, 1.0), "gold_factor": 0.01}, 70, 0.7),
        ({"scale": "1-10"}, 10, 10),
        ({"gold_range": (0.0, 0.3), "gold_factor": 0.1}, 3, 0.3),  # 0.1 * 3 > 0.3 by rounding
    ],
)
def test_gold_is_multiplied_by_its_factor_and_kept_in_its_range(task, gold, expected, tmp_path):
    records = [{**row, "score": gold} for row in rows(2)]
    items = load_items(a_task(**task), write(tmp_path / "pairs.jsonl", records))
    assert items[0].gold == pytest.approx(expected)
    low, high = a_task(**task).values()[:: len(a_task(**task).values()) - 1]
    assert low <= items[0].gold <= high


@pytest.mark.parametrize(
    ("scale", "gold_range", "values"),
    [
        ("0-5", None, [0, 1, 2, 3, 4, 5]),
        ("0-5", (0.0, 1.0), [0, 0.2, 0.4, 0.6, 0.8, 1]),
        ("2-6", (0.0, 4.0), [0, 1, 2, 3, 4]),
        ("1-3", (-1.0, 1.0), [-1, 0, 1]),
        ("0-1:0.5", None, [0, 0.5, 1]),
    ],
)
def test_labels_are_spread_evenly_over_golds_range(scale, gold_range, values):
    assert a_task(scale=scale, gold_range=gold_range).values() == pytest.approx(values)


@pytest.mark.parametrize("gold_range", [(1.0, 1.0), (5.0, 0.0)])
def test_a_range_that_does_not_rise_is_refused(gold_range):
    with pytest.raises(ValueError, match="`data.task.gold_range` must rise"):
        a_task(gold_range=gold_range).values()


@pytest.mark.parametrize("gold", [5.5, -0.1, "6", math.inf])
def test_gold_outside_the_range_is_named_by_file_row_and_value(gold, tmp_path):
    records = rows()
    records[2]["score"] = gold
    with pytest.raises(ValueError, match=r"gold scores must lie on the scale 0\.\.5") as raised:
        load_items(a_task(), write(tmp_path / "pairs.jsonl", records))
    assert f"got {gold!r}" in str(raised.value)
    assert "pairs.jsonl row 3" in str(raised.value)
    assert "gold_range" in str(raised.value)


def test_gold_that_is_no_number_is_named(tmp_path):
    records = rows()
    records[1]["score"] = "very good"
    with pytest.raises(ValueError, match="row 2: the gold score 'very good' is not a number"):
        load_items(a_task(), write(tmp_path / "pairs.jsonl", records))


@pytest.mark.parametrize(
    ("suffix", "gold"), [(".jsonl", None), (".jsonl", math.nan), (".csv", ""), (".csv", "nan"),
                         (".parquet", None), (".parquet", math.nan)],
)  # fmt: skip
def test_missing_gold_is_none_or_refused(suffix, gold, tmp_path):
    records = rows()
    records[2]["score"] = gold
    path = write(tmp_path / f"pairs{suffix}", records)
    assert [item.gold for item in load_items(a_task(), path)] == [0, None, 1, 3]
    with pytest.raises(ValueError, match=r"row 3 has no gold score.*missing_gold drop"):
        load_items(a_task(), path, missing_gold="error")


# Bad rows


@pytest.mark.parametrize("column", ["sentence2", "score", "doc"])
def test_a_missing_column_is_named_with_what_there_is(column, tmp_path):
    records = [{**row, "doc": 1} for row in rows()]
    for record in records:
        del record[column]
    with pytest.raises(ValueError, match=rf"row 1 has no column '{column}'; it has id, split"):
        load_items(a_task(group="doc"), write(tmp_path / "pairs.jsonl", records))


def test_a_null_text_is_named(tmp_path):
    records = rows()
    records[0]["sentence2"] = None
    with pytest.raises(ValueError, match="row 1 has no text in column 'sentence2'"):
        load_items(a_task(), write(tmp_path / "pairs.jsonl", records))


def test_a_file_without_a_split_column_says_what_to_do(tmp_path):
    records = [{name: row[name] for name in row if name != "split"} for row in rows()]
    with pytest.raises(ValueError, match=r"no column 'split' that says dev or test.*folder"):
        load_items(a_task(), write(tmp_path / "pairs.jsonl", records))


def test_a_split_without_rows_is_named(tmp_path):
    records = [{**row, "split": "dev"} for row in rows()]
    path = write(tmp_path / "pairs.jsonl", records)
    with pytest.raises(ValueError, match="no row of .* belongs to the split 'test'"):
        load_items(a_task(), path)
    assert len(load_items(a_task(), path, roles=("dev",))) == 4


def test_a_folder_without_a_splits_file_or_with_two_is_named(tmp_path):
    write(tmp_path / "dev.jsonl", rows())
    with pytest.raises(ValueError, match=r"holds 0 files for the split 'test'"):
        load_items(a_task(), str(tmp_path))
    write(tmp_path / "dev.csv", rows())
    with pytest.raises(ValueError, match=r"holds 2 files for the split 'dev'.*dev\.jsonl"):
        load_items(a_task(), str(tmp_path))


def test_an_id_that_stands_twice_is_named_with_both_places(tmp_path):
    records = rows()
    records[3]["id"] = "r0"
    with pytest.raises(ValueError, match=r"the id 'r0' stands twice: .*row 1 and .*row 4"):
        load_items(a_task(), write(tmp_path / "pairs.jsonl", records))


# Leaks


@pytest.mark.parametrize(
    ("pair", "leaks"),
    [
        (("left 0", "right 0"), True),
        (("right 0", "left 0"), True),
        (("LEFT 0", "Right  0 "), True),
        (("STRASSE", "right 0"), False),
        (("left 0", "left 0"), False),
        (("left 0", "right 1"), False),
    ],
)
def test_a_pair_that_stands_in_both_splits_in_either_order_is_flagged(pair, leaks, tmp_path):
    records = rows()
    records[3]["sentence1"], records[3]["sentence2"] = pair
    items = {i.id: i.leak for i in load_items(a_task(), write(tmp_path / "p.jsonl", records))}
    assert items == {"r0": leaks, "r1": False, "r2": False, "r3": leaks}


def test_a_pair_that_stands_twice_in_one_split_is_no_leak(tmp_path):
    records = rows()
    for name in FIELDS:
        records[2][name] = records[0][name]
    items = load_items(a_task(), write(tmp_path / "pairs.jsonl", records))
    assert not any(item.leak for item in items)


# The hub


@FORMATS
def test_a_hub_id_is_read_in_the_hubs_layout(suffix, tmp_path, monkeypatch):
    """`datasets` takes a folder of that name in the working directory for the hub's copy."""
    folder = tmp_path / "mteb" / "stsbenchmark-sts" / "data"
    folder.mkdir(parents=True)
    records = [{name: row[name] for name in ("sentence1", "sentence2", "score")} for row in rows()]
    for split, part in (("train", records), ("validation", records[:3]), ("test", records[3:])):
        write(folder / f"{split}-00000-of-00001{suffix}", part)
    monkeypatch.chdir(tmp_path)
    task = a_task(
        source="mteb/stsbenchmark-sts",
        splits={"dev": "validation", "test": "test"},
        revision="b0fddb56ed78048fa8b90373c8a3cfc37b684831",
    )
    items = load_items(task)
    assert [(item.id, item.split, item.gold) for item in items] == [
        ("dev-0", "dev", 0), ("dev-1", "dev", 1), ("dev-2", "dev", 2), ("test-0", "test", 3),
    ]  # fmt: skip
    assert items[3].where == "mteb/stsbenchmark-sts row 1"
    with pytest.raises(ValueError, match="can't load split 'nothing' of 'mteb/stsbenchmark-sts'"):
        load_items(a_task(source=task.source, splits={"dev": "nothing", "test": "test"}))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("owner/no-such-set", r"can't load split 'dev' of 'owner/no-such-set'.*--data.path"),
        ("no-such-file.jsonl", r"no file 'no-such-file.jsonl', and it is no hub id"),
        ("", r"no file '', and it is no hub id.*--data.path"),
    ],
)
def test_a_source_that_is_not_there_is_named_in_one_line(source, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message) as raised:
        load_items(a_task(source=source))
    assert "\n" not in str(raised.value)


# New items


@FORMATS
def test_new_items_need_neither_gold_nor_split(suffix, tmp_path):
    records = [{name: row[name] for name in ("id", *FIELDS)} for row in rows()]
    items = load_new_items(a_task(), write(tmp_path / f"new{suffix}", records))
    assert [item.id for item in items] == ["r0", "r1", "r2", "r3"]
    assert {item.gold for item in items} == {None}
    assert {item.split for item in items} == {"new"}


def test_new_items_are_checked_like_others(tmp_path):
    with pytest.raises(ValueError, match="the id 'r0' stands twice"):
        load_new_items(a_task(), write(tmp_path / "new.jsonl", [rows()[0]] * 2))
    with pytest.raises(ValueError, match="row 1 has no column 'sentence1'"):
        load_new_items(a_task(), write(tmp_path / "new.jsonl", [{"id": 1}]))
