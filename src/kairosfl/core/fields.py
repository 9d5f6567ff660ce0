"""The one list of fields: everything that a client can be told and everything that it can report.

A brief is local training as data. Every step of a client is

    g = scale · ∇L + pull · (w − start) + push,    ∇L at w, or at w + radius · ∇L / ‖∇L‖ (SAM),

followed by the optimizer: sgd with momentum and weight decay, or adamw. The correction alone tells
many algorithms apart.

`Briefs` and `Reports` declare each field once: its type, its shape, its default, which rules may
write it, and the range in which a reported value is accepted. Stacking and unstacking, the wire,
the checks of reports, the columns that the batched engine and its kernels read, and the table in
the documentation are all derived from this list: adding a field means adding a line here and using
it in `client/`.

A field that is `kept` passes between the engine and what the client itself keeps: it is in no
message, and no rule sees it. A client keeps what this list marks so, and nothing else.

The file is long because the list is one list, and what is derived from it stands beside it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, replace
from math import inf, nan
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, cast

import numpy as np
import torch
from torch import Tensor

from kairosfl.core.layout import Layout
from kairosfl.core.work import Work, epoch_of
from kairosfl.errors import UserError

SCORE_BEFORE, SCORE_AFTER, FISHER, FISHER_SAMPLED = (
    "score_before",
    "score_after",
    "fisher",
    "fisher_sampled",
)
SQUARED_LOSS = "squared_loss"
ACCURACY_BEFORE, ACCURACY_AFTER = "accuracy_before", "accuracy_after"
BEFORE, AFTER = (
    (SCORE_BEFORE, ACCURACY_BEFORE),
    (SCORE_AFTER, ACCURACY_AFTER),
)  # measured on all local data
MEASURES = frozenset(
    (*(name for pair in (BEFORE, AFTER) for name in pair), FISHER, FISHER_SAMPLED, SQUARED_LOSS)
)
LARGEST = float(np.finfo(np.float64).max)
NUMBER = (int, float)
TRAINED = ("steps", "epochs", "loss", "grad_sq")  # what a report says about training
NUMBER_BYTES = 8  # of a number that travels beside the vectors
MANY = 2**31 - 1  # more steps than any client does
SLACK = 1e-6  # for cosines and fractions of an epoch, which are rounded in transit

Shape = Literal["each", "shared", "vector", "set", "own", "base"]
Writers = Literal["core", "one", "many"]


@dataclass(frozen=True)
class Field:
    """One entry of the list."""

    kind: type  # of one client's value: float, int, bool, str, frozenset, Tensor
    # "each": a number per client; "shared": one value per cohort; "vector": of length d, per client
    # or shared; "set": several vectors of length d for all clients; "own": a client's part of the
    # model, of length e; "base": a change of the frozen weights, of length b, for all clients.
    shape: Shape
    doc: str
    default: Any  # MISSING: required
    writers: Writers = (
        "core"  # rules that may change it: none, only one, or many, each building on the last
    )
    low: float = -inf  # a smaller value in a report is rejected
    high: float = inf  # and so is a larger one
    limit: str = ""  # the deployment's bound on its absolute value
    when: tuple[str, ...] = ()  # measurements or brief fields that request it; (): always reported
    gate: str = ""  # a vector that only clients with a non-zero value of this field receive
    local: bool = False  # not sent: the server computes it
    kept: bool = False  # passes between the engine and what the client keeps
    first: float | str = ""  # kept: before the first visit; a number, "model" or "own"
    absent: float | str = ""  # in a joined record, for clients that were not told; "": not joined
    alone: bool = (
        False  # an engine that stacks clients may train those that are told this one after another
    )
    secret: bool = False  # tells something about the client's data: 0 if the brief asks for noise
    label: str = ""  # its name in messages, where that differs
    row: str = ""  # its name in the record of one client, where that differs
    name: str = ""  # filled in by `fields`

    @property
    def travels(self) -> bool:
        """Whether it is part of a message."""
        return not self.local and not self.kept

    @property
    def number(self) -> bool:
        """Whether its value for one client is anything but a vector."""
        return self.shape in ("each", "shared")

    def asked(self, brief: Brief) -> bool:
        """Whether this brief asks for it."""
        return not self.when or any(
            name in brief.measure or getattr(brief, name, None) is not None for name in self.when
        )

    def fault(self, value: float) -> str:
        """The reason given for rejecting a client with this value."""
        return (
            f"its {self.label or self.name} is {value if isinstance(value, int) else f'{value:g}'}"
        )

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
    """One value per client, `[m]`; float64 or int64 on the CPU. None if that is the default and no
    rule set it.
    """
    return _entry(Field(kind, "each", doc, default, **options))


def shared(kind: type, doc: str, default: Any = MISSING, **options: Any) -> Any:
    """One value for the whole cohort."""
    return _entry(Field(kind, "shared", doc, default, **options))


def vector(doc: str, default: Any = MISSING, **options: Any) -> Any:
    """A vector of the model's length, `[d]` for all clients or `[m, d]`."""
    return _entry(Field(Tensor, "vector", doc, default, **options))


