"""Weights & Biases: what a run keeps there beside its metrics. No other module imports wandb."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loggers import Logger, WandbLogger

from scorecal.evaluation.diagnosis import bias_record
from scorecal.evaluation.drawing import NoFigures
from scorecal.evaluation.evidence import Evaluation
from scorecal.evaluation.figures import latent_bias_figure, score_share_figure
from scorecal.evaluation.summary import table_rows
from scorecal.judging.table import Table
from scorecal.progress import is_quiet, notice

if TYPE_CHECKING:
    import wandb

_NO_KEY = (
    "W&B has no API key. Run `wandb login`, or set `--trainer.logger.init_args.offline true`, or "
    "WANDB_MODE=disabled."
)


def wandb_loggers(loggers: Sequence[Logger]) -> list[WandbLogger]:
    """Those that write to W&B."""
    return [logger for logger in loggers if isinstance(logger, WandbLogger)]


def require_login(loggers: Sequence[Logger]) -> None:
    """Raise ValueError where W&B would ask for a key, or refuse it, after the data is judged."""
    if is_quiet():  # WANDB_SILENT would hide W&B's errors too
        os.environ |= {"WANDB_SHOW_INFO": "false", "WANDB_SHOW_WARNINGS": "false"}
    for logger in wandb_loggers(loggers):
        if logger._offline:
            continue
        import wandb

        mode = logger._wandb_init.get("mode") or wandb.setup().settings.mode
        if mode in ("offline", "dryrun", "disabled"):
            continue
        try:
            known = wandb.login(prompt=False)
        except wandb.Error as error:
            raise ValueError(f"W&B: {error}") from None
        if not known:
            raise ValueError(_NO_KEY)


def start(loggers: Sequence[Logger], config: dict[str, Any], table: Table) -> None:
    """Open the run with its whole configuration and the identity of its store.

    Raises:
        ValueError: W&B refuses the run, or its sweep searches what the head learns.
    """
    for logger in wandb_loggers(loggers):
        import wandb

        # Lightning hands it on though nobody set it, and W&B warns that it is of no use any more.
        logger._wandb_init.pop("anonymous", None)
        # Where its folder is missing, W&B finds no commit either.
        Path(logger.save_dir or ".").mkdir(parents=True, exist_ok=True)
        try:
            run = logger.experiment
        except wandb.Error as error:
            raise ValueError(f"W&B: {error}") from None
        searched = run.config.keys()  # of a sweep: nothing else is there yet
        for name in config["model"]["head"]["learn"]:
            if f"model.head.{name}" in searched:
                raise ValueError(
                    f"the sweep searches `model.head.{name}`, and `model.head.learn` names {name!r}"
                    f" too: a learned value is only a starting point. Take {name!r} out of `learn`."
                )
        store = {"table": table.name, **table.identity}
        run.config.update({**config, "store": store}, allow_val_change=True)


def log_results(
    loggers: Sequence[Logger],
    table: Table,
    evaluation: Evaluation | None,
    shares: Mapping[str, list[float]],
    *,
    shares_of: str,
) -> None:
    """Log the comparison, if there is one, and the figures.

    Args:
        loggers: the trainer's.
        table: the judgements.
        evaluation: of the test items.
        shares: of each label, by `score_shares`.
        shares_of: the items that they are of.
    """
    for logger in wandb_loggers(loggers):
        import wandb

        logged: dict[str, Any] = {}
        if evaluation is not None:
            (_, *methods), *rows = table_rows(evaluation)
            logged["comparison"] = wandb.Table(columns=["metric", *methods], data=rows)
        try:
            logged |= _figures(table, shares, shares_of)
        except NoFigures as error:  # the rest is worth having without the figures
            notice(f"no figures logged: {error}")
        logger.experiment.log(logged)


def _figures(
    table: Table, shares: Mapping[str, list[float]], shares_of: str
) -> dict[str, "wandb.Image"]:
    import wandb

    judge, labels = table.identity.get("judge", table.name), list(table.labels)
    drawn = {
        "score_shares": score_share_figure(
            {judge: shares}, labels, title=f"Predicted and gold scores on {shares_of}"
        )
    }
    if latent := bias_record(table):
        drawn["latent_bias"] = latent_bias_figure(
            {judge: latent}, labels, title="Latent number bias"
        )
    return {f"figures/{name}": wandb.Image(figure) for name, figure in drawn.items()}


def log_checkpoint(loggers: Sequence[Logger], path: Path) -> None:
    """Log a checkpoint as an artifact of the run."""
    for logger in wandb_loggers(loggers):
        import wandb

        artifact = wandb.Artifact(f"head-{logger.experiment.id}", type="model")
        artifact.add_file(str(path))
        logger.experiment.log_artifact(artifact)


def finish(loggers: Sequence[Logger]) -> None:
    """Send what is left and close the run: a later one in this process is its own."""
    for logger in wandb_loggers(loggers):
        logger.experiment.finish()
