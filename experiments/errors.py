"""Errors that a person can act on: a message, no traceback, exit status 2, or 1 if a run failed."""

import importlib.util
import sys
from collections.abc import Callable

USAGE_STATUS = 2
FAILURE_STATUS = 1
_EXTRA = {
    "tyro": "tyro",
    "rich": "rich",
    "orbax.checkpoint": "orbax-checkpoint",
    "sklearn": "scikit-learn",
    "matplotlib": "matplotlib",
}


class UsageError(ValueError):
    """The request cannot be met; the message says what can."""


class Failure(RuntimeError):
    """A run went wrong; the message says how, and how to go on."""


def missing_extras() -> list[str]:
    """The packages of the `experiments` extra that are not installed."""
    return [name for module, name in _EXTRA.items() if not _installed(module)]


def run(command: Callable[[], int]) -> int:
    """Runs a command and returns its exit status, with what a person can act on as a message on stderr.

    Args:
      command: imports what it needs and returns an exit status.
    """
    if missing := missing_extras():
        names = ", ".join(missing)
        return _fail(f"the experiments need {names}; run pip install -e '.[experiments]'")
    try:
        return command()
    except UsageError as e:
        return _fail(str(e))
    except Failure as e:
        return _fail(str(e), FAILURE_STATUS)


def _fail(message: str, status: int = USAGE_STATUS) -> int:
    print(f"error: {message}", file=sys.stderr)
    return status


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent of a dotted name
        return False
