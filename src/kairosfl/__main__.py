"""`python -m kairosfl` and the command `kairosfl`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line, or say what it needs."""
    try:
        from kairosfl.cli import app
    except ImportError as error:
        sys.exit(f'The command line needs {error.name}: pip install "kairosfl[cli]"')
    app()


if __name__ == "__main__":
    main()
