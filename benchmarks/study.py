"""A study's time by what takes it: fitting and scoring trials, and Optuna itself.

    python benchmarks/study.py [--trials 1000] [--sampler random]

Trials over strength, temperature, ridge and loss, on the five inner folds of the shipped STS-B
table's dev set, in memory.
"""

import argparse
import time

import torch

from scorecal.calibration.head import HeadSettings
from scorecal.calibration.module import Calibration
from scorecal.calibration.trials import DevPart
from scorecal.commands import read_data
from scorecal.study import SearchSettings, run_study

SPACE = {
    "model.head.strength": {"low": 0.0, "high": 2.0},
    "model.head.temperature": {"low": 0.2, "high": 5.0, "log": True},
    "model.head.ridge_bias": {"low": 0.001, "high": 1000.0, "log": True},
    "model.loss": ["mse", "nll"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--sampler", default="random")
    given = parser.parse_args()
    data = read_data("sts.yaml")
    data.setup("fit")
    model = Calibration(HeadSettings(learn=["bias"]))
    search = SearchSettings(SPACE, sampler=given.sampler, trials=given.trials)
    fitting, scores = 0.0, DevPart.scores

    def timed(*arguments: object) -> torch.Tensor:
        nonlocal fitting
        started = time.perf_counter()
        found = scores(*arguments)  # type: ignore[arg-type]
        fitting += time.perf_counter() - started
        return found

    DevPart.scores = timed  # type: ignore[method-assign,assignment]
    started = time.perf_counter()
    run_study(search, model, data)
    total = time.perf_counter() - started
    print(f"{given.trials} trials by {given.sampler}, {torch.get_num_threads()} threads")
    print(f"total {total:.1f} s; fits and scores {fitting / total:.0%}")
    each = 1000 * (total - fitting) / given.trials
    print(f"Optuna itself {1 - fitting / total:.0%}, {each:.2f} ms a trial")


if __name__ == "__main__":
    main()