def part(shape: Shape, doc: str, **options: Any) -> Any:
    """Several vectors `[k, d]` ("set"), clients' own parts `[m, e]` ("own"), or a change of the
    base `[b]` ("base").
    """
    return _entry(Field(Tensor, shape, doc, None, **options))


_KNOWN: dict[type, tuple[Field, ...]] = {}


def fields(record: type) -> tuple[Field, ...]:
    """The entries of `Briefs` or `Reports`, in order."""
    if record not in _KNOWN:
        _KNOWN[record] = tuple(
            replace(
                entry.metadata["entry"],
                name=entry.name,
                row=entry.metadata["entry"].row or entry.name,
            )
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
            if isinstance(value, Tensor) and len(value) and _per_client(entry, value):
                changes[entry.name] = value[rows.to(value.device)]
        return replace(self, **changes)  # type: ignore[type-var]

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """One record of the clients of all parts, in ascending order of their ids.

        A vector that differs between the parts, such as the start of orders of several versions,
        becomes a row for each client. What only some parts have is filled with what means the same
        for the others, and left out where nothing does. Other values that the parts share, such as
        the seed, are the first part's.
        """
        order = torch.argsort(torch.cat([part.ids for part in parts]))
        changes: dict[str, Any] = {}
        for entry in fields(cls):
            columns = [getattr(part, entry.name) for part in parts]
            if entry.name == "failed":
                changes[entry.name] = tuple(failure for column in columns for failure in column)
            elif entry.shape in ("each", "own", "vector"):
                changes[entry.name] = _joined(entry, columns, parts, order)
        return replace(parts[0], **changes)  # type: ignore[type-var]

    def tensors(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The record as tensors by name and the values that are not tensors, both without what is
        not set.
        """
        values = {entry.name: getattr(self, entry.name) for entry in fields(type(self))}
        arrays = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        others = {
            name: value
            for name, value in values.items()
            if name not in arrays and value is not None
        }
        return arrays, others

    @classmethod
    def from_tensors(cls, arrays: Mapping[str, Tensor], others: Mapping[str, Any]) -> Self:
        """The record of which `tensors` are these."""
        return cls(**arrays, **others)

    def without_kept(self) -> Self:
        """The record as it travels and as rules see it."""
        return replace(self, **dict.fromkeys(_KEPT[type(self)]))  # type: ignore[type-var]

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
            if entry.absent == "nan":  # of clients that were not told, in a joined record
                return [None if math.isnan(number) else number for number in numbers]
            return numbers
        if isinstance(value, Tensor) and _per_client(entry, value):
            return cast(Sequence[Any], value)
        return [value] * len(self)

    def numbers(self) -> int:
        """How many numbers, apart from vectors, are sent for one client."""
        return sum(getattr(self, name) is not None for name in self.NUMBERS)


def _per_client(entry: Field, value: Tensor) -> bool:
    """Whether the first dimension of a value counts clients."""
    if entry.shape == "vector":
        return value.ndim == 2
    return entry.shape in ("each", "own")


def _joined(
    entry: Field, columns: list[Tensor | None], parts: Sequence[Any], order: Tensor
) -> Tensor | None:
    """One column from those of several parts, in the order of the client ids."""
    first = columns[0]
    same = all(column is first for column in columns)
    if same and (first is None or len(parts) == 1 or not _per_client(entry, first)):
        return first
    rows = []
    for column, part in zip(columns, parts, strict=True):
        told = _absent(entry, part) if column is None else column
        if told is None:
            return None
        rows.append(told if _per_client(entry, told) else told.expand(len(part), -1))
    together = torch.cat(rows)
    return together[order.to(together.device)] if len(together) else together


def _absent(entry: Field, part: Any) -> Tensor | None:
    """What stands for a column that this part does not have; None: nothing does."""
    if entry.absent == "":
        return None
    if entry.shape == "vector":
        return part.start if entry.absent == "start" else torch.zeros_like(part.start)
    dtype = torch.int64 if entry.kind is int else torch.float64
    return torch.full((len(part),), float(entry.absent), dtype=torch.float64).to(dtype)


def _told(column: Tensor | None, clients: int) -> np.ndarray:
    """1 for clients that were told a value, 0 for the others, which in a joined record have NaN."""
    if column is None:
        return np.zeros(clients, np.int64)
    told: np.ndarray = 1 - np.isnan(column.numpy())
    return told


@dataclass(frozen=True, kw_only=True)
class Briefs(Cohort):
    """What each of m clients is told."""

    seed: int = shared(int, "seed of the run")
    round: Tensor = each(
        int, "rounds done before the one that it belongs to: the version of the model"
    )
    ids: Tensor = each(int, "client ids, ascending", row="client")
    start: Tensor = vector("the weights to start from", writers="one")
    version: Tensor | None = vector(
        "the model that clients hold, where it is not the server's: delta is measured from it",
        None,
        writers="one",
        local=True,
        absent="start",
    )
    offset: Tensor | None = vector(
        "how far a rule moves a start away from the model that the server sends",
        None,
        writers="one",
        local=True,
        absent=0,
    )
    lr: Tensor = each(float, "learning rate", writers="many")
    momentum: Tensor = each(float, "momentum of sgd", 0.0, writers="many")
    weight_decay: Tensor = each(float, "weight decay; decoupled for adamw", 0.0, writers="many")
    clip: Tensor = each(float, "largest norm of ∇L; inf: no clipping", inf, writers="many")
    clip_after: bool = shared(
        bool, "whether clip acts after scale, pull and push, instead of on ∇L", False
    )
    batch_size: Tensor = each(int, "samples in a batch", 32, writers="many")
    epochs: Tensor = each(
        int, "passes over the client's data, at most; 0: measure only", 1, writers="many"
    )
    max_steps: Tensor | None = each(
        int,
        "steps, at most; the update is of what was done by then",
        None,
        writers="one",
        alone=True,
        absent=MANY,
    )
    rank: Tensor | None = each(
        int,
        "how many components of every low-rank pair the client has; the others are zero for it",
        None,
        writers="one",
        alone=True,
        absent=MANY,
    )
    scale: Tensor = each(float, "factor of ∇L", 1.0, writers="many")
    pull: Tensor = each(
        float, "pull towards the start: adds pull · (w − start)", 0.0, writers="many"
    )
    push: Tensor | None = vector("added to every gradient", None, writers="many", absent=0)
    push_after: bool | None = shared(
        bool,
        "sgd: whether push is added to every step, after momentum, instead of to gradients",
        None,
        writers="one",
    )
    label_noise: Tensor = each(
        float,
        "fraction of the client's samples that train with another label, always the same",
        0.0,
        writers="one",
    )
    drop_last: bool = shared(bool, "whether an incomplete last batch is left out", False)
    still: frozenset[int] | None = shared(
        frozenset,
        "numbers of the trained tensors that do not move: first the shared ones, then the own",
        None,
        writers="one",
        alone=True,
    )
    own_epochs: Tensor | None = each(
        int,
        "passes over the client's data in which its own part trains alone, before the others",
        None,
        writers="one",
        alone=True,
        absent=0,
    )
    optimizer: str = shared(str, "'sgd' or 'adamw'", "sgd", writers="one")
    beta1: Tensor = each(float, "adamw: decay of the first moment", 0.9, writers="one")
    beta2: Tensor = each(float, "adamw: decay of the second moment", 0.999, writers="one")
    eps: Tensor = each(float, "adamw: added to the root of the second moment", 1e-8, writers="one")
    radius: Tensor = each(float, "SAM: ∇L is taken at w + radius · ∇L / ‖∇L‖", 0.0, writers="one")
    stop_below: Tensor | None = each(
        float,
        "stop when the cosine between the features and a reference model's falls below",
        None,
        writers="one",
        absent="nan",
    )
    stop_statistic: str = shared(
        str, "of the cosines in a batch: 'mean' or 'min'", "mean", writers="one"
    )
    stop_per: str = shared(
        str, "finish the 'epoch', or stop right after the 'batch'", "epoch", writers="one"
    )
    stop_reference: Tensor | None = vector(
        "the reference model; none: the start", None, writers="one", absent="start"
    )
    contrast: Tensor = each(
        float,
        "contrast: weight of CE([cos(z, z_start), cos(z, z_previous)] / temperature, 0)",
        0.0,
        writers="one",
    )
    temperature: float = shared(float, "contrast: temperature", 1.0, writers="one")
    previous: Tensor | None = vector(
        "contrast: the client's previous model", None, writers="one", gate="contrast", absent=0
    )
    update_clip: Tensor | None = each(
        float,
        "local privacy: largest norm of the update that is sent",
        None,
        writers="one",
        absent="nan",
    )
    update_noise: Tensor | None = each(
        float,
        "local privacy: standard deviation of the noise in every entry of that update",
        None,
        writers="one",
        absent="nan",
    )
    candidates: Tensor | None = part(
        "set",
        "starts to choose from: the client takes the one with the lowest loss on its data",
        writers="one",
        alone=True,
    )
    base: Tensor | None = part(
        "base", "what was added to the frozen weights that all clients share", alone=True
    )
    own: Tensor | None = part(
        "own",
        "the client's part of the model, which never leaves it",
        kept=True,
        first="own",
        alone=True,
    )
    second: Tensor | None = vector(
        "a second model that the client keeps", None, kept=True, first="model", alone=True
    )
    second_lr: Tensor | None = each(
        float,
        "learning rate of the second model; none: there is none",
        None,
        writers="one",
        alone=True,
        absent="nan",
    )
    second_pull: Tensor | None = each(
        float,
        "pull of the second model towards its centre",
        None,
        writers="one",
        alone=True,
        absent="nan",
    )
    second_centre: str | None = shared(
        str, "its centre: 'start', or the moving weights, 'w'", None, writers="one", alone=True
    )
    second_when: str | None = shared(
        str,
        "its steps: with every 'batch', or all of them 'before' or 'after' those of w",
        None,
        writers="one",
        alone=True,
    )
    second_inner: int | None = shared(
        int, "its steps on one batch", None, writers="one", alone=True
    )
    second_draw: Tensor | None = each(
        float,
        "adds second_draw · (w − second) to every gradient of w",
        None,
        writers="one",
        alone=True,
        absent="nan",
    )
    mixed: bool | None = shared(
        bool,
        "whether the second model is trained as a mixture with w",
        None,
        writers="one",
        alone=True,
    )
    mix: Tensor | None = each(
        float,
        "the share of the second model in the mixture, learnt at the client",
        None,
        kept=True,
        first=0.5,
        alone=True,
    )
    owed: Tensor | None = vector(
        "error feedback: the client's last update before it was coded", None, kept=True, first=0.0
    )
    owed_round: Tensor | None = each(
        int,
        "error feedback: the round of that update; -1: there is none",
        None,
        kept=True,
        first=-1,
    )
    counted: Tensor | None = each(
        int, "in which round the client's last report that counted was ordered; -1: none did", None
    )
    coded: Tensor | None = each(
        int,
        "bytes of the vectors, where they are sent in another form",
        None,
        writers="one",
        local=True,
    )
    measure: frozenset[str] = shared(
        frozenset,
        "what to measure: score_before, score_after, accuracy_before, accuracy_after, fisher, fisher_sampled, "
        "squared_loss",
        frozenset(),
        writers="many",
    )
    plan: Any = shared(
        object,
        "how the server waits for the answers, for engines with real devices",
        None,
        local=True,
    )
    next_lr: float | None = shared(
        float,
        "learning rate of the next round unless a rule changes it, for engines that work ahead",
        None,
        local=True,
    )

    def __post_init__(self) -> None:
        """Expand a plain number in an `each` field to all clients; a list has one number per
        client.

        Refuse to ask for noise and for what would tell the server the same without it, and
        corrections of steps where they are not defined.
        """
        for kind, dtype in ((int, torch.int64), (float, torch.float64)):
            given = {name: getattr(self, name) for name in _EACH[kind]}
            plain = {name: value for name, value in given.items() if isinstance(value, NUMBER)}
            if plain:  # one table for all of them: a tensor each would take most of the time
                table = torch.from_numpy(
                    np.repeat(np.array([[*plain.values()]], dtype=kind).T, len(self), 1)
                )
                self.__dict__.update(zip(plain, table.to(dtype).unbind(), strict=True))
            for name, value in given.items():
                if isinstance(value, list):
                    self.__dict__[name] = torch.tensor(value, dtype=dtype).expand(len(self)).clone()
        if self.push_after and (self.clip_after or self.optimizer != "sgd"):
            wrong = (
                "train.clip_after = true"
                if self.clip_after
                else f"train.optimizer = {self.optimizer!r}"
            )
            raise UserError(
                f"{wrong} cannot be used with a rule that corrects steps instead of gradients "
                "(push_after); leave one of them out."
            )
        if self.update_noise is not None:
            self._check_secret()

    def _check_secret(self) -> None:
        """Refuse to ask for what tells about clients' data where they add noise."""
        asked = sorted(self.measure)
        asked += [name for name in _TELLING if getattr(self, name, None) is not None]
        if asked:
            raise UserError(
                "A rule that has clients add noise (update_noise) cannot be combined with a rule or "
                f"detector that asks them for {asked[0]}: it tells what the noise in their updates "
                "is to hide; leave one of them out."
            )

    def pushed(self, push: Tensor) -> Self:
        """With `push` added to what other rules push."""
        return replace(self, push=push if self.push is None else self.push + push)

    def measured(self, what: str) -> Self:
        """With one more measurement requested."""
        return replace(self, measure=self.measure | {what})

    def work(self, n: Any) -> Work:
        """What the briefs ask of clients with `n` samples, `[m]`."""
        n = np.asarray(n)
        epochs = self.epochs.numpy()
        trains = epochs > 0  # the others only measure
        epoch = epoch_of(n, self.batch_size.numpy(), drop_last=self.drop_last)
        steps = epoch.steps * epochs
        if self.max_steps is not None:
            steps = np.minimum(steps, self.max_steps.numpy())

        # --- gradients ---
        sharp = 1 + (self.radius.numpy() != 0)
        slopes, aside = sharp, np.zeros_like(epochs)
        if self.own_epochs is not None:
            aside = aside + sharp * self.own_epochs.numpy() * epoch.used * trains
        inner = _told(self.second_lr, len(self)) * (self.second_inner or 1)
        if self.second_when == "batch":
            slopes = slopes + inner
        elif self.second_when is not None:
            aside = aside + inner * epochs * epoch.used

        # --- measurements ---
        scores = len(self.measure & {*BEFORE}) + len(self.measure & {*AFTER}) * trains
        if self.candidates is not None:
            scores = scores + len(self.candidates)
        contrasts = self.contrast.numpy() != 0
        references = contrasts * 1
        if self.stop_reference is not None:
            references = references + 1 + contrasts
        else:
            references = references + (contrasts | (_told(self.stop_below, len(self)) > 0))
        fisher = ""
        if FISHER in self.measure:
            fisher = "exact"
        if FISHER_SAMPLED in self.measure:
            fisher = "sampled"
        return Work(
            n=n,
            epoch=epoch,
            steps=steps,
            slopes=slopes,
            aside=aside,
            scores=scores,
            references=references * trains,
            fisher=fisher,
        )

    @property
    def alone(self) -> tuple[str, ...]:
        """What these briefs ask that an engine which stacks clients may train one client after
        another.
        """
        asked = tuple(entry.name for entry in _ALONE if getattr(self, entry.name) is not None)
        measured = tuple(name for name in (SQUARED_LOSS,) if name in self.measure)
        return asked + measured + (("epochs = 0",) if self.measures_only() else ())

    def check(self, layout: Layout) -> None:
        """Refuse what no client of this model can follow.

        Args:
            layout: Of the model that the clients train.
        """
        names = layout.names
        still = self.still or frozenset()
        strangers = sorted(still - set(range(len(names))))
        if strangers:
            raise UserError(
                f"still = {strangers} of the brief: the model has {len(names)} trained tensors, "
                f"numbered 0 to {len(names) - 1}; give their places in layout.names."
            )
        if len(still) == len(names) and self.epochs.any():
            raise UserError(
                f"still names all {len(names)} trained tensors, so that nothing would train: "
                "leave one out, or set epochs = 0 to measure only."
            )
        if self.second_lr is not None and layout.own:
            raise UserError(
                "A second model beside a part that stays with each client is not possible yet: "
                "leave model.own out, or the rule that trains a second model."
            )
        if self.own_epochs is not None and self.own_epochs.any() and not layout.own:
            raise UserError(
                "own_epochs needs a model of which a part stays with each client: give the task "
                "`own`, such as ['head.*'], or leave the rule out."
            )
        if self.max_steps is not None and (self.max_steps < 1).any():
            row = int(self.max_steps.argmin())
            raise UserError(
                f"max_steps of client {int(self.ids[row])} is {int(self.max_steps[row])} and must "
                "be 1 or more; set epochs = 0 to measure only."
            )

    @property
    def newest(self) -> int:
        """The newest version of the model that one of the clients was sent; -1 without clients."""
        return int(self.round.max()) if len(self) else -1

    def measures_only(self) -> bool:
        """Whether no client trains."""
        return not bool(self.epochs.any())

    def vectors_down(self) -> int:
        """Model-sized vectors that each client receives."""
        return sum(getattr(self, entry.name) is not None for entry in _SENT[Briefs])

    def bytes(self, layout: Layout, itemsize: int) -> int:
        """Of the message that a client receives which has the whole model, sent as it is."""
        floats = sum(_length(entry, getattr(self, entry.name), layout) for entry in _SENT[Briefs])
        return floats * itemsize + self.numbers() * NUMBER_BYTES

    def all_bytes(self, layout: Layout, itemsize: int) -> int:
        """Of the messages that all these clients receive."""
        numbers = len(self) * self.numbers() * NUMBER_BYTES
        if self.coded is not None:
            return int(self.coded.sum()) + numbers
        vectors = self.bytes(layout, itemsize) * len(self) - numbers
        return vectors - self.vectors_down() * _spared(self.rank, layout) * itemsize + numbers


@dataclass(frozen=True, kw_only=True)
class Reports(Cohort):
    """What m clients reported."""

    ids: Tensor = each(int, "client ids, ascending", row="client")
    n: Tensor = each(int, "samples", low=1, limit="max_samples", label="number of samples")
    steps: Tensor = each(int, "steps done", low=1, label="number of steps")
    epochs: Tensor = each(
        float,
        "epochs done; a fraction if the client stopped within one",
        low=5e-324,
        label="number of epochs",
    )
    delta: Tensor = vector(
        "w − start; w minus the version of the model, where a rule moved the start away from it"
    )
    loss: Tensor = each(float, "mean training loss", limit="max_loss", secret=True)
    grad_sq: Tensor = each(
        float,
        "Σ over all batches of ‖∇L‖² at w, clipped as trained (with SAM unclipped)",
        low=0,
        secret=True,
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
        float,
        "mean loss on all local data at the start",
        None,
        limit="max_loss",
        when=(SCORE_BEFORE,),
        secret=True,
    )
    score_after: Tensor | None = each(
        float,
        "mean loss on all local data after training",
        None,
        limit="max_loss",
        when=(SCORE_AFTER,),
        secret=True,
    )
    accuracy_before: Tensor | None = each(
        float,
        "accuracy on all local data at the start, 0 to 1",
        None,
        low=0,
        high=1,
        when=(ACCURACY_BEFORE,),
        secret=True,
    )
    accuracy_after: Tensor | None = each(
        float,
        "accuracy on all local data after training, 0 to 1",
        None,
        low=0,
        high=1,
        when=(ACCURACY_AFTER,),
        secret=True,
    )
    fisher: Tensor | None = each(
        float,
        "trace of the Fisher information at the start",
        None,
        low=0,
        when=(FISHER, FISHER_SAMPLED),
        secret=True,
    )
    fisher_seconds: Tensor | None = each(
        float, "time that it took", None, low=0, when=(FISHER, FISHER_SAMPLED)
    )
    fisher_bytes: Tensor | None = each(
        int,
        "peak memory that it took, measured on GPUs only",
        None,
        low=0,
        when=(FISHER, FISHER_SAMPLED),
    )
    choice: Tensor | None = each(
        int,
        "which of the candidates it started from",
        None,
        low=0,
        when=("candidates",),
        secret=True,
    )
    squared_loss: Tensor | None = each(
        float,
        "mean squared loss of the samples in the first epoch",
        None,
        low=0,
        when=(SQUARED_LOSS,),
        secret=True,
    )
    own: Tensor | None = part("own", "the client's part of the model after training", kept=True)
    second: Tensor | None = vector("its second model after training", None, kept=True)
    mix: Tensor | None = each(
        float, "the share of the second model in the mixture after training", None, kept=True
    )
    owed: Tensor | None = vector("its update before it was coded", None, kept=True)
    owed_round: Tensor | None = each(int, "the round of that update", None, kept=True)
    coded: Tensor | None = each(
        int, "bytes of the update, where it is sent in another form", None, local=True
    )
    failed: tuple[tuple[int, str], ...] = shared(
        tuple, "(client, reason) for those without a usable report", (), local=True
    )
    mass: Tensor = each(
        float,
        "how far a constant unit gradient would have moved the weights; NaN: undefined",
        None,
        local=True,
    )

    def samples(self, briefs: Briefs) -> int:
        """On how many samples these clients trained, each counted every time: exact, also if they
        stopped early.
        """
        return int(self.work(briefs).samples(self.steps.numpy()).sum())

    def work(self, briefs: Briefs) -> Work:
        """What these clients were asked; the briefs are theirs, and maybe others'."""
        rows = np.searchsorted(briefs.ids.numpy(), self.ids.numpy())  # ids ascend
        return briefs.take(torch.from_numpy(rows)).work(self.n.numpy())

    def bytes(self, layout: Layout, itemsize: int) -> int:
        """Of the message that a client sends which has the whole model, sent as it is."""
        floats = sum(_length(entry, getattr(self, entry.name), layout) for entry in _SENT[Reports])
        return floats * itemsize + self.numbers() * NUMBER_BYTES

    def all_bytes(self, briefs: Briefs, layout: Layout, itemsize: int) -> int:
        """Of the messages that all these clients send; the briefs are theirs."""
        numbers = len(self) * self.numbers() * NUMBER_BYTES
        if self.coded is not None:
            return int(self.coded.sum()) + numbers
        vectors = self.bytes(layout, itemsize) * len(self) - numbers
        return vectors - _spared(briefs.rank, layout) * itemsize + numbers

    @classmethod
    def stack(
        cls, reports: Sequence[Report], delta: Tensor, failed: tuple[tuple[int, str], ...] = ()
    ) -> Self:
        """One record from many; `delta` holds their updates, `[m, d]`."""
        values: dict[str, Any] = {"delta": delta, "failed": failed}
        for entry in fields(cls):
            if entry.shape == "each" and not entry.local:
                column = [getattr(report, entry.row) for report in reports]
                if any(number is not None for number in column):
                    # NaN, which is rejected, for a client that only measured while others trained
                    column = [nan if number is None else number for number in column]
                if entry.default is MISSING or (column and column[0] is not None):
                    values[entry.name] = torch.tensor(
                        column, dtype=torch.int64 if entry.kind is int else torch.float64
                    )
            elif entry.kept:
                column = [getattr(report, entry.row) for report in reports]
                if column and column[0] is not None:
                    values[entry.name] = torch.stack(column)
        return cls(**values)

    def faults(
        self, limits: Mapping[str, float] | None = None, *, measuring: bool = False
    ) -> dict[int, str]:
        """Rows with a number that cannot be used, and why; every column is copied to the host once.

        Of clients that were only `measuring`, what training reports is not looked at.
        """
        checked = []
        for entry in _CHECKED:
            column = getattr(self, entry.name)
            if column is not None and not (measuring and entry.name in TRAINED):
                checked.append((entry, column))
        spans = [entry.span((limits or {}).get(entry.limit, inf)) for entry, _ in checked]
        low, high = np.array(spans).T[..., None]
        bad = _outside(torch.stack([column.cpu() for _, column in checked]).numpy(), low, high)
        reasons: dict[int, str] = {}
        for i, row in np.argwhere(bad).tolist() if bad.any() else ():
            entry, column = checked[i]
            reasons.setdefault(row, entry.fault(column[row].item()))
        return reasons


def _spared(rank: Tensor | None, layout: Layout) -> int:
    """How many numbers of one vector clients with fewer components do not need, all together."""
    if rank is None:
        return 0
    return sum(layout.size - layout.size_at(components) for components in rank.tolist())


def _length(entry: Field, value: Tensor | None, layout: Layout) -> int:
    """How many numbers of the model's type this vector is for one client."""
    if value is None:
        return 0
    if entry.shape == "base":
        return layout.base_size
    return layout.size * (len(value) if entry.shape == "set" else 1)


_SENT: dict[type, tuple[Field, ...]] = {
    record: tuple(e for e in fields(record) if e.travels and not e.number)
    for record in (Briefs, Reports)
}
# Fields of a brief that are answered with something about the client's data.
_TELLING = tuple(name for entry in fields(Reports) if entry.secret for name in entry.when)
_ALONE = tuple(entry for entry in fields(Briefs) if entry.alone)
_KEPT: dict[type, tuple[str, ...]] = {
    record: tuple(e.name for e in fields(record) if e.kept) for record in (Briefs, Reports)
}
_EACH = {
    kind: tuple(e.name for e in fields(Briefs) if e.shape == "each" and e.kind is kind)
    for kind in (int, float)
}
_CHECKED = tuple(e for e in fields(Reports) if e.shape == "each" and e.travels and e.name != "ids")

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
    _record.NUMBERS = tuple(e.name for e in fields(_record) if e.number and e.travels)


REALS = tuple(
    e.name for e in fields(Briefs) if e.kind is float and e.travels and not e.alone
)  # as the batched engine lays them out


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


_PER = {
    "each": "client",
    "shared": "cohort",
    "vector": "vector `[d]`",
    "set": "vectors `[k, d]`",
    "own": "own part `[e]`",
    "base": "base `[b]`",
}


def table(record: type) -> str:
    """The list as a table in Markdown."""
    lines = [
        "| field | per | default | rules that may write it | meaning |",
        "|---|---|---|---|---|",
    ]
    for entry in fields(record):
        per = _PER[entry.shape]
        if entry.default is MISSING:
            default = ""
        elif entry.default is None:
            default = "–"
        else:
            default = f"`{entry.default}`"
        lines.append(f"| `{entry.name}` | {per} | {default} | {entry.writers} | {entry.doc} |")
    return "\n".join(lines) + "\n"
