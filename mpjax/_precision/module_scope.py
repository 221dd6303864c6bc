"""Marks that modules leave on the name stack while an audit traces, so that it need not guess their paths.

A name stack says which names were opened around an operation, and that is not where the module stands in its
model: a method may call others of its own module, a module may be an attribute of another, and a user may open
scopes around both. The frameworks know the path (linen.py, nnx.py), and mark what they trace with it.
"""

import contextlib
import dataclasses
import re
import threading
from collections.abc import Callable, Iterable, Iterator

import jax

# Around every audit's trace, frameworks open what they have put here.
hooks: list[Callable[[], contextlib.AbstractContextManager[None]]] = []

# Of each model, by the name of its class: from the paths of modules to their classes, None of those that do not run.
Classes = dict[str, dict[str, type | None]]

# The scope around the casts by which a module under a policy returns its result.
OUTPUT = "mpjax_output"

_MARK = re.compile(r"⟦([^⟦⟧:]*):([^⟦⟧]*)⟧")


@dataclasses.dataclass(frozen=True)
class Mark:
    """A module.

    Attributes:
      root: the name of the class of the model that it belongs to; empty if unknown.
      path: its `/`-joined path in that model.
      base: the path of the module of another framework that its model stands in, None if it stands alone.
    """

    root: str
    path: str
    base: str | None = None

    def __str__(self) -> str:
        return f"⟦{self.root}:{self.path}⟧"


class _Recording(threading.local):
    """What this thread records: None unless it traces for an audit."""

    def __init__(self) -> None:
        self.classes: Classes | None = None
        self.open: list[Mark] = []


_recording = _Recording()


@contextlib.contextmanager
def recorded() -> Iterator[Classes]:
    """While it is open, modules that run leave marks; yields their classes."""
    outer = _recording.classes, _recording.open
    _recording.classes, _recording.open = {}, []
    try:
        with contextlib.ExitStack() as stack:
            for hook in hooks:
                stack.enter_context(hook())
            yield _recording.classes
    finally:
        _recording.classes, _recording.open = outer


def innermost() -> Mark | None:
    """The module that runs in this thread, as far as it is marked."""
    return _recording.open[-1] if _recording.open else None


@contextlib.contextmanager
def opened(mark: Mark | None, cls: type | None = None) -> Iterator[None]:
    """Marks what is traced within as a module's; does nothing outside of audits.

    Args:
      mark: the module; None leaves everything as it is.
      cls: its class.
    """
    if mark is None or _recording.classes is None:
        yield
        return
    if cls is not None:
        _recording.classes.setdefault(mark.root, {})[mark.path] = cls
    _recording.open.append(mark)
    try:
        with jax.named_scope(str(mark)):
            yield
    finally:
        _recording.open.pop()


def output() -> contextlib.AbstractContextManager[None]:
    """Marks what is traced within as the cast of a module's result; does nothing outside of audits."""
    return contextlib.nullcontext() if _recording.classes is None else jax.named_scope(OUTPUT)


def present(root: str, paths: Iterable[str]) -> None:
    """Records modules of a model, whether they run (as a decoder does not when only the encoder is called) or not."""
    if _recording.classes is not None:
        known = _recording.classes.setdefault(root, {})
        for path in paths:
            known.setdefault(path, None)


def last(stack: str) -> tuple[str, Mark, str] | None:
    """The innermost mark on a name stack, between what is outside and what is inside of it."""
    start = stack.rfind("⟦")
    found = _MARK.match(stack, start) if start >= 0 else None
    if found is None:
        return None
    return stack[:start], Mark(found[1], found[2]), stack[found.end() :]
