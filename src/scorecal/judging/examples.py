"""Scored items that a judge is shown before every item."""

import random
from collections import Counter
from collections.abc import Sequence

from scorecal.judging.task import Item

_SEED = 0  # fixed: who is shown what is part of the task, not of a run


def draw_examples(
    items: Sequence[Item], count: int, *, pooled: bool
) -> tuple[list[Item], list[Item]]:
    """Some scored dev items, in random order, and all other items.

    Args:
        items: all dev and test items.
        count: how many are drawn.
        pooled: outer folds make dev of both splits, so both are drawn from.

    Raises:
        ValueError: there are not so many.
    """
    texts = Counter(tuple(sorted(item.fields.values())) for item in items)
    scored = [
        at
        for at, item in enumerate(items)
        # A text that test holds too would show the judge its score.
        if item.gold is not None
        and not item.leak
        and (item.split == "dev" or (pooled and texts[tuple(sorted(item.fields.values()))] == 1))
    ]
    if count > len(scored):
        raise ValueError(
            f"`data.task.examples` is {count}, but there are {len(scored)} scored dev items that "
            "test doesn't hold. Lower it, or add scored items."
        )
    drawn = random.Random(_SEED).sample(scored, count)
    shown = set(drawn)
    return [items[at] for at in drawn], [item for at, item in enumerate(items) if at not in shown]
