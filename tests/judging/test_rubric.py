"""Reading rubrics, and the orders in which they are shown."""

import itertools
import json
import math
import re
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scorecal.judging.elicit import elicit
from scorecal.judging.plan import item_questions, prior_questions
from scorecal.judging.rubric import read_rubric, rotations, rubric_orders, shown_levels
from scorecal.judging.table import load_table
from scorecal.judging.task import Task, Template, load_items, templates

LABELS = ["1", "2", "3"]
TEXTS = {"1": "poor", "2": "fair", "3": "good"}
each_size = pytest.mark.parametrize("levels", range(2, 11))


# Orders


def places(orders):
    """How often each score stands at each position."""
    return Counter((position, level) for order in orders for position, level in enumerate(order))


@each_size
def test_balanced_orders_put_every_score_once_at_every_position(levels):
    orders = rubric_orders(levels, "balanced")
    assert len(orders) == len(set(orders)) == levels
    assert orders[0] == tuple(range(levels))
    assert places(orders) == dict.fromkeys(itertools.product(range(levels), repeat=2), 1)


@each_size
def test_both_directions_put_every_score_twice_at_every_position(levels):
    orders = rubric_orders(levels, "both_directions")
    assert orders[0] == tuple(range(levels))
    assert set(orders) == {order[::-1] for order in orders}
    if levels == 2:  # its reverse is a rotation, and no order is shown twice
        assert orders == rubric_orders(2, "balanced")
        return
    assert len(orders) == len(set(orders)) == 2 * levels
    assert orders[:levels] == rubric_orders(levels, "balanced")
    assert places(orders) == dict.fromkeys(itertools.product(range(levels), repeat=2), 2)


@each_size
def test_no_permutation_is_the_written_order(levels):
    assert rubric_orders(levels, "none") == [tuple(range(levels))]


@each_size
def test_random_orders_are_distinct_and_always_the_same(levels):
    for count in {1, levels, min(math.factorial(levels), 50)}:
        orders = rubric_orders(levels, {"random": count})
        assert len(orders) == len(set(orders)) == count
        assert all(sorted(order) == list(range(levels)) for order in orders)
        assert orders == rubric_orders(levels, {"random": count})


def test_as_many_random_orders_as_there_are_is_all_of_them():
    assert sorted(rubric_orders(4, {"random": 24})) == list(itertools.permutations(range(4)))


@pytest.mark.parametrize(
    ("levels", "count", "most"), [(3, 7, 6), (5, 0, 120), (5, -1, 120), (10, 1001, 1000)]
)
def test_more_random_orders_than_there_are_is_refused(levels, count, most):
    message = f"asks for {count} random orders of {levels} scores; between 1 and {most} exist"
    with pytest.raises(ValueError, match=message):
        rubric_orders(levels, {"random": count})


def test_a_list_is_all_its_orders_each_once():
    found = rubric_orders(5, ["none", "balanced", {"random": 5}, "both_directions"])
    assert len(found) == len(set(found))
    assert found[:5] == rubric_orders(5, "balanced")
    assert set(found) == {
        *rubric_orders(5, "both_directions"), *rubric_orders(5, {"random": 5}),
    }  # fmt: skip


@each_size
def test_rotations_by_name_are_the_balanced_orders_of_any_written_order(levels):
    labels = [str(10 * level) for level in range(levels)]
    for written in (labels, labels[::-1]):
        names = [
            " ".join(written[place] for place in order)
            for order in rubric_orders(levels, "balanced")
        ]
        assert rotations(" ".join(written)) == names
        for name in names:
            shown = shown_levels(name, labels)
            assert [labels[level] for level in shown] == name.split()


# Reading


def test_a_mapping_is_read_in_its_own_order_whatever_its_keys_are():
    rubric = read_rubric({3: " good\n", 1: "poor", "2": "fair"}, LABELS, "here")
    assert list(rubric.levels.items()) == [("3", "good"), ("1", "poor"), ("2", "fair")]
    assert rubric.criterion == ""


PROMETHEUS = """[Is the answer kind, and does it say why?]
Score 1: Rude.
Score 2: Neutral: it says
what is asked, no more.

Score 3: Kind.
"""


def test_a_text_is_read_as_prometheus_writes_rubrics():
    rubric = read_rubric(PROMETHEUS, LABELS, "row 3")
    assert rubric.criterion == "Is the answer kind, and does it say why?"
    assert rubric.levels == {
        "1": "Rude.",
        "2": "Neutral: it says\nwhat is asked, no more.",
        "3": "Kind.",
    }


