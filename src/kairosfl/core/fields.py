"""The one list of fields: everything that a client can be told and everything that it can report.

A brief is local training as data. Every step of a client is

    g = scale · ∇L + pull · (w − start) + push,    ∇L at w, or at w + radius · ∇L / ‖∇L‖ (SAM),

followed by the optimizer: sgd with momentum and weight decay, or adamw. The correction alone tells FedAvg, FedProx,
SCAFFOLD, VRL-SGD, FedDyn and FedCM apart.

`Briefs` and `Reports` declare each field once: its type, its shape, its default, which rules may write it, and the
range in which a reported value is accepted. Stacking and unstacking, the wire, the checks of reports, the columns that
the batched engine and its kernels read, and the table in the documentation are all derived from this list: adding a
field means adding a line here and using it in `client/`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, replace
from math import inf, nan
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
import torch
from torch import Tensor

from kairosfl.errors import UserError

SCORE_BEFORE, SCORE_AFTER, FISHER, FISHER_SAMPLED = "score_before", "score_after", "fisher", "fisher_sampled"
ACCURACY_BEFORE, ACCURACY_AFTER = "accuracy_before", "accuracy_after"
BEFORE, AFTER = (SCORE_BEFORE, ACCURACY_BEFORE), (SCORE_AFTER, ACCURACY_AFTER)  # measured on all local data
LARGEST = float(np.finfo(np.float64).max)
NUMBER = (int, float)
SLACK = 1e-6  # for cosines and fractions of an epoch, which are rounded in transit

Shape = Literal["each", "shared", "vector"]
Writers = Literal["core", "one", "many"]


@dataclass(frozen=True)
class Field:
    """One entry of the list."""

    kind: type  # of one client's value: float, int, bool, str, frozenset, Tensor
    shape: Shape  # "each": one per client; "shared": one per cohort; "vector": of length d, per client or shared
    doc: str
    default: Any  # MISSING: required
    writers: Writers = "core"  # rules that may change it: none, only one, or many, each building on the last
    low: float = -inf  # a smaller value in a report is rejected
    high: float = inf  # and so is a larger one
    limit: str = ""  # the deployment's bound on its absolute value
    when: tuple[str, ...] = ()  # measurements or brief fields that request it; (): always reported
    gate: str = ""  # a vector that only clients with a non-zero value of this field receive
    local: bool = False  # not sent: the server computes it
    secret: bool = False  # tells something about the client's data: 0 if the brief asks for noise
    label: str = ""  # its name in messages, where that differs
    row: str = ""  # its name in the record of one client, where that differs
    name: str = ""  # filled in by `fields`

    def asked(self, brief: Brief) -> bool:
        """Whether this brief asks for it."""
        return not self.when or any(
            name in brief.measure or getattr(brief, name, None) is not None for name in self.when
        )

    def fault(self, value: float) -> str:
        """The reason given for rejecting a client with this value."""
        return f"its {self.label or self.name} is {value if isinstance(value, int) else f'{value:g}'}"

    def span(self, limit: float = inf) -> tuple[float, float]:
        """The smallest and the largest value that is accepted, both finite."""
        return max(self.low, -limit, -LARGEST), min(self.high, limit, LARGEST)

    def wrong(self, values: Any, limit: float = inf) -> Any:
        """Where reported values are not finite or out of range; NaN always is."""
        return _outside(np.asarray(values), *self.span(limit))


def _outside(values: Any, low: Any, high: Any) -> Any:
    with np.errstate(invalid="ignore"):
        return ~((values >= low) & (values <= high))


def _entry(field: Field) -> Any:
    return dataclasses.field(default=field.default, metadata={"entry": field})


def each(kind: type, doc: str, default: Any = MISSING, **options: Any) -> Any:
    """One value per client, `[m]`; float64 or int64 on the CPU. None if that is the default and no rule set it."""
    return _entry(Field(kind, "each", doc, default, **options))


def shared(kind: type, doc: str, default: Any = MISSING, **options: Any) -> Any:
    """One value for the whole cohort."""
    return _entry(Field(kind, "shared", doc, default, **options))


def vector(doc: str, default: Any = MISSING, **options: Any) -> Any:
    """A vector of the model's length, `[d]` for all clients or `[m, d]`."""
    return _entry(Field(Tensor, "vector", doc, default, **options))


_KNOWN: dict[type, tuple[Field, ...]] = {}


def fields(record: type) -> tuple[Field, ...]:
    """The entries of `Briefs` or `Reports`, in order."""
    if record not in _KNOWN:
        _KNOWN[record] = tuple(
            replace(entry.metadata["entry"], name=entry.name, row=entry.metadata["entry"].row or entry.name)
            for entry in dataclasses.fields(record)
        )
    return _KNOWN[record]


