"""Labels as disjoint events: a label that begins another loses that other's mass."""

import torch
from jaxtyping import Float
from torch import Tensor


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

    def level_logprobs(self, step: dict[tuple[int, ...], float]) -> Float[Tensor, " levels"]:
        """Log-probability of each level from the log-probability of each step in the tree."""
        reach: dict[tuple[int, ...], float] = {(): 0.0}
        for prefix in sorted(step, key=len):
            reach[prefix] = reach[prefix[:-1]] + step[prefix]
        levels = []
        for forms in self.forms:
            mass = torch.tensor([reach[form] for form in forms], dtype=torch.float64).exp()
            for index, form in enumerate(forms):
                # "1" followed by "0" is the label "10": the shorter label loses that mass.
                longer = [reach[(*form, token)] for token in self.children.get(form, [])]
                mass[index] -= torch.tensor(longer, dtype=torch.float64).exp().sum()
            levels.append(mass.clamp(min=0).sum())
        tiny = torch.finfo(torch.float32).tiny
        return torch.stack(levels).clamp(min=tiny).log().float()
