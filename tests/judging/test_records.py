"""Rows of JSONL, CSV and Parquet files, in and out."""

import pytest

from scorecal.judging.records import read_records, write_records

FORMATS = pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])


@FORMATS
def test_records_are_read_back_as_written_and_nothing_else_is_left(suffix, tmp_path):
    file = tmp_path / "deep" / f"out{suffix}"
    write_records(
        file, [{"id": "a", "p": 0.25, "word": '犬, "x"'}, {"id": "b", "p": 1e-30, "word": ""}]
    )
    again = read_records(file)
    assert [row["id"] for row in again] == ["a", "b"]
    assert [float(row["p"]) for row in again] == [0.25, 1e-30]
    assert again[0]["word"] == '犬, "x"'
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path):
    file = tmp_path / "out.jsonl"
    write_records(file, [{"id": "old"}])
    with pytest.raises(TypeError):
        write_records(file, [{"id": "new"}, {"id": object()}])
    assert read_records(file) == [{"id": "old"}]
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]
    with pytest.raises(ValueError, match="can't write .*give it one of the suffixes"):
        write_records(tmp_path / "out.txt", [])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.jsonl", None, r"no file .*none\.jsonl'"),
        ("empty.jsonl", b"", r"empty\.jsonl' holds no rows"),
        ("blank.jsonl", b"\n\n", r"blank\.jsonl' holds no rows"),
        ("empty.csv", b"", r"empty\.csv' holds no rows"),
        ("head.csv", b"id,split\n", r"head\.csv' holds no rows"),
        ("latin.jsonl", b'{"id": "na\xefve"}\n', r"latin\.jsonl' is not UTF-8 \(byte 10\)"),
        ("latin.csv", b"id,split\nna\xefve,dev\n", r"latin\.csv' is not UTF-8"),
        ("bad.jsonl", b'{"id": 1}\n{"id": \n', r"bad\.jsonl' row 2 is not JSON"),
        ("list.jsonl", b"[1, 2]\n", r"list\.jsonl' row 1 is not a JSON object"),
        ("wide.csv", b"id,split\na,dev,x\n", r"wide\.csv' line 2 has not as many cells"),
        ("thin.csv", b"id,split\na\n", r"thin\.csv' line 2 has not as many cells"),
        ("bad.parquet", b"PAR1 and nothing more", r"bad\.parquet' is not a Parquet file"),
        ("empty.parquet", b"", r"empty\.parquet' is not a Parquet file"),
        ("pairs.xlsx", b"PK", r"pairs\.xlsx' is none of \.jsonl, \.csv, \.parquet"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_in_one_line(name, content, message, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as raised:
        read_records(tmp_path / name)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 500 + len(str(tmp_path))
