"""Engine `ray`: the cohort in shards over Ray actors, each with the data and its own engine.

Shards are balanced by the steps they are expected to take. An actor that dies costs only its shard,
which is tried once more elsewhere and then reported as failed; a new actor replaces the dead one as
soon as it is up. A cluster that dies ends the run with a sentence: Ray itself would end the process
without one, some seconds later.
"""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from kairosfl.core.fields import Briefs, Cohort, Reports
from kairosfl.core.fields import fields as entries
from kairosfl.core.work import epoch_of
from kairosfl.engines.choices import Choices
from kairosfl.engines.cluster import LOOK, Cluster, Witness, check_reachable
from kairosfl.engines.evaluate import Scores, Sums
from kairosfl.engines.loop import Loop
from kairosfl.errors import UserError, first_line
from kairosfl.tasks.dataset import DataSet, Samples
from kairosfl.tasks.task import Task
from kairosfl.tasks.tree import tree_map

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

try:
    import ray
    from ray.exceptions import RayActorError, RayError
except ImportError:
    raise UserError(
        "engine = 'ray' needs Ray; install it with: pip install 'kairosfl[ray]'."
    ) from None

STARTS = 3  # actors that may die in a row during startup; then something is wrong with all of them


class ShardEngine(Protocol):
    """What an actor runs: `Loop`, `Batched`, or anything like them."""

    def train(self, briefs: Briefs) -> Reports: ...
    def evaluate(self, x: Tensor) -> Scores: ...
    def evaluate_clients(self, x: Tensor) -> np.ndarray: ...
    def measure_clients(self, ids: Tensor, models: Tensor) -> list[Sums]: ...


Make = Callable[[Task, torch.device], ShardEngine]


def expected_steps(briefs: Briefs, sizes: np.ndarray) -> np.ndarray:
    """Steps of every client that trains all its epochs; `sizes` are the samples of everyone."""
    sizes = sizes[briefs.ids.numpy()]
    per_epoch = epoch_of(sizes, briefs.batch_size.numpy(), drop_last=briefs.drop_last).steps
    steps: np.ndarray = (per_epoch * briefs.epochs.numpy()).astype(np.float64)
    return steps


def shards(steps: np.ndarray, parts: int) -> list[np.ndarray]:
    """Row numbers in at most `parts` shards of about equal steps.

    Clients are dealt, the longest first, each to the shard that is lightest then.
    """
    loads = np.zeros(min(parts, len(steps)))
    rows: list[list[int]] = [[] for _ in loads]
    for row in np.argsort(-steps, kind="stable"):
        lightest = int(loads.argmin())
        loads[lightest] += max(steps[row], 1)  # one that only measures is work, too
        rows[lightest].append(int(row))
    return [np.sort(np.array(shard, dtype=np.int64)) for shard in rows]


class _Actor:
    """Runs in another process, with the data and an engine."""

    def __init__(self, parcel: Mapping[str, Any], make: Make, device: str, threads: int) -> None:
        self.arguments = parcel, make, device
        self.threads = threads

    def ready(self) -> None:
        """Creates the engine: in `__init__`, Ray would report an exception as a dead actor."""
        torch.set_num_threads(self.threads)
        parcel, make, device = self.arguments
        self.device = torch.device(device)
        self.engine = make(_unpack(parcel), self.device)

    def train(self, briefs: Briefs, shared: Mapping[str, np.ndarray]) -> Reports:
        """Arrays in, arrays out: Ray moves them without a copy."""
        vectors: dict[str, Any] = {}
        for name, array in shared.items():
            vectors[name] = _tensor(array).to(self.device)
        return _arrays(self.engine.train(replace(_tensors(briefs), **vectors)))

    def ask(self, method: str, *arrays: np.ndarray) -> Any:
        """One of the engine's evaluation methods on these arrays."""
        tensors = [_tensor(array).to(self.device) for array in arrays]
        return getattr(self.engine, method)(*tensors)


@dataclass
class _Shard:
    """Rows in training; `lost` is the actor that failed to return them."""

    rows: np.ndarray
    lost: Any = None