def test_a_text_may_begin_with_its_scores_and_be_indented():
    rubric = read_rubric("  Score 2 : b\n\tScore 1:a\nScore 3: as Score 1, but c", LABELS, "here")
    assert rubric.criterion == ""
    assert list(rubric.levels.items()) == [("2", "b"), ("1", "a"), ("3", "as Score 1, but c")]


@settings(max_examples=20, deadline=None)
@given(
    texts=st.lists(
        st.from_regex(r"[a-z:.,]+( [a-z0-9:.,]+)*(\n[a-z]+)?", fullmatch=True),
        min_size=3, max_size=3,
    ),
    order=st.permutations(LABELS),
)  # fmt: skip
def test_what_is_written_is_read_back(texts, order):
    written = dict(zip(order, texts, strict=True))
    lines = "".join(f"Score {label}: {text}\n" for label, text in written.items())
    assert read_rubric(f"[why]\n{lines}", LABELS, "here") == (written, "why")
    assert read_rubric(written, LABELS, "here").levels == written


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        (
            {"1": "a", "2": "b"},
            "row 3: the rubric has no text for the score 3; the scale is 1 to 3",
        ),
        ({**TEXTS, "4": "d"}, "describes the score '4', which the scale 1 to 3 lacks"),
        ({**TEXTS, "2": " "}, "the rubric's text for the score 2 is empty"),
        ({1: "a", "1": "b", 2: "c", 3: "d"}, "has 2 texts for the score 1"),
        ("Score 1: a\nScore 2: b\nScore 2: c\nScore 3: d", "has 2 texts for the score 2"),
        ("Score 1: a\nScore 3: b", "has no text for the score 2"),
        ("Score 1: a\nScore 2:\nScore 3: b", "text for the score 2 is empty"),
        ("Score 1: a\nScore 2: b\nScore 3: c\nScore 9: d", "describes the score '9'"),
        ("nothing of the kind", "has no text for the score 1"),
        ("", "has no text for the score 1"),
        (None, "a rubric is a text for each score, got None"),
        ({"1": None, "2": "b", "3": "c"}, "has no text for the score 1"),
        ({"1": "a", "2": ["b"], "3": "c"}, r"text for the score 2 is \['b'\]"),
        (["a", "b", "c"], r"a rubric is a text for each score, got \['a'"),
    ],
)
def test_a_rubric_that_does_not_describe_each_score_once_is_refused(cell, message):
    with pytest.raises(ValueError, match=f"row 3: .*{message.removeprefix('row 3: ')}"):
        read_rubric(cell, LABELS, "row 3")


# A judge that is shown a rubric


TEMPLATE = """{% block instruction %}Rate how similar, {{ low }} to {{ high }}.
{% endblock %}{% block item %}{{ sentence1 }} / {{ sentence2 }}{% endblock %}
{% block question %}{{ criterion }}{% for level in rubric %}
Score {{ level.label }}: {{ level.text }}{% endfor %}
Score:{% endblock %}"""
ORDERS = ["balanced", {"random": 2}]


