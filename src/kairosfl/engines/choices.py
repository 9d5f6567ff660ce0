"""What an engine chose by measuring, stored so that a resumed run takes the same path.

The next run need not measure.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from kairosfl.data.files import cache_folder
from kairosfl.engines.precision import Precision
from kairosfl.version import __version__

try:
    import fcntl
except ImportError:  # not available on Windows
    fcntl = None  # type: ignore[assignment]


PATIENCE = 1.0  # seconds to wait for another process that writes


class Choices:
    """Choices by name, each made once by measuring.

    `made` are in force. `known` were made by an earlier process of the run, in rounds that are
    trained again: each takes effect at the moment at which it would be measured, so that everything
    before it runs as it did. What neither has may be in the `cache`.
    """

    def __init__(self, cache: Cache | None = None) -> None:
        self.made: dict[str, str] = {}
        self.known: dict[str, str] = {}
        self.cache = cache
        self._guessing = False

    @contextlib.contextmanager
    def guessing(self) -> Iterator[None]:
        """Within this context `choose` measures and stores nothing.

        It returns a known choice, or the first option.
        """
        self._guessing = True
        try:
            yield
        finally:
            self._guessing = False

    def choose(
        self, name: str, measure: Callable[[], str], among: Collection[str] = (), setting: str = ""
    ) -> str:
        """The choice of this name, by `measure` if it is not known yet.

        Args:
            name: What is chosen; a run chooses it once.
            measure: Measures which is best.
            among: What can be chosen; nothing else is taken from the cache.
            setting: What else the measurement depends on: only one in the same setting is taken
                from the cache.
        """
        key = f"{name}, {setting}"
        choice = self._stored(name, key, among)
        if self._guessing:
            if choice:
                return choice
            return next(iter(among))
        if choice is None:
            choice = measure()
            if self.cache is not None:
                self.cache.put(key, choice)
        self.made[name] = choice
        return choice

    def _stored(self, name: str, key: str, among: Collection[str]) -> str | None:
        for choices in (self.made, self.known):
            if name in choices:
                return choices[name]
        if self.cache is None:
            return None
        cached = self.cache.get(key)
        return cached if cached in among else None

    def restore(self, written: Mapping[str, tuple[str, int]], rounds: int) -> None:
        """Take up the choices of a run that resumes after `rounds` rounds.

        Args:
            written: By name, what was chosen and in which round.
            rounds: How many rounds are not trained again.
        """
        for name, (choice, round) in written.items():
            if round <= rounds:
                self.made.setdefault(name, choice)
            else:
                self.known.setdefault(name, choice)


class Cache:
    """Choices of earlier processes under the same conditions, in a file of the user's cache.

    It only saves time: where the disk is full or read-only, or the file damaged, choices are
    measured as without it.

    Args:
        folder: Where the files are.
        conditions: What all choices depend on; others have a file of their own.
    """

    def __init__(self, folder: Path, conditions: Mapping[str, str]) -> None:
        self.conditions = dict(conditions)
        text = json.dumps(self.conditions, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()
        self.path = folder / f"choices-{digest[:16]}.json"
        self._known: dict[str, str] | None = None

    @classmethod
    def of(cls, device: torch.device, precision: Precision) -> Cache | None:
        """The choices for this GPU, these versions and this precision.

        There are none where `KAIROSFL_CACHE` is `off`.
        """
        chosen = os.environ.get("KAIROSFL_CACHE")
        if chosen == "off":
            return None
        try:
            folder = Path(chosen).expanduser() if chosen else cache_folder()
        except RuntimeError:  # no home directory
            return None
        return cls(folder, _conditions(device) | {"precision": precision.name})

    def get(self, key: str) -> str | None:
        """The choice made earlier, if any."""
        if self._known is None:
            self._known = self._read()
        return self._known.get(key)

    def put(self, key: str, choice: str) -> None:
        """Add a choice to those in the file, which other processes may be writing too."""
        with contextlib.suppress(OSError), self._alone():
            if self._known is None:
                self._known = {}
            self._known = {**self._known, **self._read(), key: choice}
            content = {"conditions": self.conditions, "choices": self._known}
            handle, temporary = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.name}.")
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    json.dump(content, file, indent=1)
                os.replace(temporary, self.path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """No other process reads and replaces the file meanwhile.

        Without lock support, a choice may be lost.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with (self.path.parent / "choices.lock").open("ab") as file:
            until = time.monotonic() + PATIENCE
            while fcntl is not None and time.monotonic() < until:
                with contextlib.suppress(OSError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                time.sleep(0.01)
            yield

    def _read(self) -> dict[str, str]:
        try:
            content: Any = json.loads(self.path.read_bytes())
            if content["conditions"] != self.conditions:
                return {}
            choices = {}
            for key, choice in content["choices"].items():
                if isinstance(choice, str):
                    choices[key] = choice
            return choices
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return {}


def _conditions(device: torch.device) -> dict[str, str]:
    """What decides which way is fastest, besides shapes and precision."""
    triton = ""
    with contextlib.suppress(ImportError):
        triton = str(getattr(import_module("triton"), "__version__", ""))
    conditions = {
        "kairosfl": __version__,
        "torch": torch.__version__,
        "triton": triton,
        "device": device.type,
        "clock": "device",  # older entries included launch overhead
    }
    if device.type == "cuda":
        conditions["device"] = torch.cuda.get_device_name(device)
        conditions["cuda"] = str(torch.version.cuda)
        conditions["driver"] = str(getattr(torch._C, "_cuda_getDriverVersion", int)())
        conditions["cudnn"] = str(torch.backends.cudnn.version())
    return conditions
