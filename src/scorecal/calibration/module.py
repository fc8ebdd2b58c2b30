"""The LightningModule: fits all problems of a run, chooses, and keeps what was chosen."""

from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float, Int
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn

from scorecal.calibration.calibrators import constant_fit, ridge_fit
from scorecal.calibration.choice import choose, held_out_losses
from scorecal.calibration.data import Batch, ScoreData
from scorecal.calibration.fitted import Fitted
from scorecal.calibration.folds import (
    NUMERIC,
    By,
    Search,
    Select,
    make_problems,
    make_splits,
    partition,
    refuse_constant,
)
from scorecal.calibration.head import (
    HeadParameters,
    HeadSettings,
    NaturalHead,
    Problems,
    head_logits,
)
from scorecal.calibration.solvers import Loss, Objective, Rows, mean_loss, newton, newton_step
from scorecal.functional.correlation import pearson, spearman
from scorecal.functional.metrics import mean_absolute_error, mean_squared_error
from scorecal.functional.scaling import rankable_score
from scorecal.progress import notice

PER_SPLIT = (*NUMERIC, "prior_prompts", "prior_temperature")
NO_ASSISTANT = (
    "α is the weight of an assistant, and there is none. Set `--data.assistant.table`, or leave "
    "`contrast` out of `model.head` and of what is learned, selected or searched."
)


