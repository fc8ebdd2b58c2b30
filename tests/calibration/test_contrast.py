"""Contrast between two judges: the paper's grid, its two readings, and a plain loop."""

import math

import pytest
import torch
from synthetic import make_table, normal

from scorecal.calibration.contrast import (
    STRENGTHS,
    TEMPERATURES,
    Contrast,
    Point,
    code_grid,
    contrast_methods,
    contrasted,
    greedy,
    greedy_score,
    paper_grid,
    shared,
)
from scorecal.calibration.dev_sets import DevSets, best_points
from scorecal.calibration.folds import Folds
from scorecal.functional.correlation import spearman

LABELS = [7, 3, 20, 11]  # token ids, in no order


def two_models(items=6, vocabulary=30):
    """Next-token logits of a main and an assistant model, and the table of both."""
    main, other = normal(items, vocabulary, seed=1) * 2, normal(items, vocabulary, seed=2) * 2
    table = make_table(items, len(LABELS))
    table.logprobs = main.log_softmax(-1)[:, LABELS]
    table.assistants = {"small": other.log_softmax(-1)[:, LABELS].log_softmax(-1)}
    return main, other, table


def with_assistant(items=60):
    table = make_table(items)
    table.assistants = {"small": normal(*table.logprobs.shape, seed=9).log_softmax(-1)}
    dev = torch.tensor([split == "dev" for split in table.splits])
    return table, DevSets(table, torch.stack([dev, ~dev]), Folds(inner=3))


def test_24_pairs_are_18_values_of_alpha():
    grid = paper_grid()
    assert len(grid) == 18
    assert [point.contrast for point in grid] == sorted(point.contrast for point in grid)
    pairs = [(pair, point) for point in grid for pair in point.pairs]
    assert sorted(pair for pair, _ in pairs) == sorted(
        (strength, temperature) for strength in STRENGTHS for temperature in TEMPERATURES
    )
    for (strength, temperature), point in pairs:
        assert math.isclose(point.contrast, strength / temperature)
        assert point.temperature == 1


def test_the_published_code_has_24_points():
    grid = code_grid()
    assert len(set(grid)) == 24
    for point in grid:
        [(strength, temperature)] = point.pairs
        assert math.isclose(point.contrast, strength * temperature)
        assert point.temperature == temperature


@pytest.mark.parametrize("strength", STRENGTHS)
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_a_plain_loop_over_the_vocabulary_gives_the_same_label_distribution(strength, temperature):
    main, other, table = two_models()
    of_paper = [point for point in paper_grid() if (strength, temperature) in point.pairs]
    of_code = [point for point in code_grid() if (strength, temperature) in point.pairs]
    [paper], [code] = contrasted(table, "small", of_paper), contrasted(table, "small", of_code)
    for item in range(len(main)):
        e_main, e_other = main[item].tolist(), other[item].tolist()
        norm = math.log(sum(math.exp(e) for e in e_main))
        tempered = math.log(sum(math.exp(e / temperature) for e in e_other))
        scores = [
            (e_main[label] - norm) - strength * (e_other[label] / temperature - tempered)
            for label in LABELS
        ]
        expected = torch.tensor(scores, dtype=torch.float64).softmax(-1)
        torch.testing.assert_close(paper[item].softmax(-1), expected)
        swapped = [e_main[label] / temperature - strength * e_other[label] for label in LABELS]
        expected = torch.tensor(swapped, dtype=torch.float64).softmax(-1)
        torch.testing.assert_close(code[item].softmax(-1), expected)


def test_alpha_0_is_the_main_judge():
    _, _, table = two_models()
    [logits] = contrasted(table, "small", [Point(0.0, 1.0, ())])
    torch.testing.assert_close(logits, table.logprobs.log_softmax(-1))


