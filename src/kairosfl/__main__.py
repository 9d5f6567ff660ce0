"""`python -m kairosfl` and the command `kairosfl`."""

from __future__ import annotations

import os
import sys
import warnings


def main() -> None:
    """Run the command line, or say what it needs."""
    try:
        _main()
    except KeyboardInterrupt:  # while Python imports, and while Typer builds the commands
        print("\nStopped.", file=sys.stderr, flush=True)
        os._exit(
            130
        )  # after an interrupted `exec`, as in a dataclass, Python itself would end by the signal


def _main() -> None:
    warnings.formatwarning = lambda message, *_, **__: (
        f"kairosfl: {message}\n"
    )  # a sentence, no line of code
    try:
        from kairosfl.cli import app
    except ImportError as error:
        if error.name is None or error.name.startswith("kairosfl"):
            raise
        sys.exit(f'The command line needs {error.name}: pip install "kairosfl[cli]"')
    app()


if __name__ == "__main__":
    main()