def row_class(name: str, record: type) -> type:
    """The record of one client: the same fields with plain numbers and vectors `[d]`."""
    columns = []
    for entry in sorted(fields(record), key=lambda entry: entry.default is not MISSING):
        if not entry.local:
            columns.append((entry.row, entry.kind, dataclasses.field(default=entry.default)))
    made = dataclasses.make_dataclass(name, columns, frozen=True, kw_only=True)
    made.__module__, made.__doc__ = __name__, f"One client's row of `{record.__name__}`."
    return made


class Cohort:
    """A record of m clients, one row each."""

    Row: ClassVar[type]
    NUMBERS: ClassVar[tuple[str, ...]]  # what travels apart from vectors

    if TYPE_CHECKING:
        ids: Tensor

    def __len__(self) -> int:
        return self.ids.shape[0]

    def take(self, rows: Tensor) -> Self:
        """The same record for some of the clients, by their row numbers."""
        changes: dict[str, Any] = {}
        for entry in fields(type(self)):
            value = getattr(self, entry.name)
            # A column that is not filled in yet, such as the mass, is empty.
            if isinstance(value, Tensor) and len(value) and (entry.shape == "each" or value.ndim == 2):
                changes[entry.name] = value[rows.to(value.device)]
        return replace(self, **changes)  # type: ignore[type-var]

    def each(self) -> Iterator[Any]:
        """The record of one client after another; vectors are views, not copies."""
        entries = [entry for entry in fields(type(self)) if not entry.local]
        columns = {entry.name: self._column(entry) for entry in entries}
        for row in range(len(self)):
            values = {entry.row: columns[entry.name][row] for entry in entries}
            for entry in entries:
                if entry.gate and not values[entry.gate]:
                    values[entry.row] = None
            yield self.Row(**values)

    def _column(self, entry: Field) -> Sequence[Any]:
        value = getattr(self, entry.name)
        if entry.shape == "each" and value is not None:
            numbers: list[Any] = value.tolist()
            return numbers
        rows: Sequence[Any] = value if isinstance(value, Tensor) and value.ndim == 2 else [value] * len(self)  # type: ignore[assignment]
        return rows

    def numbers(self) -> int:
        """How many numbers, apart from vectors, are sent for one client."""
        return sum(getattr(self, name) is not None for name in self.NUMBERS)


