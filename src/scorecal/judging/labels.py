"""Labels as disjoint events: a label that begins another loses that other's mass."""

import math
from collections.abc import Collection, Iterable

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def unlisted_bound(listed: Iterable[float]) -> float:
    """The most that a token's log-probability can be where a list of the likeliest lacks it."""
    values = list(listed)
    rest = 1 - math.fsum(map(math.exp, values))
    return min(*values, 0.0, math.log(max(rest, torch.finfo(torch.float32).tiny)))


class LabelTree:
    """Labels as disjoint events in the tree of their token sequences."""

    def __init__(self, level_ids: list[list[list[int]]]) -> None:
        self.forms = [[tuple(form) for form in level] for level in level_ids]
        every = [form for level in self.forms for form in level]
        if len(set(every)) < len(every):
            raise ValueError("two labels have the same tokens. Change `data.task.scale`.")
        self.children: dict[tuple[int, ...], list[int]] = {}
        for form in every:
            for depth in range(len(form)):
                tokens = self.children.setdefault(form[:depth], [])
                if form[depth] not in tokens:
                    tokens.append(form[depth])
        inner = sorted(self.children, key=len, reverse=True)
        self.paths: list[tuple[int, ...]] = []
        for prefix in inner:
            if not any(path[: len(prefix)] == prefix for path in self.paths):
                self.paths.append(prefix)

    def censored(self, bounded: Collection[tuple[int, ...]]) -> Bool[Tensor, " levels"]:
        """The levels that some bounded step leads to or takes mass from."""
        return torch.tensor([any(self._leans(form, bounded) for form in level)
                             for level in self.forms])  # fmt: skip

    def _leans(self, form: tuple[int, ...], bounded: Collection[tuple[int, ...]]) -> bool:
        steps = [form[: depth + 1] for depth in range(len(form))]
        steps += [(*form, token) for token in self.children.get(form, [])]
        return any(step in bounded for step in steps)

    def level_logprobs(
        self, step: dict[tuple[int, ...], float], bounded: Collection[tuple[int, ...]] = ()
    ) -> Float[Tensor, " levels"]:
        """Log-probability of each level from the log-probability of each step in the tree.

        Where `bounded` steps are upper bounds, so are the levels that they touch.
        """
        reach: dict[tuple[int, ...], float] = {(): 0.0}
        for prefix in sorted(step, key=len):
            reach[prefix] = reach[prefix[:-1]] + step[prefix]
        levels = []
        for forms in self.forms:
            mass = torch.tensor([reach[form] for form in forms], dtype=torch.float64).exp()
            for index, form in enumerate(forms):
                # "1" followed by "0" is the label "10": the shorter label loses that mass.
                # A step that is only bounded may be nothing, and then takes nothing away.
                next_steps = [(*form, token) for token in self.children.get(form, [])]
                longer = [reach[path] for path in next_steps if path not in bounded]
                mass[index] -= torch.tensor(longer, dtype=torch.float64).exp().sum()
            levels.append(mass.clamp(min=0).sum())
        tiny = torch.finfo(torch.float32).tiny
        return torch.stack(levels).clamp(min=tiny).log().float()
