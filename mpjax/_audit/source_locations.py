"""Where an operation of a traced program belongs: which module, which phase, which line of the user's."""

import dataclasses
import functools
import os
import re
import sysconfig
from typing import Any

import chex
import flax
import jax
import jaxlib
import jmp
import optax

from mpjax._frameworks.protocol import imported
from mpjax._precision import module_scope

FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"

_TRANSFORMATION = re.compile(r"\w+\(")
# What JAX itself puts on the name stack, and an einsum's formula.
_NO_MODULE = re.compile(
    r".*->.*|checkpoint|remat\w*|while|body|cond|closed_call|branch_\d+_fun|body_fun|cond_fun|shard_map|"
    r"custom_[jv]vp_call\w*|full_precision|mpjax_output"
)
# Not the names that linen gives to submodules, such as Dense_0.
_CLASS_NAME = re.compile(r"(?!.*_\d+$)_*[A-Z]\w*")


def _directory(module: Any) -> str:
    return os.path.dirname(module.__file__) + os.sep


_PATHS = sysconfig.get_paths()
_INSTALLED = tuple(path + os.sep for path in _PATHS.values())
_SITE = re.compile(r".*[/\\](?:site|dist)-packages[/\\]")
_MPJAX = os.path.dirname(os.path.dirname(__file__)) + os.sep
_JAX = (_directory(jax), _directory(jaxlib), _MPJAX, "<frozen", "<string>")
_FLAX = _directory(flax)
_LAYERS = (os.path.join(_FLAX, "nnx", "nn") + os.sep, os.path.join(_FLAX, "nnx", "helpers.py"))
# Wherever they are installed.
_LIBRARIES = (*_JAX, *(_directory(m) for m in (flax, optax, chex, jmp)))
_STANDARD = (_PATHS["stdlib"] + os.sep, _PATHS["platstdlib"] + os.sep)
# Beyond this file lies whoever asked for the audit, not the program.
_AUDIT = os.path.join(_MPJAX, "_audit", "read_jaxpr.py")


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of source; `file` is empty where none is known."""

    file: str = ""
    line: int = 0
    function: str = ""

    def __str__(self) -> str:
        return f"{_shortened(self.file)}:{self.line}" if self.file else "unknown"


@dataclasses.dataclass(frozen=True)
class Scope:
    """What a name stack says.

    Attributes:
      root: the class of the model; empty if the stack does not say it.
      path: the module, and the scopes that were opened within it.
      module: the path of the module alone, as a policy map matches it; None if no module has left its mark.
      phase: forward, backward or optimizer.
      explicit: whether the stack itself names the phase.
      full_precision: whether the operation belongs to a function under `mpjax.full_precision`.
    """

    root: str
    path: tuple[str, ...]
    module: str | None
    phase: str
    explicit: bool
    full_precision: bool


@functools.lru_cache(maxsize=100_000)
def scope(stack: str) -> Scope:
    """Reads a name stack such as `transpose(jvp(GPT))/blocks/0/attn.attend`.

    What modules have left their marks on it; of others the names that they open are all that is known.
    """
    marked = module_scope.last_mark(stack)
    outside = stack if marked is None else marked[0]
    names = _path(outside)
    root, path, module = "", names, None
    if marked is not None:
        _, mark, inside = marked
        for own in filter(None, (framework.scopes for framework in imported())):
            inside = re.sub(own, "", inside)
        root, module = mark.root, mark.path
        path = [name for name in (module, *_path(inside.lstrip(")"))) if name]
    elif names and is_class_name(names[0]):
        root, path = names[0], names[1:]
    phase = FORWARD
    if "transpose(" in stack:
        phase = BACKWARD
    elif names[:1] == [OPTIMIZER]:
        phase = OPTIMIZER
        path = path[1:] if module is None else path
    explicit = phase != FORWARD or "jvp(" in stack
    return Scope(root, tuple(path), module, phase, explicit, "full_precision" in stack)


def join(outer: str, inner: str) -> str:
    """The name stack of an operation in an inner jaxpr."""
    return f"{outer}/{inner}" if outer and inner else outer or inner


def is_class_name(name: str) -> bool:
    """Whether a name on the stack is that of a class, as the model's own is."""
    return _CLASS_NAME.fullmatch(name) is not None


