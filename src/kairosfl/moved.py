"""Modules that have moved: for one version their old names lead to the same module objects.

So pickles, checkpoints, entry points and imports that name an old path keep working, and a class
exists once, whichever name it was imported by.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType

# Old name: new name. Names below them (kairosfl.tasks.data.own) follow.
MOVED = {
    "kairosfl.engines.flower.certs": "kairosfl.deploy.certificates",
    "kairosfl.engines.flower.local": "kairosfl.deploy.local",
    "kairosfl.engines.flower.node": "kairosfl.deploy.node",
    "kairosfl.engines.flower.status": "kairosfl.deploy.status",
    "kairosfl.engines.flower.templates": "kairosfl.deploy.templates",
    "kairosfl.papers": "kairosfl_reproductions",  # a package of its own, which may be missing
    "kairosfl.tasks.data": "kairosfl.data",
    "kairosfl.tasks.models": "kairosfl.models",
}


class Alias(Loader):
    """Finds and loads an old name as the module that has the new one."""

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """What the import system asks about every module; None if this one has not moved."""
        if new_name(name) is None:
            return None
        return ModuleSpec(name, cls(), is_package=True)

    def create_module(self, spec: ModuleSpec) -> None:
        """The import system makes an empty module, which exec_module replaces."""

    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__
        new = new_name(old)
        assert new is not None
        if old in MOVED:
            warnings.warn(
                f"{old} is now {new}; the old name works until the next minor version.",
                DeprecationWarning,
                stacklevel=2,
            )
        try:
            sys.modules[old] = importlib.import_module(new)
        except ModuleNotFoundError as error:
            if error.name != "kairosfl_reproductions":
                raise
            from kairosfl.plugins import in_reproductions  # late: it reads what is installed

            sentence = in_reproductions(f"{old} is now {new}, which comes")
            raise ModuleNotFoundError(sentence, name=old) from None


def new_name(name: str) -> str | None:
    """Where a module is now; None if it has not moved."""
    for old, new in MOVED.items():
        if name == old or name.startswith(f"{old}."):
            return new + name.removeprefix(old)
    return None


def install() -> None:
    """Let imports find old names; first in line, since a moved package's path is the new one's."""
    sys.meta_path.insert(0, Alias)