def test_greedy_is_the_likeliest_label_the_lower_of_two():
    logits = torch.tensor([[0.0, 2.0, 1.0], [1.0, 1.0, 0.0]])
    values = torch.tensor([1.0, 2.0, 4.0])
    assert greedy_score(logits, values).tolist() == [2.0, 1.0]
    table, sets = with_assistant()
    answers = greedy(sets)
    assert answers.logits is None
    assert torch.equal(answers.score[1], table.values[table.logprobs.argmax(-1)])


@pytest.mark.parametrize("by_label", [False, True])
def test_alpha_is_chosen_by_dev_spearman_of_what_is_reported(by_label):
    table, sets = with_assistant()
    contrast = Contrast("small", paper_grid(), 0.2, greedy=by_label)
    answers = contrast.chosen_on_dev(sets)
    for problem, row in enumerate(sets.train):
        found = []
        for point in paper_grid():
            [logits] = contrasted(table, "small", [point], 0.2)
            score = greedy_score(logits, table.values) if by_label else (
                logits.softmax(-1) @ table.values
            )  # fmt: skip
            ones = torch.ones(int(row.sum()), dtype=torch.float64)
            found.append(spearman(score[row], table.gold[row], ones).item())
        best = next(at for at, value in enumerate(found) if value >= max(found) - 1e-9)
        assert answers.settings["alpha"][problem] == paper_grid()[best].contrast
        strength, t = answers.settings["lambda"][problem], answers.settings["t"][problem]
        assert math.isclose(strength / t, paper_grid()[best].contrast)


def test_ties_and_undefined_points_go_to_the_smaller_alpha():
    nan = math.nan
    figures = torch.tensor([[0.1, 0.3, 0.3], [nan, nan, nan], [nan, 0.2, 0.1]])
    assert best_points(figures) == [1, 0, 1]


def test_a_shared_point_is_the_best_on_average():
    one, sets = with_assistant()
    other, other_sets = with_assistant()
    other.logprobs = other.logprobs.flip(0)
    contrast = Contrast("small", paper_grid())
    both = [sets, other_sets]
    answers = [shared(contrast, both)(own) for own in both]
    mean = (contrast.dev_figures(sets) + contrast.dev_figures(other_sets)) / 2
    expected = [paper_grid()[int(at)].contrast for at in mean.argmax(-1)]
    assert answers[0].settings["alpha"] == answers[1].settings["alpha"] == expected
    assert not torch.equal(answers[0].score, answers[1].score)


def test_each_assistant_is_contrasted_alone_and_together_with_the_head():
    table, sets = with_assistant()
    names = {(method.name, method.temperature) for method in contrast_methods(table, 0.2)}
    assert names == {
        ("contrast, small", "1"), ("contrast, small", "0.2"),
        ("contrast, small, main tempered", "1"), ("contrast, small, greedy", "–"),
        ("α and T, small", "learned"), ("α, λ and T, small", "learned"),
        ("default head with α, small", "learned"),
    }  # fmt: skip
    for method in contrast_methods(table, 0.2):
        assert method.answer(sets).score.shape == (2, 60)
    assert not list(contrast_methods(make_table(), 0.2))


def test_alpha_takes_away_what_the_assistant_shares():
    """A taste for one label, item by item, that both judges have and gold doesn't."""
    table = make_table(400, signal=0.2)
    taste = 3 * normal(*table.logprobs.shape, seed=4)
    table.logprobs = (table.logprobs + taste).log_softmax(-1)
    table.assistants = {"small": taste.log_softmax(-1)}
    dev = torch.tensor([split == "dev" for split in table.splits])
    sets = DevSets(table, dev.unsqueeze(0), Folds())
    found = {m.name: m for m in contrast_methods(table, 0.2) if m.temperature in ("1", "learned")}
    test = (~dev).double()
    raw = spearman(table.logprobs.softmax(-1) @ table.values, table.gold, test)
    for name in ("contrast, small", "α and T, small"):
        answers = found[name].answer(sets)
        assert spearman(answers.score[0], table.gold, test) > raw + 0.2
    assert abs(found["α and T, small"].answer(sets).settings["alpha"][0] - 1) < 0.2
