"""Many dev sets fitted as problems of one fit, against a loop over them.

    python benchmarks/fits.py [--sets 50] [--size 100]

Each dev set is so many random dev items of the shipped STS-B table. The figure is the loop's time
over that of the one fit, in this process, each twice and the faster taken.
"""

import argparse
import time
from collections.abc import Callable

import torch

from scorecal.calibration.folds import Folds
from scorecal.calibration.methods import DevSets, methods
from scorecal.commands import read_data


def fastest(work: Callable[[], object]) -> float:
    """Seconds of the faster of two runs."""
    taken = []
    for _ in range(2):
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return min(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", type=int, default=50)
    parser.add_argument("--size", type=int, default=100)
    given = parser.parse_args()
    data = read_data("sts.yaml")
    data.setup("fit")
    table = data.read()
    dev = torch.tensor([split == "dev" for split in table.splits]).nonzero().flatten()
    generator = torch.Generator().manual_seed(0)
    train = torch.zeros(given.sets, len(table.ids), dtype=torch.bool)
    for row in train:
        row[dev[torch.randperm(len(dev), generator=generator)[: given.size]]] = True
    print(f"{given.sets} dev sets of {given.size} items, {torch.get_num_threads()} threads")
    print("method             one fit, s   loop, s   loop / one fit")
    for method in methods(table):
        if method.name not in ("default head", "auto", "ordinal"):
            continue
        together = fastest(lambda method=method: method.answer(DevSets(table, train, Folds())))
        loop = fastest(
            lambda method=method: [
                method.answer(DevSets(table, row[None], Folds())) for row in train
            ]
        )
        print(f"{method.name:18}{together:11.2f}{loop:10.2f}{loop / together:17.1f}")


if __name__ == "__main__":
    main()
