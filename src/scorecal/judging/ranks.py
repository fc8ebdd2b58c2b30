"""Several processes or machines, started by Lightning, share the chunks of one elicitation."""

import contextlib
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor
from torch.utils.data import DataLoader


def run(trainer: Trainer, job: Any) -> None:
    """Lightning's `predict` over the chunks of a job; returns when every rank's are on disk.

    Args:
        trainer: with any number of devices and nodes; all must see the store's folder.
        job: gives `rows` of a chunk and takes them in `write`.
    """
    trainer.loggers = []  # nothing to log, and a logger makes a run directory
    trainer.callbacks.append(_Parts(job))  # type: ignore[attr-defined]
    # Every rank is given the same list, whatever others have written meanwhile.
    loader: DataLoader[int] = DataLoader(range(len(job.plan.chunks)))  # type: ignore[arg-type]
    # By the class: a trainer's own `predict` may be another command.
    Trainer.predict(trainer, _Chunks(job), loader, return_predictions=False)


class _Chunks(LightningModule):
    """Judges the chunks that its rank is given; those on disk are done."""

    def __init__(self, job: Any) -> None:
        super().__init__()
        self.job = job

    def predict_step(self, number: Tensor) -> Any:
        chunk = int(number)
        return () if self.job.store.has_part(chunk) else self.job.rows(chunk)


class _Parts(BasePredictionWriter):
    """Writes each chunk as soon as it is judged, and waits for the other ranks at the end."""

    def __init__(self, job: Any) -> None:
        super().__init__(write_interval="batch")
        self.job = job
        self.open = contextlib.ExitStack()

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            self.advance = self.open.enter_context(self.job.progress())

    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        prediction: Any,
        batch_indices: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        if prediction:
            self.job.write(int(batch), *prediction)
        if trainer.is_global_zero:
            self.advance()

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.strategy.barrier()
        self.open.close()
