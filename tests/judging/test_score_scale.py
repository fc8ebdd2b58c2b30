import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scorecal.scale import Scale


@pytest.mark.parametrize(
    ("text", "labels", "values"),
    [
        ("0-5", "0 1 2 3 4 5", [0, 1, 2, 3, 4, 5]),
        ("2-6", "2 3 4 5 6", [2, 3, 4, 5, 6]),
        ("1-10", "1 2 3 4 5 6 7 8 9 10", range(1, 11)),
        ("0-100:25", "0 25 50 75 100", [0, 25, 50, 75, 100]),
        ("0-1:0.1", "0 0.1 0.2 0.3 0.4 0.5 0.6 0.7 0.8 0.9 1", [i / 10 for i in range(11)]),
        ("0.5-2.5:0.5", "0.5 1 1.5 2 2.5", [0.5, 1, 1.5, 2, 2.5]),
        ("1000000-3000000:1000000", "1000000 2000000 3000000", [1e6, 2e6, 3e6]),
    ],
)
def test_a_scale_is_read_with_its_labels_and_values(text, labels, values):
    scale = Scale.parse(text)
    assert scale.labels == tuple(labels.split())
    assert scale.values == tuple(values)
    assert (scale.name, scale.low, scale.high) == (text, labels.split()[0], labels.split()[-1])


@settings(max_examples=50, deadline=None)
@given(low=st.integers(0, 2_000_000), count=st.integers(2, 101), step=st.integers(1, 50))
def test_every_label_spells_its_value(low, count, step):
    scale = Scale.parse(f"{low}-{low + step * (count - 1)}:{step}")
    assert len(set(scale.labels)) == count
    assert [float(label) for label in scale.labels] == list(scale.values)


@pytest.mark.parametrize(
    "text",
    [
        "", "5", "0-", "-5", "a-b", "0-5-9", "5-0", "3-3", "0-5:2", "0-5:0", "0-5:-1", "0-5:x",
        "0–5", "nan-5", "0-inf", "0-1e999", "0,5",
    ],
)  # fmt: skip
def test_what_is_no_scale_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match=r"a scale is `low-high`.*0-5.*Set `data.task.scale`"):
        Scale.parse(text)
