"""Ctrl-C and SIGTERM as requests to stop: a person's, and a cluster's that takes its machines back."""

import signal
from collections.abc import Callable
from types import FrameType

import jax

from experiments import processes


class Stop:
    """A context in which the first Ctrl-C and any SIGTERM are noted; a second Ctrl-C ends the program at once.

    Several processes agree on the step after which they stop, or those that go on would wait for the others
    for ever. They do so at the points where the host waits for the devices anyway, by a reduction of one flag, so
    that the steps between cost nothing and none of them waits; choose `--log-every` for a few seconds.

    Attributes:
      status: what a shell expects: 130 after Ctrl-C; 0 after SIGTERM, as nothing went wrong.
    """

    def __init__(self, say: Callable[[str], None], every: int = 1) -> None:
        """Prepares to listen.

        Args:
          say: called with a line for the person when a request comes.
          every: steps from one agreement between processes to the next.
        """
        self.status = 0
        self.requested = False
        self._say, self._every = say, every

    def __enter__(self) -> "Stop":
        handlers = {signal.SIGINT: self._interrupt, signal.SIGTERM: self._terminate}
        self._previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def after(self, step: int) -> bool:
        """Whether all processes stop after this step."""
        if jax.process_count() == 1:
            return self.requested
        if step % self._every == 0:
            # A request that arrives meanwhile is taken up at the next agreement and must not be lost.
            return processes.any_process(self.requested)
        return False

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self.requested, self.status = True, 130
        self._say("Stopping after this step; Ctrl-C again ends at once.")

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self._say("Asked to stop (SIGTERM): saving after this step.")
