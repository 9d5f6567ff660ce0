"""Engine `loop`: one client after another, on a CPU or a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from kairosfl.client.trainer import Trainer
from kairosfl.core.fields import Briefs, Reports
from kairosfl.engines.evaluate import Evaluator
from kairosfl.engines.precision import Precision
from kairosfl.errors import UserError
from kairosfl.tasks.task import Task


class Loop(Evaluator):
    """Trains with the plain trainer of `client/`, one client after another.

    Args:
        task: What is learnt.
        device: Where clients train.
        precision: "float32", or on a GPU "tf32".
    """

    trains: type[Trainer] = Trainer

    def __init__(
        self, task: Task, device: torch.device | str = "cpu", *, precision: str = "float32"
    ) -> None:
        self.precision = Precision.of(precision, torch.device(device))
        if precision == "bfloat16":
            raise UserError(
                "run.precision = 'bfloat16' needs run.engine = 'batched'; "
                "loop has 'float32' and 'tf32'."
            )
        self.trainer = self.trains(task, torch.device(device))
        super().__init__(task, self.trainer.device, self.trainer.predict)

    def train(self, briefs: Briefs) -> Reports:
        """One report per client."""
        return one_by_one(self.trainer, briefs, self.precision)

    def start(self) -> Tensor:
        """The model before training, on this engine's device."""
        return self.task.start().to(self.device)


def one_by_one(trainer: Trainer, briefs: Briefs, precision: Precision) -> Reports:
    """The reports of a cohort whose clients train one after another."""
    briefs.check(trainer.layout)
    start = briefs.start
    length = 0 if briefs.measures_only() else start.shape[-1]
    delta = torch.empty(len(briefs), length, dtype=start.dtype, device=trainer.device)
    with precision():
        reports = []
        for row, brief in enumerate(briefs.each()):
            reports.append(trainer.follow(brief, delta[row] if length else None))
    return Reports.stack(reports, delta.to(start.device))