class Calibration(LightningModule):
    """A calibration head over a frozen judge.

    Args:
        head: what the head starts from and what it learns.
        select: fixed values tried on dev.
        loss: mse of the expected score, nll (soft-label cross-entropy), rps or negative pearson;
            all but nll start from the nll solution.
        solver: newton (exact, seconds), lbfgs or adam; one step an epoch.
        lr: step size of adam.
        per_split: numbers of the head, or the loss, of single splits, as a study chooses them.
    """

    problems: Problems

    def __init__(
        self,
        head: HeadSettings = HeadSettings(),  # noqa: B008  (never mutated)
        select: Select | None = None,
        loss: Loss = "mse",
        solver: Literal["newton", "lbfgs", "adam"] = "newton",
        lr: float = 0.05,
        per_split: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        super().__init__()
        head.check()
        if not lr > 0:
            raise ValueError(f"`model.lr` must be above 0, got {lr}.")
        self.settings = head
        self.select = select
        self.loss = loss
        self.solver = solver
        self.lr = lr
        self.per_split = per_split or {}
        self.seed = 0  # of folds and of the placebo prior; the command line sets it
        self.automatic_optimization = False
        self.searches: list[Search] = []
        self.fitted: Fitted | None = None

    @property
    def subtracts(self) -> bool:
        """Whether α isn't 0, or need not stay so."""
        tried = () if self.select is None else self.select.contrast or ()
        own = (given.get("contrast", 0) for given in self.per_split.values())
        return "contrast" in self.settings.learn or any((self.settings.contrast, *tried, *own))

    # Building

    def setup(self, stage: str) -> None:
        """Make the problems, unless `build` has been called before."""
        if self.trainer.strategy.root_device.type != "cpu":
            raise ValueError(
                "the head is fitted in float64 on the CPU. Set `--trainer.accelerator cpu`; the "
                "judge's own device is `data.judge.init_args.device`."
            )
        if not self.searches:
            self.build(self._data)

    def build(self, data: ScoreData) -> None:
        """Make the problems of the data's splits and a parameter row for each.

        Raises:
            ValueError: the data can't be fitted in the way that the configuration asks for.
        """
        table = data.read()
        if "mixing" in self.settings.learn and table.censored.any():
            raise ValueError(
                "the head's M mixes all labels, but some are absent from a top_logprobs list. "
                "Take `mixing` out of `model.head.learn`, or ask for more top_logprobs."
            )
        splits = make_splits(table, data.folds, self.seed)
        for split in splits:
            partition(table, split.dev, data.folds.inner, data.folds.by, self.seed)
            refuse_constant(table.gold[split.dev].tolist())
        own = self.settings_per_split([split.name for split in splits])
        self.problems, self.searches = make_problems(
            table, splits, data.folds, self.settings, self.select, self.seed,
            per_split={name: settings for name, (settings, _) in own.items()},
        )  # fmt: skip
        self.losses: list[Loss] = [
            own[search.split.name][1]
            for search in self.searches
            for _ in range(search.inner.numel() + len(search.full))
        ]
        self.natural = nn.Parameter(self._stored(self._head().start()))
        self.waiting = torch.ones(len(self.natural), dtype=torch.bool)

    def settings_per_split(self, names: list[str]) -> dict[str, tuple[HeadSettings, Loss]]:
        """What each split's head starts from and is fitted for."""
        if unknown := set(self.per_split) - set(names):
            raise ValueError(
                f"`model.per_split` names {unknown.pop()!r}, the splits are {', '.join(names)}."
            )
        found = {}
        for name in names:
            given = dict(self.per_split.get(name, {}))
            loss = given.pop("loss", self.loss)
            numbers = all(isinstance(value, (int, float)) for value in given.values())
            if loss not in get_args(Loss) or set(given) - set(PER_SPLIT) or not numbers:
                raise ValueError(
                    f"`model.per_split` of {name!r} must hold numbers ({', '.join(PER_SPLIT)}) or "
                    f"a loss, got {self.per_split[name]}."
                )
            settings = replace(self.settings, **given)
            settings.check()
            found[name] = settings, loss
        return found

    @property
    def _data(self) -> ScoreData:
        return self.trainer.datamodule  # type: ignore[attr-defined]

    def _head(self) -> NaturalHead:
        return NaturalHead(self.problems, self.settings)

    def _stored(self, natural: Tensor) -> Tensor:
        """Natural parameters with log u in the place of u: a gradient step keeps u above 0."""
        stored = natural.clone()
        if (columns := self._head().columns.get("temperature")) is not None:
            stored[:, columns] = natural[:, columns].log()
        return stored

    def _natural(self) -> Float[Tensor, "problems columns"]:
        if (columns := self._head().columns.get("temperature")) is None:
            return self.natural
        at = columns.start
        return torch.cat(
            [self.natural[:, :at], self.natural[:, columns].exp(), self.natural[:, at + 1 :]], -1
        )

    def parameters_by_problem(self) -> HeadParameters:
        """λ, T, δ, M and α of every problem."""
        return self._head().parameters(self._natural().detach())

    def _objectives(
        self, batch: Batch, stage: Loss | None = None
    ) -> list[tuple[Int[Tensor, "..."], Objective]]:
        """The problems of each loss, and their objective under it, or under that of a stage."""
        rows, found = self._rows(batch), []
        for loss in dict.fromkeys(self.losses):
            index = torch.tensor([at for at, own in enumerate(self.losses) if own == loss])
            if stage != loss:
                head = NaturalHead(batch.problems.take(index), self.settings)
                found.append((index, Objective(head, rows, stage or loss)))
        return found

    # Training: one epoch is one step of the solver on all data

    def configure_optimizers(self) -> Any:
        """Adam and LBFGS are torch's; Newton's step is ours."""
        if not self.settings.learn or self.solver == "newton":
            return None
        if self.solver == "adam":
            return torch.optim.Adam([self.natural], lr=self.lr)
        return torch.optim.LBFGS(
            [self.natural], line_search_fn="strong_wolfe", tolerance_grad=1e-10,
            tolerance_change=1e-14, history_size=50,
        )  # fmt: skip

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        """One step of the solver on every problem."""
        if not self.settings.learn:
            self.trainer.should_stop = True
            return
        if self.current_epoch == 0:
            # Only cross-entropy is convex: the other losses start from its solution.
            natural = self._natural().detach().clone()
            for index, objective in self._objectives(batch, "nll"):
                natural[index] = newton(objective, natural[index], exact=False)
            self._write(natural)
        objectives = self._objectives(batch)
        if self.solver == "newton":
            natural = self._natural().detach().clone()
            for index, objective in objectives:
                natural[index], self.waiting[index] = newton_step(
                    objective, natural[index], self.waiting[index]
                )
            self._write(natural)
            self.trainer.should_stop = not self.waiting.any()
        else:
            self._gradient_step(objectives)
        self._log_training(objectives)

    def _log_training(self, objectives: list[tuple[Int[Tensor, "..."], Objective]]) -> None:
        """The objective of each split's first candidate, by loss."""
        shown = torch.stack([search.full[0] for search in self.searches])
        natural = self._natural().detach()
        for index, objective in objectives:
            own = torch.isin(index, shown).nonzero().flatten()
            if len(own):
                figures = [part.value(natural[index[i]]) for i, part in objective.blocks(own)]
                self.log(f"train/{objective.loss}", torch.cat(figures).mean().float(),
                         on_step=False, on_epoch=True, batch_size=1)  # fmt: skip

    def _gradient_step(self, objectives: list[tuple[Int[Tensor, "..."], Objective]]) -> None:
        optimizer = self.optimizers()
        assert isinstance(optimizer, LightningOptimizer)

        def closure() -> Tensor:
            optimizer.zero_grad()
            total = torch.zeros((), dtype=self.natural.dtype, device=self.natural.device)
            natural = self._natural()
            for index, objective in objectives:
                for at, block in objective.blocks(torch.arange(len(index))):
                    total = total + block.value(natural[index[at]]).sum()
            self.manual_backward(total)
            assert self.natural.grad is not None
            # A fold of constant gold has no correlation, and nothing to learn from it.
            self.natural.grad.nan_to_num_(nan=0.0)
            return total

        optimizer.step(closure)
        if self.solver == "lbfgs":
            assert self.natural.grad is not None
            self.trainer.should_stop = bool(self.natural.grad.abs().max() < 1e-8)

    def _write(self, natural: Tensor) -> None:
        with torch.no_grad():
            self.natural.copy_(self._stored(natural))

    # Choosing

    def _rows(self, batch: Batch) -> Rows:
        return Rows(batch.logprobs, batch.assistant, batch.gold, self._data.read().values)

    def _logits(self, heads: HeadParameters, batch: Batch) -> Tensor:
        return head_logits(
            heads, batch.logprobs, batch.assistant, temperature_on=self.settings.temperature_on
        )

    def choose(self, batch: Batch) -> list[int]:
        """The candidate of each split that does best on the inner folds of its dev part.

        An `auto` ridge is the maximum of held-out likelihood times a log-normal around the default
        ridge: few items leave the default in place.
        """
        if all(len(search.full) == 1 for search in self.searches):
            return [0] * len(self.searches)
        by: By = self.select.by if self.select else self.loss
        losses = held_out_losses(
            self.parameters_by_problem(), batch.problems, self.searches, self._rows(batch), by,
            temperature_on=self.settings.temperature_on,
        )  # fmt: skip
        return choose(self.searches, self.problems, losses, by, favour_default=self.select is None)

    def _finish(self) -> None:
        """Choose, and keep the chosen heads with what they are compared with."""
        data, table = self._data, self._data.read()
        chosen = self.choose(data.batch(self.problems))
        full = torch.stack(
            [search.full[pick] for search, pick in zip(self.searches, chosen, strict=True)]
        )
        problems = self.problems.take(full)
        features, folds = table.logprobs.log_softmax(-1), data.folds
        reference = [
            ridge_fit(
                features,
                table.gold,
                search.split.dev.double(),
                [
                    part.double()
                    for part in partition(table, search.split.dev, folds.inner, folds.by, self.seed)
                ],
            )
            for search in self.searches
        ]
        self.fitted = Fitted(
            names=[search.split.name for search in self.searches],
            heads=self.parameters_by_problem().take(full),
            ids=table.ids,
            train=problems.train > 0,
            held_out=problems.held_out > 0,
            values=table.values,
            labels=list(table.labels),
            temperature_on=self.settings.temperature_on,
            prior=self.settings.prior,
            identity=table.identity,
            ridges=torch.stack([problems.ridge_bias, problems.ridge_mixing], -1),
            constant=constant_fit(table.gold, problems.train),
            reference=torch.stack(reference),
        )

    # Validation: held-out means over the inner folds

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log `dev/…`, and the raw judge on the same rows beside it."""
        for name, value in self.dev_metrics(batch).items():
            self.log(name, float(value), prog_bar=name == "dev/spearman", batch_size=1)

    def held_out_logits(
        self, batch: Batch
    ) -> tuple[Float[Tensor, "problems items levels"], Float[Tensor, "problems items"]]:
        """Logits of the evaluated splits' inner fits at the chosen candidates, and their rows."""
        searches = self.searches[:-1] or self.searches
        inner = torch.cat(
            [search.inner[pick] for search, pick in zip(searches, self.choose(batch), strict=False)]
        )
        logits = self._logits(self.parameters_by_problem().take(inner), batch)
        return logits, batch.problems.held_out[inner]

    def dev_metrics(self, batch: Batch) -> dict[str, float]:
        """Means over the inner held-out parts of the evaluated splits, at the chosen candidates."""
        values = self._data.read().values
        logits, weights = self.held_out_logits(batch)
        raw = batch.logprobs.log_softmax(-1).expand_as(logits)
        metrics: dict[str, float] = {}
        for suffix, z in (("", logits), ("_raw", raw)):
            score = rankable_score(z, values)
            figures = {
                "spearman": spearman(score, batch.gold, weights),
                "pearson": pearson(score, batch.gold, weights),
                "mse": mean_squared_error(score, batch.gold, weights),
                "mae": mean_absolute_error(score, batch.gold, weights),
                "nll": mean_loss("nll", z, batch.gold, values, weights),
                "rps": mean_loss("rps", z, batch.gold, values, weights),
            }
            metrics |= {f"dev/{name}{suffix}": f.mean().item() for name, f in figures.items()}
        return metrics

    def on_train_end(self) -> None:
        """Choose among the candidates."""
        if self.settings.learn and self.solver == "newton" and self.waiting.any():
            notice(
                f"{int(self.waiting.sum())} of {len(self.waiting)} fits have not converged in "
                f"{self.trainer.max_epochs} epochs; raise `--trainer.max_epochs`"
            )
        self._finish()

    def require_fitted(self) -> Fitted:
        """The chosen heads, once there are any."""
        if self.fitted is None:
            raise ValueError("no head has been fitted. Set `--ckpt_path` to a run's last.ckpt.")
        return self.fitted

    # Checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the chosen heads beside Lightning's own state."""
        if self.fitted is None:
            self._finish()
        checkpoint["scorecal"] = self.require_fitted().state()
        if self.trainer.training:
            self.fitted = None

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of other problems before Lightning meets its shapes."""
        stored = checkpoint["state_dict"]["natural"]
        if stored.shape != self.natural.shape:
            raise ValueError(
                f"the checkpoint holds {tuple(stored.shape)} parameters, this configuration "
                f"{tuple(self.natural.shape)}. Use the run's own config.yaml."
            )