class Ray:
    """Trains on many processes, GPUs and machines, with the results of `make`'s engine in one.

    Use it as a context manager, or call `close`.

    Args:
        task: What is learnt; every actor holds its data.
        actors: The number of processes.
        make: The engine of each actor, from a task and a device.
        address: Of a Ray cluster, or "auto"; by default Ray starts on this machine.
        device: Of each actor.
        gpus: Of each actor; may be a fraction.
        threads: Of each actor.
        home: The device of the server's vectors.
    """

    why = ""

    def __init__(
        self,
        task: Task,
        *,
        actors: int = 4,
        make: Make = Loop,
        address: str | None = None,
        device: str = "cpu",
        gpus: float = 0.0,
        threads: int = 1,
        home: str = "cpu",
    ) -> None:
        if actors < 1:
            raise UserError(f"run.actors = {actors} must be 1 or more.")
        self.task = task
        self.home = torch.device(home)
        self.actors = actors
        self.choices = Choices()
        self._live: list[Any] = []
        self._coming: dict[Any, Any] = {}  # the answer of `ready` → its actor
        self._stillborn = 0
        self._owner = not ray.is_initialized()
        self._cluster = Cluster(_connect(address))
        self._witness = Witness()
        try:
            cpus = _share(actors, gpus, threads)
            self._class: Any = ray.remote(_Actor).options(
                num_cpus=cpus, num_gpus=gpus, max_restarts=0
            )
            self._arguments = (ray.put(_pack(task)), make, device, threads)
            for _ in range(actors):
                self._spawn()
            while self._coming:
                self._welcome(self._first(self._coming))
        except BaseException:
            self.close()
            raise

    def start(self) -> Tensor:
        """The model before training."""
        return self.task.start().to(self.home)

    def train(self, briefs: Briefs) -> Reports:
        """One report per client, in client order.

        The clients of a shard that was lost twice are in `failed`.
        """
        self._cluster.check(now=False)

        # Vectors that all clients share travel once, apart from the briefs.
        shared = _shared_vectors(briefs)
        empty: dict[str, Any] = {name: torch.empty(0) for name in shared}
        bare = replace(briefs, **empty)
        reference = ray.put(shared)

        steps = expected_steps(briefs, self.task.clients.sizes)
        waiting = list(map(_Shard, shards(steps, self.actors)))
        flying: dict[Any, tuple[_Shard, Any]] = {}
        idle = list(self._live)
        parts: list[Reports] = []
        failed: list[tuple[int, str]] = []
        error: Exception | None = None
        while waiting or flying:
            for shard in list(waiting):
                actor = _another(idle, shard.lost, alone=not flying and not self._coming)
                if actor is not None:
                    waiting.remove(shard)
                    record = _arrays(bare.take(torch.from_numpy(shard.rows)))
                    flying[actor.train.remote(record, reference)] = shard, actor
            awaited = list(flying)
            if waiting:  # a new actor may take one of them
                awaited += self._coming
            done = self._first(awaited)
            if done in self._coming:
                idle += self._welcome(done)
                continue
            shard, actor = flying.pop(done)
            try:
                parts.append(ray.get(done))
                idle.append(actor)
            except RayError as raised:
                error = _cause(raised)
                reason = "its actor died"
                if not self._gone(actor, raised):
                    reason = f"it raised {type(error).__name__}: {error}".splitlines()[0]
                    idle.append(actor)
                if shard.lost is None:
                    waiting.append(_Shard(shard.rows, lost=actor))
                    continue
                for client in briefs.ids[shard.rows].tolist():
                    failed.append((client, f"{reason} (second try)"))
        if not parts and error is not None and not isinstance(error, RayError):
            raise error  # every shard raised: continuing would silently train nothing
        return _join(briefs, parts, failed)

    def evaluate(self, x: Tensor) -> Scores:
        """On the whole test set, on one actor."""
        scores: Scores = self._ask("evaluate", x)
        return scores

    def evaluate_clients(self, x: Tensor) -> np.ndarray:
        """The main metric of every client, on one actor."""
        accuracies: np.ndarray = self._ask("evaluate_clients", x)
        return accuracies

    def measure_clients(self, ids: Tensor, models: Tensor) -> list[Sums]:
        """What was measured on these clients' own samples, on one actor."""
        sums: list[Sums] = self._ask("measure_clients", ids, models)
        return sums

    def close(self) -> None:
        """Ends the actors, and Ray if this engine started it."""
        self._witness.dismiss()
        for actor in [*self._live, *self._coming.values()]:
            ray.kill(actor)
        self._live = []
        self._coming = {}
        if self._owner:
            ray.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, method: str, *tensors: Tensor) -> Any:
        arrays = [tensor.cpu().numpy() for tensor in tensors]
        while True:
            while not self._live:
                self._welcome(self._first(self._coming))
            actor = self._live[0]
            self._cluster.check(now=False)
            try:
                return ray.get(actor.ask.remote(method, *arrays))
            except RayError as raised:
                if not self._gone(actor, raised):
                    raise _cause(raised) from None

    def _first(self, references: Iterable[Any]) -> Any:
        waiting: list[Any] = list(references)
        done: list[Any] = []
        while not done:
            done, _ = ray.wait(waiting, num_returns=1, timeout=LOOK)
            self._cluster.check(now=False)
        return done[0]

    def _spawn(self) -> None:
        actor = self._class.remote(*self._arguments)
        self._coming[actor.ready.remote()] = actor

    def _welcome(self, reference: Any) -> list[Any]:
        """An actor that is ready joins the others; one that died while starting is replaced."""
        actor = self._coming.pop(reference)
        try:
            ray.get(reference)
        except RayActorError as raised:
            self._cluster.check()
            self._stillborn += 1
            if self._stillborn == STARTS:
                last = str(raised).strip().splitlines()[-1].strip()
                raise UserError(
                    f"{STARTS} Ray actors in a row died while starting: {last}"
                ) from None
            self._spawn()
            return []
        except RayError as raised:
            raise _cause(raised) from None
        self._stillborn = 0
        self._live.append(actor)
        return [actor]

    def _gone(self, actor: Any, raised: Exception) -> bool:
        """Whether the actor is dead or unreachable; if so, another one is being started."""
        self._cluster.check()
        if not isinstance(raised, RayActorError):
            return False
        self._live.remove(actor)
        ray.kill(actor)
        self._spawn()
        return True


