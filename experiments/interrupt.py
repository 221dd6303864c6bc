"""Ctrl-C as a request to stop after the current step."""

import signal
from collections.abc import Callable
from types import FrameType

STATUS = 130
"""What a shell expects of a program that Ctrl-C ended."""


class Interrupt:
    """A context in which the first Ctrl-C is noted, and the second ends the program at once."""

    def __init__(self, say: Callable[[], None]) -> None:
        """Prepares to call `say` when Ctrl-C comes."""
        self.requested = False
        self._say = say

    def __enter__(self) -> "Interrupt":
        self._previous = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *exc: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _note(self, number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self.requested = True
        self._say()
