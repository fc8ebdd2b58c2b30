"""What a judge's number bias has to do with its scores, as plain numbers: the record of a case."""

import math
from typing import Any

import torch

from scorecal.calibration.methods import (
    LONG,
    SHORT,
    VANILLA,
    Method,
    best_strengths,
    debiased,
    random_number_term,
    strength_scores,
)
from scorecal.evaluation.compare import Case, Comparison, Row, find, methods_record, row_of
from scorecal.evaluation.evidence import score_shares
from scorecal.evaluation.orders import orders_record
from scorecal.functional.correlation import pearson, spearman
from scorecal.functional.metrics import mean_squared_error
from scorecal.judging.priors import latent_bias
from scorecal.judging.table import Table

RANDOM = {"random": "Deb-R", "random_task": "Deb-T"}
# Those that are looked at more closely, with their temperature; a run has the first and the last.
_DIAGNOSED = {
    "raw": "1", "vanilla": "0.2", "Deb-R": "0.2", "Deb-T": "0.2", "default head": "learned",
    "auto": "learned", "calibrated": "learned",
}  # fmt: skip
_BINS = 10  # of equal counts, of the reliability of the expected score


def strength_record(comparison: Comparison) -> list[dict[str, Any]]:
    """Deb-R and Deb-T by T_p, λ range and T (paper 1, tables 4 and 5)."""
    case, records = comparison.case, []
    for kind in _kinds(case.table):
        for prompts in (10, 100):
            for strengths in (SHORT, LONG):
                for temperature in (VANILLA, 1.0):
                    answer = debiased(
                        kind, prompts=prompts, strengths=strengths, temperature=temperature
                    )
                    method = Method(RANDOM[kind], f"{temperature:g}", answer)
                    row = row_of(case, method, comparison.draws, ("spearman", "mse"))
                    records.append(
                        {
                            "name": RANDOM[kind],
                            "prompts": prompts,
                            "largest": strengths[-1],
                            "temperature": method.temperature,
                            "lambda": row.answers.settings["lambda"],
                            "figures": {name: f._asdict() for name, f in row.figures.items()},
                        }
                    )
    return records


def _kinds(table: Table) -> list[str]:
    return [kind for kind in RANDOM if kind in table.evidence]


def curves_record(case: Case) -> dict[str, Any]:
    """Spearman over λ on dev and on test at both temperatures, and the λ that dev chooses."""
    table, gold = case.table, case.table.gold
    strengths = (0.0, *LONG)
    record: dict[str, Any] = {}
    for kind in _kinds(table):
        term = random_number_term(table, kind, 10)
        for temperature in (1.0, VANILLA):
            scores = strength_scores(table, term, strengths, temperature)
            lines = {}
            for name, parts in (("dev", case.sets.train), ("test", case.test)):
                each = [
                    spearman(
                        scores[:, own], gold[own], torch.ones(int(own.sum()), dtype=torch.float64)
                    )
                    for own in parts
                ]
                lines[name] = torch.stack(each).mean(0).tolist()
            chosen = best_strengths(scores[1:11], case.sets)
            record[f"{RANDOM[kind]}, T = {temperature:g}"] = {
                "strengths": list(strengths),
                **lines,
                "chosen": [SHORT[index] for index in chosen],
            }
    return record


def bias_record(table: Table) -> dict[str, list[float]]:
    """The latent number bias by kind of prompt and T_p (paper 1, figure 3)."""
    return {
        f"{RANDOM[kind]}, {prompts} prompts": latent_bias(
            table.evidence[kind], prompts=prompts
        ).tolist()
        for kind in _kinds(table)
        for prompts in (10, 100)
    }


def _diagnosed(comparison: Comparison, *, without: set[str]) -> dict[str, Row]:
    """The rows of the methods that are looked at more closely, where there are such."""
    found = {
        name: find(comparison.rows, name, temperature)
        for name, temperature in _DIAGNOSED.items()
        if name not in without
    }
    return {name: row for name, row in found.items() if row is not None}


