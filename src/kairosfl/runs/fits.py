"""Whether a task, a model and an algorithm fit together: checked once, before anything is trained
or written.
"""

from __future__ import annotations

from kairosfl.core.fields import FISHER, FISHER_SAMPLED
from kairosfl.detectors import parse_detectors
from kairosfl.errors import UserError
from kairosfl.runs.config import RunConfig
from kairosfl.tasks.kinds import CLASSED
from kairosfl.tasks.task import Task
from kairosfl.tasks.vector import trained


def check(config: RunConfig, task: Task) -> None:
    """Try model, loss and metrics on a few samples, and what the rules and detectors need beyond
    them.

    Raises:
        UserError: Names what does not fit, and the fix.
    """
    if next(
        iter(trained(task.model).values())
    ).is_meta:  # a deployed server keeps shapes only and trains nothing
        return
    task.check()
    comparing = config.algorithm.names("needs", "features")
    if comparing:
        task.check_features(" and ".join(comparing))
    measured = {
        detector.measure for detector in parse_detectors(config.run.detector, config.run.allow)
    }
    if measured & {FISHER, FISHER_SAMPLED} and task.dataset.kind not in CLASSED:
        raise UserError(
            f"run.detector = {config.run.detector!r} measures the Fisher information of class probabilities, but data "
            f"set {task.dataset.name!r} is for {task.dataset.kind or 'a task of its own'}; use 'fgn' or 'fgn.paired()'."
        )
