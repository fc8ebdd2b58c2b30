"""A table's answers to the balanced orders of its rubric, by position (paper 3)."""

import torch
from jaxtyping import Float
from torch import Tensor

from scorecal.functional.positions import position_mass
from scorecal.judging.rubric import rotations, shown_levels
from scorecal.judging.table import Table


def balanced_orders(table: Table) -> list[str]:
    """The rotations of the written order; none where the table lacks one of them."""
    wanted = rotations(table.written_order)
    return wanted if all(order in table.by_order for order in wanted) else []


def table_position_mass(table: Table) -> Float[Tensor, "items levels"]:
    """Each item's mean probability at each position, over the balanced orders."""
    orders = balanced_orders(table)
    shown = torch.tensor([shown_levels(order, table.labels) for order in orders])
    return position_mass(torch.stack([table.by_order[order] for order in orders]), shown)


def fixed_order_mass(table: Table) -> Float[Tensor, "items levels"]:
    """Each item's mean probability at the position where each label stands in the fixed order.

    Its mean over items is P(y) of the prior `position`.

    Raises:
        ValueError: the judge was shown no rubric, the log-probabilities average several orders, or
            a balanced order is missing.
    """
    if not table.orders:
        raise ValueError(
            f"the prior `position` needs a judge that was shown a rubric in several orders, and "
            f"table {table.name!r} is of one without. Set `--model.head.prior` to another, or "
            "`data.task.rubric` and elicit."
        )
    if len(table.orders) > 1:
        raise ValueError(
            f"the prior `position` corrects one fixed order of the rubric, and the mean over "
            f"{len(table.orders)} orders is calibrated here. Set `--data.task.orders none`."
        )
    wanted = rotations(table.written_order)
    if missing := [order for order in wanted if order not in table.by_order]:
        raise ValueError(
            f"the prior `position` is measured on the {len(wanted)} balanced orders of the rubric, "
            f"and table {table.name!r} lacks {len(missing)} of them, {missing[0]!r} first. Elicit "
            "a store with `--data.task.orders balanced`, and name it with `--data.table`."
        )
    return table_position_mass(table)[:, _positions(table)]


def _positions(table: Table) -> list[int]:
    """The position of each level in the one order that the table's log-probabilities are of."""
    shown = shown_levels(table.orders[0], table.labels)
    return [shown.index(level) for level in range(len(shown))]