def _shared_vectors(briefs: Briefs) -> dict[str, np.ndarray]:
    """The vectors of a brief that are the same for all of its clients."""
    shared = {}
    for entry in entries(Briefs):
        vector = getattr(briefs, entry.name)
        if entry.shape == "vector" and vector is not None and vector.ndim == 1:
            shared[entry.name] = vector.cpu().numpy()
    return shared


def _connect(address: str | None) -> Mapping[str, Any]:
    """Connect to a cluster, or start one here, unless this process is connected.

    Returns:
        Where its processes are.
    """
    local: dict[str, Any] = {}
    if not ray.is_initialized():
        if address is None:
            local["include_dashboard"] = False
        else:
            check_reachable(address)
    try:
        context: Any = ray.init(
            address=address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            ignore_reinit_error=True,
            **local,
        )
    except Exception as raised:  # Ray has no type for it: a busy machine, a full disk, ports in use
        if address is not None:
            raise UserError(
                f"run.ray_address = {address!r} cannot be reached: {first_line(raised)}; "
                "if the cluster requires a token, set RAY_AUTH_MODE=token in the environment."
            ) from raised
        raise UserError(
            f"Ray does not start: {first_line(raised)}; try again when the machine is less busy, "
            "or use run.engine = 'loop' or 'batched'."
        ) from raised
    where: Mapping[str, Any] = context.address_info
    return where


def _share(actors: int, gpus: float, threads: int) -> float:
    """Cores of one actor: its threads, or its share of the cores where these are fewer."""
    have: dict[str, float] = ray.cluster_resources()
    if gpus * actors > have.get("GPU", 0.0):
        raise UserError(
            f"run.actors = {actors} with {gpus:g} GPUs each need {gpus * actors:g} GPUs, but the "
            f"cluster has {have.get('GPU', 0.0):g}; lower run.actors."
        )
    return min(float(threads), math.floor(have.get("CPU", 1.0) / actors * 1e4) / 1e4)