@dataclass(frozen=True, kw_only=True)
class Briefs(Cohort):
    """What each of m clients is told."""

    seed: int = shared(int, "seed of the run")
    round: int = shared(int, "rounds done before this one")
    ids: Tensor = each(int, "client ids, ascending", row="client")
    start: Tensor = vector("the weights to start from", writers="one")
    lr: Tensor = each(float, "learning rate", writers="many")
    momentum: Tensor = each(float, "momentum of sgd", 0.0, writers="many")
    weight_decay: Tensor = each(float, "weight decay; decoupled for adamw", 0.0, writers="many")
    clip: Tensor = each(float, "largest norm of ∇L; inf: no clipping", inf, writers="many")
    clip_after: bool = shared(bool, "whether clip acts after scale, pull and push, instead of on ∇L", False)
    batch_size: Tensor = each(int, "samples in a batch", 32, writers="many")
    epochs: Tensor = each(int, "passes over the client's data, at most", 1, writers="many")
    scale: Tensor = each(float, "factor of ∇L", 1.0, writers="many")
    pull: Tensor = each(float, "pull towards the start: adds pull · (w − start)", 0.0, writers="many")
    push: Tensor | None = vector("added to every gradient", None, writers="many")
    push_after: bool | None = shared(
        bool, "sgd: whether push is added to every step, after momentum, instead of to gradients", None, writers="one"
    )
    label_noise: Tensor = each(
        float, "fraction of the client's samples that train with another label, always the same", 0.0, writers="one"
    )
    drop_last: bool = shared(bool, "whether an incomplete last batch is left out", False)
    optimizer: str = shared(str, "'sgd' or 'adamw'", "sgd", writers="one")
    beta1: Tensor = each(float, "adamw: decay of the first moment", 0.9, writers="one")
    beta2: Tensor = each(float, "adamw: decay of the second moment", 0.999, writers="one")
    eps: Tensor = each(float, "adamw: added to the root of the second moment", 1e-8, writers="one")
    radius: Tensor = each(float, "SAM: ∇L is taken at w + radius · ∇L / ‖∇L‖", 0.0, writers="one")
    stop_below: Tensor | None = each(
        float, "stop when the cosine between the features and a reference model's falls below", None, writers="one"
    )
    stop_statistic: str = shared(str, "of the cosines in a batch: 'mean' or 'min'", "mean", writers="one")
    stop_per: str = shared(str, "finish the 'epoch', or stop right after the 'batch'", "epoch", writers="one")
    stop_reference: Tensor | None = vector("the reference model; none: the start", None, writers="one")
    contrast: Tensor = each(
        float, "MOON: weight of CE([cos(z, z_start), cos(z, z_previous)] / temperature, 0)", 0.0, writers="one"
    )
    temperature: float = shared(float, "MOON: temperature", 1.0, writers="one")
    previous: Tensor | None = vector("MOON: the client's previous model", None, writers="one", gate="contrast")
    update_clip: Tensor | None = each(
        float, "local privacy: largest norm of the update that is sent", None, writers="one"
    )
    update_noise: Tensor | None = each(
        float, "local privacy: standard deviation of the noise in every entry of that update", None, writers="one"
    )
    measure: frozenset[str] = shared(
        frozenset,
        "what to measure: score_before, score_after, accuracy_before, accuracy_after, fisher, fisher_sampled",
        frozenset(),
        writers="many",
    )
    next_lr: float | None = shared(
        float, "learning rate of the next round unless a rule changes it, for engines that work ahead", None, local=True
    )

    def __post_init__(self) -> None:
        """Expand a plain number in an `each` field to all clients; a list has one number per client.

        Refuse to ask for noise and for what would tell the server the same without it, and corrections of steps where
        they are not defined.
        """
        for kind, dtype in ((int, torch.int64), (float, torch.float64)):
            given = {name: getattr(self, name) for name in _EACH[kind]}
            plain = {name: value for name, value in given.items() if isinstance(value, NUMBER)}
            if plain:  # one table for all of them: a tensor each would take most of the time
                table = torch.from_numpy(np.repeat(np.array([[*plain.values()]], dtype=kind).T, len(self), 1))
                self.__dict__.update(zip(plain, table.to(dtype).unbind(), strict=True))
            for name, value in given.items():
                if isinstance(value, list):
                    self.__dict__[name] = torch.tensor(value, dtype=dtype).expand(len(self)).clone()
        if self.push_after and (self.clip_after or self.optimizer != "sgd"):
            wrong = "train.clip_after = true" if self.clip_after else f"train.optimizer = {self.optimizer!r}"
            raise UserError(
                f"{wrong} cannot be used with a rule that corrects steps instead of gradients (push_after), such as "
                "scaffold(correct='steps'); leave one of them out."
            )
        asked = sorted(self.measure) + ["stop_below"] * (self.stop_below is not None)
        if asked and self.update_noise is not None:
            raise UserError(
                f"localprivacy cannot be combined with a rule or detector that asks clients for {asked[0]}: it tells "
                "what the noise in their updates is to hide; leave one of them out."
            )

    def pushed(self, push: Tensor) -> Self:
        """With `push` added to what other rules push."""
        return replace(self, push=push if self.push is None else self.push + push)

    def measured(self, what: str) -> Self:
        """With one more measurement requested."""
        return replace(self, measure=self.measure | {what})

    def vectors_down(self) -> int:
        """Model-sized vectors that each client receives."""
        return sum(getattr(self, name) is not None for name in _VECTORS)