def frames(traceback: Any) -> list[Line]:
    """The frames of a traceback of JAX's, the innermost first, as far as they belong to the program."""
    found = []
    for frame in traceback.frames if traceback is not None else ():
        if frame.file_name == _AUDIT:
            break
        found.append(Line(frame.file_name, frame.line_num, frame.function_name))
    return found


def user_line(found: list[Line]) -> Line | None:
    """The innermost frame of code that is not installed."""
    return next((f for f in found if not _package(f.file)), None)


def package_line(found: list[Line]) -> Line | None:
    """The innermost frame of the installed package that the program itself belongs to, if it does to one."""
    packages = (_package(f.file) for f in reversed(found))
    own = next((package for package in packages if package not in (*_LIBRARIES, *_STANDARD)), "")
    return next((f for f in found if f.file.startswith(own)), None) if own else None


def library_line(found: list[Line]) -> Line | None:
    """The innermost frame outside of JAX and mpjax."""
    return next((f for f in found if not f.file.startswith(_JAX)), None)


# The line that a person looks for, by preference.
LINES = (user_line, package_line, library_line)


def line(found: list[Line]) -> Line:
    """The line that a person looks for in frames; an empty one if there is none."""
    return next((chosen for choose in LINES if (chosen := choose(found)) is not None), Line())


def called_classes(traceback: Any) -> tuple[str, ...]:
    """The classes whose `__call__` ran, outermost first: what is known of modules that open no scope."""
    found: list[str] = []
    for frame in traceback.frames if traceback is not None else ():
        if frame.file_name == _AUDIT:
            break
        file = frame.file_name
        # Of Flax's own, its layers only, not the wrappers of its transformations.
        layer = not file.startswith(_FLAX) or file.startswith(_LAYERS)
        if frame.function_name.endswith(".__call__") and layer and not file.startswith(_JAX):
            found.append(frame.function_name.split(".")[-2])
    return tuple(reversed(found))


@functools.cache
def _package(file: str) -> str:
    """The directory, or the single file, of the installed package that a file belongs to; empty for a user's own."""
    library = next((path for path in _LIBRARIES if file.startswith(path)), None)
    if library is not None:
        return library
    site = _SITE.match(file)
    if site is not None:
        first, separator, _ = file[site.end() :].partition(os.sep)
        return site[0] + first + separator
    return next((path for path in _STANDARD if file.startswith(path)), "")


def _path(stack: str) -> list[str]:
    """The names on a stack, without those that transformations and JAX itself put there."""
    path: list[str] = []
    for segment in _segments(stack):
        names = _names(_TRANSFORMATION.sub("", segment).replace(")", ""))
        # A rematerialised module appears twice: transpose(jvp(M))/jvp(M)/block.
        repeated = bool(path) and "jvp(" in segment and names[: len(path)] == path
        path = names if repeated else path + names
    return path


def _segments(stack: str) -> list[str]:
    """The parts of a name stack between the slashes that no parenthesis encloses."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(stack):
        depth += (c == "(") - (c == ")")
        if c == "/" and depth == 0:
            parts.append(stack[start:i])
            start = i + 1
    return [*parts, stack[start:]]


def _names(segment: str) -> list[str]:
    """The modules of a segment.

    Of dotted names they are the class, as in Equinox's `eqx.nn.Linear`, or what stands before a method, as Flax has it.
    """
    names: list[str] = []
    lifted = False
    for part in segment.split("/"):
        if not part or _NO_MODULE.fullmatch(part):
            continue
        name, _, method = part.partition(".")
        if is_class_name(last := method.rpartition(".")[2]):
            name, method = last, ""
        # What is lifted over a module (`nn.scan` of a function) is code of its caller, then calls the module.
        if not (lifted and names and names[-1] == name):
            names.append(name)
        lifted = bool(method)
    return names


def _shortened(file: str) -> str:
    """The path from the working directory, or from the directory that packages are installed in."""
    for base in (os.getcwd() + os.sep, *_INSTALLED):
        if file.startswith(base):
            return file.removeprefix(base)
    return file