def _another(idle: list[Any], lost: Any, *, alone: bool) -> Any:
    """Takes an idle actor other than the one that lost the shard, unless that one is `alone`."""
    for actor in idle:
        if actor is not lost or (alone and len(idle) == 1):
            idle.remove(actor)
            return actor
    return None


def _cause(raised: Exception) -> Exception:
    """What an actor raised, without Ray's wrapping."""
    cause = getattr(raised, "cause", None)
    return cause if isinstance(cause, Exception) else raised


def _join(briefs: Briefs, parts: list[Reports], failed: list[tuple[int, str]]) -> Reports:
    """The shards' reports, still arrays, as one record in client order."""
    size = sum(len(part) for part in parts)
    width = parts[0].delta.shape[1] if parts else briefs.start.shape[-1]
    delta = torch.empty(size, width, dtype=briefs.start.dtype, device=briefs.start.device)
    failed = list(failed)
    for part in parts:
        failed += part.failed
    if not parts:
        return Reports.stack([], delta, tuple(failed))
    order = np.argsort(np.concatenate([part.ids for part in parts]))
    begin = 0
    for part in parts:
        to = torch.from_numpy(np.argsort(order)[begin : begin + len(part)])
        delta[to.to(delta.device)] = _tensor(part.delta).to(delta.device)
        begin += len(part)
    joined: dict[str, Any] = {}
    for entry in entries(Reports):
        columns = [getattr(part, entry.name) for part in parts]
        if isinstance(columns[0], np.ndarray) and entry.name != "delta":
            joined[entry.name] = torch.from_numpy(np.concatenate(columns)[order])
    return Reports(**joined, delta=delta, failed=tuple(failed))


C = TypeVar("C", bound=Cohort)


def _through(record: C, change: Callable[[Any], Any], kind: type) -> C:
    """The record with every value of this kind changed."""
    changes: dict[str, Any] = {}
    for entry in entries(type(record)):
        value = getattr(record, entry.name)
        if isinstance(value, kind):
            changes[entry.name] = change(value)
    return replace(record, **changes)  # type: ignore[type-var]


def _arrays(record: C) -> C:
    return _through(record, lambda tensor: tensor.cpu().numpy(), Tensor)


def _tensors(record: C) -> C:
    return _through(record, _tensor, np.ndarray)


def _tensor(array: Any) -> Tensor:
    """A view of an array in Ray's shared memory."""
    with warnings.catch_warnings():  # of the memory being read-only
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)


def _trees(arrays: Any) -> Any:
    """A tensor, or a tuple or dict of tensors, from arrays."""
    if isinstance(arrays, dict):
        return {name: _tensor(array) for name, array in arrays.items()}
    if isinstance(arrays, tuple):
        return tuple(map(_tensor, arrays))
    return _tensor(arrays)


def _pack(task: Task) -> dict[str, Any]:
    """A task with its samples as arrays, so that all actors of a machine share one copy."""
    parts = {entry.name: getattr(task, entry.name) for entry in fields(task)}
    data = {entry.name: getattr(task.dataset, entry.name) for entry in fields(task.dataset)}
    for split in ("train", "test"):
        samples = data[split]
        if isinstance(samples, Samples):
            inputs = tree_map(Tensor.numpy, samples.inputs)
            targets = tree_map(Tensor.numpy, samples.targets)
            data[split] = (inputs, targets)
    return parts | {"dataset": data}


def _unpack(parcel: Mapping[str, Any]) -> Task:
    """The task of a parcel that `_pack` made."""
    data = dict(parcel["dataset"])
    for split in ("train", "test"):
        if isinstance(data[split], tuple):
            inputs, targets = data[split]
            data[split] = Samples(_trees(inputs), _trees(targets))
    return Task(**{**parcel, "dataset": DataSet(**data)})