@dataclass(frozen=True, kw_only=True)
class Reports(Cohort):
    """What m clients reported."""

    ids: Tensor = each(int, "client ids, ascending", row="client")
    n: Tensor = each(int, "samples", low=1, limit="max_samples", label="number of samples")
    steps: Tensor = each(int, "steps done", low=1, label="number of steps")
    epochs: Tensor = each(
        float, "epochs done; a fraction if the client stopped within one", low=5e-324, label="number of epochs"
    )
    delta: Tensor = vector("w − start")
    loss: Tensor = each(float, "mean training loss", limit="max_loss", secret=True)
    grad_sq: Tensor = each(
        float, "Σ over all batches of ‖∇L‖² at w, clipped as trained (with SAM unclipped)", low=0, secret=True
    )
    seconds: Tensor = each(float, "time that the client took", low=0)
    similarity: Tensor | None = each(
        float,
        "last cosine that a stop rule checked",
        None,
        low=-1 - SLACK,
        high=1 + SLACK,
        when=("stop_below",),
        secret=True,
    )
    score_before: Tensor | None = each(
        float, "mean loss on all local data at the start", None, limit="max_loss", when=(SCORE_BEFORE,), secret=True
    )
    score_after: Tensor | None = each(
        float, "mean loss on all local data after training", None, limit="max_loss", when=(SCORE_AFTER,), secret=True
    )
    accuracy_before: Tensor | None = each(
        float, "accuracy on all local data at the start, 0 to 1", None, low=0, high=1, when=(ACCURACY_BEFORE,)
    )
    accuracy_after: Tensor | None = each(
        float, "accuracy on all local data after training, 0 to 1", None, low=0, high=1, when=(ACCURACY_AFTER,)
    )
    fisher: Tensor | None = each(
        float, "trace of the Fisher information at the start", None, low=0, when=(FISHER, FISHER_SAMPLED), secret=True
    )
    fisher_seconds: Tensor | None = each(float, "time that it took", None, low=0, when=(FISHER, FISHER_SAMPLED))
    fisher_bytes: Tensor | None = each(
        int, "peak memory that it took, measured on GPUs only", None, low=0, when=(FISHER, FISHER_SAMPLED)
    )
    failed: tuple[tuple[int, str], ...] = shared(
        tuple, "(client, reason) for those without a usable report", (), local=True
    )
    mass: Tensor = each(
        float, "how far a constant unit gradient would have moved the weights; NaN: undefined", None, local=True
    )

    @classmethod
    def stack(cls, reports: Sequence[Report], delta: Tensor, failed: tuple[tuple[int, str], ...] = ()) -> Self:
        """One record from many; `delta` holds their updates, `[m, d]`."""
        values: dict[str, Any] = {"delta": delta, "failed": failed}
        for entry in fields(cls):
            if entry.shape == "each" and not entry.local:
                column = [getattr(report, entry.row) for report in reports]
                if entry.default is MISSING or (column and column[0] is not None):
                    values[entry.name] = torch.tensor(column, dtype=torch.int64 if entry.kind is int else torch.float64)
        return cls(**values)

    def faults(self, limits: Mapping[str, float] | None = None) -> dict[int, str]:
        """Rows with a number that cannot be used, and why; every column is copied to the host once."""
        found: dict[int, str] = {}
        checked = [(entry, column) for entry in _CHECKED if (column := getattr(self, entry.name)) is not None]
        low, high = np.array([entry.span((limits or {}).get(entry.limit, inf)) for entry, _ in checked]).T[..., None]
        bad = _outside(torch.stack([column.cpu() for _, column in checked]).numpy(), low, high)
        for i, row in np.argwhere(bad).tolist() if bad.any() else ():
            entry, column = checked[i]
            found.setdefault(row, entry.fault(column[row].item()))
        return found


_VECTORS = tuple(entry.name for entry in fields(Briefs) if entry.shape == "vector")
_EACH = {kind: tuple(e.name for e in fields(Briefs) if e.shape == "each" and e.kind is kind) for kind in (int, float)}
_CHECKED = tuple(e for e in fields(Reports) if e.shape == "each" and not e.local and e.name != "ids")

if TYPE_CHECKING:

    class Brief:
        """One client's row of `Briefs`."""

        def __init__(self, **values: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...

    class Report:
        """One client's row of `Reports`."""

        def __init__(self, **values: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...

else:
    Brief, Report = row_class("Brief", Briefs), row_class("Report", Reports)
Briefs.Row, Reports.Row = Brief, Report
for _record in (Briefs, Reports):
    _record.NUMBERS = tuple(e.name for e in fields(_record) if e.shape != "vector" and not e.local)


REALS = tuple(e.name for e in fields(Briefs) if e.kind is float and not e.local)  # as the batched engine lays them out


def reals(briefs: Briefs) -> np.ndarray:
    """Every real number of the briefs, `[m, len(REALS)]`; NaN where a field is not set."""
    columns = np.full((len(briefs), len(REALS)), nan)
    values = {column: getattr(briefs, name) for column, name in enumerate(REALS)}
    each = {column: value.cpu() for column, value in values.items() if isinstance(value, Tensor)}
    columns[:, [*each]] = torch.stack([*each.values()], 1).numpy()  # many are faster together
    for column, value in values.items():
        if isinstance(value, float):
            columns[:, column] = value
    return columns


def table(record: type) -> str:
    """The list as a table in Markdown."""
    lines = ["| field | per | default | rules that may write it | meaning |", "|---|---|---|---|---|"]
    for entry in fields(record):
        per = {"each": "client", "shared": "cohort", "vector": "vector `[d]`"}[entry.shape]
        default = "" if entry.default is MISSING else "–" if entry.default is None else f"`{entry.default}`"
        lines.append(f"| `{entry.name}` | {per} | {default} | {entry.writers} | {entry.doc} |")
    return "\n".join(lines) + "\n"
