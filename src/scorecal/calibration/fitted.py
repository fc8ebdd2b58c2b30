"""Fitted heads outside of training: in a checkpoint, on a page, on new items."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from scorecal.calibration.head import HeadParameters, head_logits
from scorecal.functional.scaling import expected_score
from scorecal.judging.table import Table

FORMAT = 1


@dataclass
class Fitted:
    """The chosen head of every split, `deploy` last, and which items each was fitted on."""

    names: list[str]
    heads: HeadParameters
    ids: list[str]
    train: Bool[Tensor, "problems items"]
    held_out: Bool[Tensor, "problems items"]
    values: Float[Tensor, " levels"]
    labels: list[str]
    temperature_on: str
    prior: str
    identity: dict[str, str]
    ridges: Float[Tensor, "problems two"]
    """Of all terms but M, and of M: given or chosen."""
    constant: Float[Tensor, " problems"]
    reference: Float[Tensor, "problems coefficients"]

    def state(self) -> dict[str, Any]:
        """What the checkpoint keeps under `scorecal`."""
        return {
            "format": FORMAT,
            "identity": self.identity,
            "scale": {"labels": self.labels, "values": self.values.tolist()},
            "names": self.names,
            "problems": self.heads._asdict(),
            "deploy": self.names.index("deploy"),
            "ids": self.ids,
            "train": self.train,
            "held_out": self.held_out,
            "temperature_on": self.temperature_on,
            "prior": self.prior,
            "ridges": self.ridges,
            "constant": self.constant,
            "reference": self.reference,
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "Fitted":
        """Read what `state` wrote."""
        if state["format"] != FORMAT:
            raise ValueError(
                f"the checkpoint has format {state['format']}, this version reads {FORMAT}. "
                "Fit again."
            )
        return cls(
            state["names"],
            HeadParameters(**state["problems"]),
            state["ids"],
            state["train"],
            state["held_out"],
            torch.tensor(state["scale"]["values"], dtype=torch.float64),
            state["scale"]["labels"],
            state["temperature_on"],
            state["prior"],
            state["identity"],
            state["ridges"],
            state["constant"],
            state["reference"],
        )

    @classmethod
    def from_checkpoint(cls, path: str) -> "Fitted":
        """Read a checkpoint.

        Raises:
            ValueError: there is none, or it is no checkpoint of scorecal.
        """
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)["scorecal"]
        except FileNotFoundError:
            raise ValueError(f"no checkpoint {path!r}. Set `--ckpt_path`.") from None
        except Exception as error:  # torch raises many kinds on a file that is no checkpoint
            raise ValueError(
                f"{path!r} is no checkpoint that `fit` wrote ({type(error).__name__}). "
                "Set `--ckpt_path`."
            ) from error
        return cls.from_state(state)

    def logits(
        self, logprobs: Float[Tensor, "items levels"], assistant: Float[Tensor, "items levels"]
    ) -> Float[Tensor, "problems items levels"]:
        """Calibrated logits under every head."""
        return head_logits(self.heads, logprobs, assistant, temperature_on=self.temperature_on)

    def test_rows(self, table: Table) -> Float[Tensor, "problems items"]:
        """Each evaluated problem's own held-out rows of a table.

        Raises:
            ValueError: a row that a problem would be tested on was used to fit it.
        """
        rows = {key: index for index, key in enumerate(self.ids)}
        place = torch.tensor([rows.get(key, -1) for key in table.ids])
        known = place >= 0
        result = torch.zeros(len(self.evaluated), len(table.ids), dtype=torch.float64)
        for line, problem in enumerate(self.evaluated):
            if self.names == ["deploy"]:
                test = torch.tensor([split == "test" for split in table.splits])
                used = torch.zeros_like(test)
                used[known] = self.train[problem, place[known]]
                if (test & used).any():
                    first = table.ids[int((test & used).nonzero()[0])]
                    raise ValueError(
                        f"item {first!r} is a test item here, but the checkpoint was fitted on "
                        "it. Test on items that it has not seen."
                    )
            else:
                if not known.all():
                    first = table.ids[int((~known).nonzero()[0])]
                    raise ValueError(
                        f"item {first!r} belongs to no fold of this checkpoint. "
                        "Test a cross-validated checkpoint on the data it was made from."
                    )
                test = self.held_out[problem, place]
            result[line] = test.double()
        return result

    @property
    def evaluated(self) -> list[int]:
        """Which heads have a test figure: the folds, or `deploy` with the data's own split."""
        if self.names == ["deploy"]:
            return [0]
        return [index for index, name in enumerate(self.names) if name != "deploy"]

    @property
    def deploy(self) -> int:
        """The head for new items."""
        return self.names.index("deploy")

    def describe(self, index: int) -> dict[str, Any]:
        """A head as numbers that fit on a page."""
        one = self.heads.take(torch.tensor([index]))
        page: dict[str, Any] = {
            "name": self.names[index],
            "labels": self.labels,
            "values": self.values.tolist(),
            "lambda": one.strength.item(),
            "temperature": one.temperature.item(),
            "temperature_on": self.temperature_on,
            "prior": self.prior,
            "prior_term": one.prior[0].tolist(),
            "delta": one.bias[0].tolist(),
            "bias": one.total_bias()[0].tolist(),
            "ridge_bias": self.ridges[index, 0].item(),
        }
        if one.contrast.any():
            page["contrast"] = one.contrast.item()
        ridge_mixing = self.ridges[index, 1].item()
        if one.mixing.any() and math.isfinite(ridge_mixing):  # an infinite ridge is no M
            page |= {
                "mixing": one.mixing[0].tolist(),
                "centre": one.centre[0].tolist(),
                "ridge_mixing": ridge_mixing,
            }
        return page


def score_interval(
    logits: Float[Tensor, "items levels"],
    censored: Bool[Tensor, "items levels"],
    values: Float[Tensor, " levels"],
) -> tuple[Float[Tensor, " items"], Float[Tensor, " items"]]:
    """Lowest and highest expected score with each censored label at its bound or at zero.

    A mean moves furthest when the censored labels on one side of a threshold go, so only the
    thresholds between labels have to be tried.
    """
    scores = []
    for threshold in range(len(values) + 1):
        upper = torch.arange(len(values), device=values.device) >= threshold
        for gone in (upper, ~upper):
            trial = logits.masked_fill(censored & gone, -torch.inf)
            score = expected_score(trial, values)
            scores.append(score.where(trial.isfinite().any(-1), expected_score(logits, values)))
    stacked = torch.stack(scores)
    return stacked.amin(0), stacked.amax(0)
