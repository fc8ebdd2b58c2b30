"""What `fit` wrote, as a report reads it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from scorecal.calibration.dev_sets import DevSets, Method, scored
from scorecal.calibration.fitted import Fitted
from scorecal.calibration.folds import Folds
from scorecal.calibration.head import HeadSettings
from scorecal.calibration.solvers import Loss
from scorecal.evaluation.compare import Case, Comparison, row_of
from scorecal.evaluation.evidence import Evaluation
from scorecal.judging.table import Table
from scorecal.judging.task import Task


@dataclass
class Run:
    """What `fit` wrote, with the data that it was fitted on read again."""

    folder: str
    command: str
    results: dict[str, Any]
    fitted: Fitted
    task: Task
    path: str
    """The local data file or folder; empty where there is none."""
    table: Table
    assistant: Float[Tensor, "items levels"]
    folds: Folds
    settings: HeadSettings
    loss: Loss
    texts: dict[str, str]
    """Of the items, by id; empty unless they are to be shown."""

    @property
    def title(self) -> str:
        """Its task and judge."""
        return f"{self.task.name}: {self.judge}"

    @property
    def judge(self) -> str:
        """Who gave the log-probabilities."""
        return self.results["judge"].get("judge", f"log-probabilities of {self.table.name}")

    @property
    def evaluation(self) -> Evaluation:
        """The figures of results.json."""
        return Evaluation.from_results(self.results)

    def comparison(self) -> Comparison:
        """The raw judge and the calibrated scores, for the records that comparisons have."""
        fitted, table, seed = self.fitted, self.table, self.results["seed"]
        evaluated = torch.tensor(fitted.evaluated)
        logits = fitted.logits(table.logprobs, self.assistant)[evaluated]
        raw = table.logprobs.log_softmax(-1).expand_as(logits)
        sets = DevSets(table, fitted.train[evaluated], self.folds, seed)
        case = Case(self.task.name, self.judge, table, sets, fitted.held_out[evaluated])
        methods = [
            Method("raw", "1", lambda sets: scored(raw, sets.table, {})),
            Method("calibrated", "learned", lambda sets: scored(logits, sets.table, {})),
        ]
        return Comparison(case, [row_of(case, method, [], ()) for method in methods], [])


def read_results(folder: Path) -> dict[str, Any]:
    """A run's results.json.

    Raises:
        ValueError: it is damaged, or its test split was not opened.
    """
    path = folder / "results.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        items = content["items"]
        if items != 0:
            Evaluation.from_results(content)
            _ = content["judge"].items(), content["versions"].items(), int(content["seed"])
            _ = content["data"]["label_mass"], f"{items:,}"
            _ = f"{content['head']['lambda']:.3g}", content["head"]["prior"]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{str(path)!r} is damaged. Fit again.") from None
    if items == 0:
        raise ValueError(
            f"run {str(folder)!r} has no results on test items. Fit with `--evaluate_test true`."
        )
    return content