class _RubricJob:
    """A task of six pairs; `elicit` has them judged in all orders that are asked for."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "rubric.j2").write_text(TEMPLATE)
        rows = [
            {
                "id": f"r{number}",
                "split": "dev" if number < 3 else "test",
                "sentence1": "the old boat " * number,
                "sentence2": "a dog",
                "score": 1 + number % 4,
                "own": "[near?]\n" + "".join(f"Score {s}: {number} {s}\n" for s in range(1, 5)),
            }
            for number in range(6)
        ]
        (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def task(self, **changes):
        fields = {"sentence1": "sentence1", "sentence2": "sentence2"}
        rubric = {"4": "same", "3": "near", "2": "far", "1": "other"}  # written from the best down
        given = {"rubric": rubric, "scale": "1-4", **changes}
        return Task("pairs", str(self.folder / "rubric.j2"), fields, **given)

    def elicit(self, judge, **changes):
        task = self.task(**changes)
        asked = templates(task)
        for template in asked:
            few = template.random_numbers()[:3]
            template.random_numbers = lambda few=few: few
        items = load_items(task, str(self.folder / "pairs.jsonl"))
        questions = item_questions(asked, items) + prior_questions(asked)
        return elicit(judge, task, asked, items, questions, str(self.folder / "store"))


@pytest.fixture
def rubric_job(tmp_path):
    return _RubricJob(tmp_path)


def test_a_prompt_shows_the_rubric_in_its_order(rubric_job):
    task = rubric_job.task(orders=["none", "balanced"])
    first, second, *_ = templates(task)
    [item, *_] = load_items(task, str(rubric_job.folder / "pairs.jsonl"))
    assert (first.order, second.order) == ("4 3 2 1", "3 2 1 4")
    assert first.prompt(item).after.splitlines()[1:5] == [
        "Score 4: same", "Score 3: near", "Score 2: far", "Score 1: other",
    ]  # fmt: skip
    assert second.prompt(item).after.splitlines()[1:5] == [
        "Score 3: near", "Score 2: far", "Score 1: other", "Score 4: same",
    ]  # fmt: skip
    assert first.hash == second.hash


def test_items_may_have_rubrics_of_their_own(rubric_job):
    task = rubric_job.task(rubric="own", orders="balanced")
    _, second, *_ = templates(task)
    item = load_items(task, str(rubric_job.folder / "pairs.jsonl"))[2]
    assert second.prompt(item).after.splitlines() == [
        "near?", "Score 2: 2 2", "Score 3: 2 3", "Score 4: 2 4", "Score 1: 2 1", "Score:",
    ]  # fmt: skip


@pytest.mark.parametrize("rubric", [None, "own"], ids=["shared", "own"])
def test_log_probabilities_are_averaged_over_the_orders_that_the_task_names(
    rubric, rubric_job, watched
):
    changes = {"rubric": rubric} if rubric else {}
    store = rubric_job.elicit(watched(), orders=ORDERS, **changes)
    written = "1 2 3 4" if rubric else "4 3 2 1"
    names = [template.order for template in templates(rubric_job.task(orders=ORDERS, **changes))]
    rows = store.judgements().to_pylist()
    for orders, kept in (("balanced", names[:4]), (ORDERS, names), ("none", [written])):
        table = load_table(str(store.folder), rubric_job.task(orders=orders, **changes))
        assert set(table.by_order) == set(names)
        assert list(table.orders) == kept
        assert table.written_order == written
        for kind, found in (
            ("item", table.logprobs),
            ("content_free", table.evidence["content_free"].logprobs),
        ):
            keys = table.ids if kind == "item" else ["N/A", "[MASK]", ""]
            for key, averaged in zip(keys, found, strict=True):
                mean = [0.0] * 4
                for order in kept:
                    [row] = [
                        row["logprobs"] for row in rows
                        if (row["kind"], row["key"], row["order"]) == (kind, key, order)
                    ]  # fmt: skip
                    total = sum(map(math.exp, row))
                    mean = [m + math.exp(x) / total / len(kept) for m, x in zip(mean, row)]  # noqa: B905
                assert averaged.softmax(-1).tolist() == pytest.approx(mean, abs=1e-9)
        assert len(table.evidence["random_task"].logprobs) == 3
    kept_rows = table.rows(torch.tensor([False, True] * 3))
    assert kept_rows.orders == (written,)
    assert kept_rows.written_order == written
    assert {len(logprobs) for logprobs in kept_rows.by_order.values()} == {3}


def test_one_order_is_kept_as_it_was_judged(rubric_job, watched):
    store = rubric_job.elicit(watched(), orders="balanced")
    table = load_table(str(store.folder), rubric_job.task(orders="none"))
    assert torch.equal(table.logprobs, table.by_order["4 3 2 1"])
    assert not torch.equal(table.logprobs, table.by_order["3 2 1 4"])


def test_an_order_that_a_store_lacks_is_named(rubric_job, watched):
    store = rubric_job.elicit(watched(), orders="none")
    message = "lacks 3 of the 4 orders of the rubric, '3 2 1 4' first. Set `--data.task.orders`"
    with pytest.raises(ValueError, match=re.escape(message)):
        load_table(str(store.folder), rubric_job.task(orders="balanced"))


def test_another_rubric_is_another_question(rubric_job, watched):
    store = rubric_job.elicit(watched(), orders="none")
    texts = {"1": "a", "2": "b", "3": "c", "4": "d"}
    with pytest.raises(ValueError, match="was judged with another template or criterion"):
        load_table(str(store.folder), rubric_job.task(rubric=texts))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rubric": None, "orders": "balanced"}, "orders a rubric, and there is none"),
        ({"rubric": None}, "shows a `rubric`, and `data.task.rubric` is not set"),
        ({"rubric": {"1": "a"}}, "`data.task.rubric`: the rubric has no text for the score 2"),
        ({"orders": {"random": 25}}, "asks for 25 random orders of 4 scores"),
        ({"orders": []}, "`data.task.orders` names no order"),
    ],
)
def test_a_rubric_that_cannot_be_shown_is_refused(changes, message, rubric_job):
    with pytest.raises(ValueError, match=re.escape(message)):
        templates(rubric_job.task(**changes))


def test_a_template_without_a_rubric_refuses_one(rubric_job):
    with pytest.raises(ValueError, match="shows no `rubric`, and `data.task.rubric` is"):
        Template(
            Task("sts", "sts.j2", {"sentence1": "a", "sentence2": "b"}, scale="1-3", rubric=TEXTS)
        )
