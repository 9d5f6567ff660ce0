"""The next round before the server asks for it: as plain averaging would ask, compared with what it
does ask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kairosfl.core.fields import Briefs, fields
from kairosfl.core.run import changed
from kairosfl.engines.batched.state import upload

LARGEST = 1 << 30  # bytes of updates up to which a cohort is trained on a guess
MISSES = 3  # wrong guesses in a row after which the engine stops guessing
TOLD = tuple(entry.name for entry in fields(Briefs) if not entry.local)


class Luck:
    """Whether to guess again: until `MISSES` guesses in a row were wrong."""

    def __init__(self) -> None:
        self.misses, self.hit = 0, False

    def __bool__(self) -> bool:
        return self.misses < MISSES

    def __call__(self, hit: bool) -> bool:
        """Note how a guess turned out."""
        self.misses, self.hit = 0 if hit else self.misses + 1, hit
        return hit


def averages(briefs: Briefs, delta: Tensor, device: torch.device) -> bool:
    """Whether what follows these updates can be guessed, nothing changing but the model and the
    clients, and trained.

    A stop rule's steps follow from each other on the host, which has no time for them now.
    """
    asked = (
        briefs.measure or None,
        briefs.alone or None,
        briefs.stop_below,
        briefs.update_clip,
        briefs.update_noise,
    )
    plain = (
        all(each is None for each in asked)
        and briefs.vectors_down() == 1
        and briefs.start.ndim == 1
    )
    return plain and delta.nbytes <= LARGEST and delta.device.type == device.type


def guessed(briefs: Briefs, n: Tensor, delta: Tensor, clients: tuple[int, ...]) -> Briefs:
    """The next round's briefs if the server moves the model by the mean of these updates, weighted
    by samples.

    Values that are not finite keep their old ones: training such a model may fail, and the server
    will ask for another.
    """
    weights = n.double()
    x = (upload((weights / weights.sum()).to(delta.dtype), delta.device) @ delta).add_(briefs.start)
    start = torch.where(x.isfinite(), x, briefs.start)
    lr = briefs.lr if briefs.next_lr is None else torch.full_like(briefs.lr, briefs.next_lr)
    return changed(
        briefs,
        round=torch.full((len(clients),), briefs.newest + 1),
        ids=torch.tensor(clients),
        start=start,
        lr=lr,
    )


def identical(some: Briefs, others: Briefs) -> bool:
    """Whether two cohorts are told the same, to the bit; waits for the device."""
    return all(_same(getattr(some, name), getattr(others, name)) for name in TOLD)


def _same(a: object, b: object) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return type(a) is type(b) and a == b
    if a is b:
        return True
    if a.is_cpu and b.is_cpu:  # several times faster for a few numbers
        x, y = a.numpy(), b.numpy()
        return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
    if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
