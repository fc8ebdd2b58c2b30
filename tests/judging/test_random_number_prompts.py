"""The 100 paraphrases of "generate a random integer between min and max" (paper 1, §3.1)."""

import statistics

import pytest
from rapidfuzz import process
from rapidfuzz.distance import Levenshtein

from scorecal.judging.plan import prior_questions
from scorecal.judging.task import Task, Template


@pytest.fixture(params=["0-5", "1-10", "0-100"])
def template(request):
    fields = {"sentence1": "a", "sentence2": "b"}
    return Template(Task("sts", "sts.j2", fields, scale=request.param))


def test_there_are_a_hundred_and_each_names_both_ends_of_the_scale(template):
    texts = template.random_numbers()
    assert len(texts) == len(set(texts)) == 100
    labels = template.random_number("", with_task=False).labels
    [low], [high] = labels[0], labels[-1]
    for text in texts:
        assert text == text.strip() != ""
        assert "{{" not in text  # no placeholder was left
        assert low in text
        assert high in text


def test_they_name_the_ends_by_placeholders_only(template):
    other = Template(
        Task("sts", "sts.j2", {"sentence1": "a", "sentence2": "b"}, scale="3777-3779")
    ).random_numbers()
    assert all("3777" in text and "3779" in text for text in other)


def test_no_two_are_alike(template):
    texts = template.random_numbers()
    similarity = process.cdist(texts, texts, scorer=Levenshtein.normalized_similarity, workers=1)
    pairs = [(similarity[i, j], texts[i], texts[j]) for i in range(100) for j in range(i)]
    assert max(pairs)[0] < 0.8, max(pairs)


def test_they_differ_in_length_and_in_form(template):
    texts = template.random_numbers()
    lengths = [len(text.split()) for text in texts]
    assert min(lengths) <= 8
    assert max(lengths) >= 25
    assert statistics.stdev(lengths) > 5
    assert 10 <= sum("?" in text for text in texts) <= 60  # questions and commands
    assert len({" ".join(text.split()[:2]).casefold() for text in texts}) > 80


def test_each_is_asked_alone_and_under_the_tasks_instruction(template):
    questions = prior_questions([template])
    kinds = {}
    for question in questions:
        kinds.setdefault(question.kind, []).append(question)
    assert {kind: len(rows) for kind, rows in kinds.items()} == {
        "random": 100, "random_task": 100, "content_free": 3,
    }  # fmt: skip
    for alone, under, text in zip(
        kinds["random"], kinds["random_task"], template.random_numbers(), strict=True
    ):
        assert alone.key == under.key
        assert alone.prompt.before == text
        assert under.prompt.before == template.instruction + text  # verbatim and without an item
        assert alone.prompt.item == alone.prompt.after == alone.prompt.cue == ""
    assert len({(question.kind, question.key) for question in questions}) == 203