def shares_record(comparison: Comparison) -> dict[str, list[float]]:
    """Gold's share of each label on test beside methods' mean probabilities."""
    case = comparison.case
    logits = {
        name: row.answers.logits
        for name, row in _diagnosed(comparison, without={"auto"}).items()
        if row.answers.logits is not None
    }
    return score_shares(logits, case.truth.target, case.test.double())


def excess_record(case: Case) -> dict[str, Any]:
    """B beside the judge's excess log(mean p / gold share) on dev (paper 1, §5.2).

    λ·B takes away from a label what it has too much of only where the two run against each other:
    a correlation near -1 promises a gain, one above 0 a loss. It is known before test is opened;
    with several splits it is the mean over their dev parts.
    """
    table, target = case.table, case.truth.target
    share = torch.stack([target[dev].mean(0) for dev in case.sets.train])
    given = torch.stack([table.logprobs[dev].softmax(-1).mean(0) for dev in case.sets.train])
    excess = given.log() - share.clamp(min=1e-12).log()
    seen = share > 0  # a label that gold never takes has no finite excess
    record: dict[str, Any] = {"excess": excess.mean(0).tolist()}
    for kind in _kinds(table):
        term = random_number_term(table, kind, 10)
        found = pearson(term.expand_as(excess), excess, seen.double())
        found = found.where(seen.sum(-1) > 2, math.nan)
        record[RANDOM[kind]] = {"term": term.tolist(), "correlation": found.mean().item()}
    return record


def reliability_record(comparison: Comparison) -> dict[str, list[list[float]]]:
    """Mean expected score and mean gold in ten bins of equal counts of the expected score.

    With several splits an item has as many predictions, and all are binned together.
    """
    case, record = comparison.case, {}
    gold = case.table.gold.expand(case.test.shape)[case.test]
    for name, row in _diagnosed(comparison, without={"Deb-R"}).items():
        score = row.answers.score[case.test]
        order = score.argsort(stable=True)
        bins = [part for part in order.tensor_split(_BINS) if len(part)]
        record[name] = [
            [score[part].mean().item() for part in bins],
            [gold[part].mean().item() for part in bins],
        ]
    return record


def mass_record(comparison: Comparison) -> list[dict[str, Any]]:
    """Spearman and MSE in thirds of the test items by label mass."""
    case = comparison.case
    mass = case.table.label_mass
    tested = case.test.any(0) & ~mass.isnan()
    if int(tested.sum()) < 3:
        return []
    order = tested.nonzero().flatten()[mass[tested].argsort(stable=True)]
    records = []
    for name, part in zip(("low", "middle", "high"), order.tensor_split(3), strict=True):
        own = torch.zeros_like(tested)
        own[part] = True
        weights = (case.test & own).double()
        record: dict[str, Any] = {
            "third": name,
            "from": mass[part].min().item(),
            "to": mass[part].max().item(),
            "methods": {},
        }
        for label, row in _diagnosed(comparison, without={"Deb-R", "auto"}).items():
            score, gold = row.answers.score, case.table.gold
            record["methods"][label] = {
                "spearman": spearman(score, gold, weights).mean().item(),
                "mse": mean_squared_error(score, gold, weights).mean().item(),
            }
        records.append(record)
    return records


def case_record(comparison: Comparison) -> dict[str, Any]:
    """Everything about one case, as numbers."""
    case, table = comparison.case, comparison.case.table
    mass = table.label_mass[~table.label_mass.isnan()]
    orders = orders_record(comparison)
    return {
        "task": case.task,
        "judge": case.judge,
        "table": table.name,
        "identity": table.identity,
        "labels": list(table.labels),
        "values": table.values.tolist(),
        "splits": len(case.test),
        "dev_items": [int(row.sum()) for row in case.sets.train],
        "test_items": [int(row.sum()) for row in case.test],
        "groups": case.groups,
        "label_mass": mass.mean().item() if len(mass) else math.nan,
        "methods": methods_record(comparison),
        "strength": strength_record(comparison),
        "curves": curves_record(case),
        "latent_bias": bias_record(table),
        "shares": shares_record(comparison),
        "excess": excess_record(case),
        "reliability": reliability_record(comparison),
        "label_mass_thirds": mass_record(comparison),
        **({} if orders is None else {"orders": orders}),
    }
