"""`python -m kairosfl` and the command `kairosfl`."""

from __future__ import annotations

import sys
import warnings


def main() -> None:
    """Run the command line, or say what it needs."""
    warnings.formatwarning = lambda message, *_, **__: f"kairosfl: {message}\n"  # a sentence, no line of code
    try:
        from kairosfl.cli import app
    except ImportError as error:
        sys.exit(f'The command line needs {error.name}: pip install "kairosfl[cli]"')
    except KeyboardInterrupt:
        sys.exit(130)
    app()


if __name__ == "__main__":
    main()
