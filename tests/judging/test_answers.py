"""Answers in a judge's own words, read as scores."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scorecal.judging.answers import account, parse_score, read_answers
from scorecal.judging.task import Task
from scorecal.scale import Scale

ONE_TO_FIVE = Scale.parse("1-5")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4", 4),
        (" 3\n", 3),
        ("5.", 5),
        ("4.5", 4.5),
        ("Score: 4", 4),
        ("Score: 4/5", 4),
        ("5/5", 5),
        ("1 / 5", 1),
        ("Score:\n\n2", 2),
        ("**Score:** 3", 3),
        (r"\boxed{2}", 2),
        ("I'd give it a 3 out of 5.", 3),
        ("Out of 5, I'd say 3.", 3),
        ("Score from 1 to 5: 4", 4),
        ("Score (1-5): 4", 4),
        ("Score (1\u20135): 4", 4),
        ("Between 1 and 5 I choose 2", 2),
        ("On a scale of 1 (worst) to 5 (best): 4", 4),
        ("From 5 (best) to 1 (worst), 3", 3),
        ("Score (1, 2, 3, 4, or 5): 4", 4),
        ("Score (1/2/3/4/5): 4", 4),
        ("On a 5-point scale: 4", 4),
        ("3The two sentences", 3),
        ("a score of 5 for this", 5),
        ("T5 says 3", 3),
        ("v1.5 says 3", 3),
        ("- 4", 4),
        ("Score - 2", 2),
        ("3-4", 3),
        ("4,5", 4),  # a comma ends a number
        ("Score...5", 5),
        ("1.2.3", 1.2),
        ("\uff13", 3),
        ("\u0664", 4),
        ("\u8bc4\u5206\uff1a4\u5206", 4),
        ("1e3", 1),  # digits alone
        ("from 1 to 50: 5", 1),  # not our range
    ],
)
def test_the_first_number_that_does_not_restate_the_range_is_the_score(text, value):
    assert parse_score(text, ONE_TO_FIVE) == (value, "read")


@pytest.mark.parametrize(
    "text",
    ["", " ", "four", "N/A", "nan", "inf", "1-5", "from 1 to 5", "1 to 5.", "/5", "out of 5",
     "from 1 (bad) to 5 (go", "1, 2, 3, 4, 5", "T5", "I can't rate this.", "\u00b2", "x2y"],
)  # fmt: skip
def test_an_answer_without_a_score_is_the_lowest(text):
    assert parse_score(text, ONE_TO_FIVE) == (1.0, "unparsable")


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("10", (5.0, "above")),
        ("5.1", (5.0, "above")),
        ("9" * 5000, (5.0, "above")),
        ("8/10", (5.0, "above")),
        ("0", (1.0, "below")),
        ("0.5", (1.0, "below")),
        (".5", (1.0, "below")),
        ("-1", (1.0, "below")),
        ("\u22121", (1.0, "below")),
        ("Score: -3", (1.0, "below")),
    ],
)
def test_a_score_beyond_the_scale_is_its_nearest_end(text, parsed):
    assert parse_score(text, ONE_TO_FIVE) == parsed


def test_steps_and_zero_are_read_on_their_own_scale():
    tenths, percent = Scale.parse("0-1:0.1"), Scale.parse("0-100")
    assert parse_score("0.55 (0-1)", tenths) == (0.55, "read")
    assert parse_score("0/1", tenths) == (0.0, "read")
    assert parse_score("From 0 to 100, 85%", percent) == (85.0, "read")
    minus_zero = parse_score("-0", tenths)
    assert minus_zero == (0.0, "read")
    assert math.copysign(1, minus_zero.value) == 1
    assert parse_score("0/1", Scale.parse("0-1")) == (0.0, "read")


NAMES = ["0-5", "1-5", "2-6", "0-1:0.1", "0-100", "1-10", "0-1"]
SCALES = st.sampled_from([Scale.parse(name) for name in NAMES])
PIECES = st.sampled_from(
    ["1", "5", "-", "\u2212", ".", ",", "/", " ", "to", "out of", "e", "nan", "\uff13", "\u00b2",
     "\u0663", "inf", "point", "\n", "a", "10", "\u0d66"]
)  # fmt: skip


@given(st.one_of(st.text(), st.lists(PIECES).map("".join)), SCALES)
def test_whatever_a_judge_writes_is_a_score_on_the_scale(text, scale):
    value, how = parse_score(text, scale)
    assert scale.values[0] <= value <= scale.values[-1]
    assert how == "read" or value in (scale.values[0], scale.values[-1])


@given(SCALES, st.data())
def test_every_label_is_read_as_itself(scale, data):
    label = data.draw(st.sampled_from(scale.labels))
    expected = (scale.values[scale.labels.index(label)], "read")
    for text in (
        label,
        f"Score: {label}.",
        f"{label}/{scale.high}",
        f"{label} out of {scale.high}",
        f"Score from {scale.low} to {scale.high}: {label}",
        f"({scale.low}-{scale.high}) {label}, because",
    ):
        assert parse_score(text, scale) == expected, text


def rows(*texts, order="none", kind="generated", scale="1-5"):
    return [
        {"kind": kind, "key": f"r{at}", "scale": scale, "order": order, "text": text}
        for at, text in enumerate(texts)
    ]


def test_answers_in_several_orders_are_averaged_and_come_in_golds_units():
    task = Task("t", "sts.j2", {}, scale="1-5", gold_range=(0.0, 1.0))
    answers = read_answers([rows("2", "4.5"), rows("4", "nothing")], task)
    # (2 + 4)/2 = 3 is the middle; (4.5 + 1)/2 = 2.75 lies at 1.75/4.
    torch.testing.assert_close(answers.scores, torch.tensor([0.5, 0.4375]).double())
    assert answers.how == [("read", "read"), ("read", "unparsable")]
    assert answers.texts == [("2", "4"), ("4.5", "nothing")]
    assert answers.counts() == {"read": 3, "unparsable": 1, "below": 0, "above": 0}
    kept = answers.rows([1])
    assert kept.scores.tolist() == [0.4375]
    assert kept.counts() == {"read": 1, "unparsable": 1, "below": 0, "above": 0}


def test_the_account_counts_every_answer_and_lists_the_first_that_are_no_scores():
    texts = ["3", "no\nidea", "0", "9", *["?"] * 9]
    lines = account(rows(*texts) + rows("4", kind="contrasted") + rows("4", kind="item"))
    assert lines[0] == (
        "generated answers: 1 read, 10 unparsable (lowest score), 1 below (lowest score), "
        "1 above (highest score)"
    )
    assert lines[1] == r'  r1, unparsable: "no\nidea"'
    assert lines[3] == '  r3, above: "9"'
    assert lines[11] == "  and 2 more in judgements.parquet, column `text`"
    assert lines[12].startswith("  most hold no score: begin the answer in the template's block")
    [contrasted] = lines[13:]
    assert contrasted.startswith("contrasted answers: 1 read, 0 unparsable")
    [_, listed] = account(rows("3", order="1 2") + rows("?", order="2 1"))
    assert listed == '  r0 on 1-5, order 2 1, unparsable: "?"'
