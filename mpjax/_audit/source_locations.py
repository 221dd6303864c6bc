"""Where an operation of a traced program belongs: which module, which phase, which line of the user's."""

import dataclasses
import functools
import itertools
import os
import re
import sysconfig
from types import CodeType, ModuleType
from typing import TypeAlias

import chex
import jax
import jaxlib
import jmp
import optax

from mpjax._frameworks.protocol import imported
from mpjax._precision import module_scope
from mpjax._precision.jax_internals import Frame

FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"

_TRANSFORMATION = re.compile(r"\w+\(")
# What JAX itself puts on the name stack, and an einsum's formula.
_NO_MODULE = re.compile(
    r".*->.*|checkpoint|remat\w*|while|body|cond|closed_call|branch_\d+_fun|body_fun|cond_fun|shard_map|"
    rf"custom_[jv]vp_call\w*|full_precision|{module_scope.OUTPUT_SCOPE}"
)
# Not the names of submodules that are numbered, such as Dense_0.
_CLASS_NAME = re.compile(r"(?!.*_\d+$)_*[A-Z]\w*")


def _directory(module: ModuleType) -> str:
    return os.path.dirname(str(module.__file__)) + os.sep


_PATHS = sysconfig.get_paths()
_INSTALLED = tuple(path + os.sep for path in _PATHS.values())
_SITE = re.compile(r".*[/\\](?:site|dist)-packages[/\\]")
_MPJAX = os.path.dirname(os.path.dirname(__file__)) + os.sep
_JAX = (_directory(jax), _directory(jaxlib), _MPJAX, "<frozen", "<string>")
# Wherever they are installed.
_LIBRARIES = (*_JAX, *(_directory(m) for m in (optax, chex, jmp)))
_STANDARD = (_PATHS["stdlib"] + os.sep, _PATHS["platstdlib"] + os.sep)


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
      output: whether it is the cast by which a module under a policy returns its result.
    """

    root: str
    path: tuple[str, ...]
    module: str | None
    phase: str
    explicit: bool
    full_precision: bool
    output: bool


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
    return Scope(
        root,
        tuple(path),
        module,
        phase,
        explicit,
        "full_precision" in stack,
        module_scope.OUTPUT_SCOPE in stack,
    )


def join(outer: str, inner: str) -> str:
    """The name stack of an operation in an inner jaxpr."""
    return f"{outer}/{inner}" if outer and inner else outer or inner


def is_class_name(name: str) -> bool:
    """Whether a name on the stack is that of a class, as the model's own is."""
    return _CLASS_NAME.fullmatch(name) is not None


# Calls, each as the code and the position in it: two calls on one line are two.
CallSite: TypeAlias = tuple[tuple[CodeType, int], ...]


def lines(frames: list[Frame]) -> list[Line]:
    """The lines of frames."""
    return [Line(f.file, f.line, f.function) for f in frames]


def call_site(frames: list[Frame]) -> CallSite:
    """The calls by which the program got to JAX, the innermost first."""
    return tuple((f.code, f.position) for f in frames if not f.file.startswith(_JAX))


def line_of(call_site: CallSite) -> tuple[object, ...]:
    """A call site without the position in its innermost line: what all calls on that line have in common."""
    if not call_site:
        return ()
    (code, position), *outer = call_site
    # Positions are in bytes, and an instruction has two.
    line, *_ = next(itertools.islice(code.co_positions(), position // 2, None))
    return code, line, *outer


def user_line(found: list[Line]) -> Line | None:
    """The innermost frame of code that is not installed."""
    libraries = _libraries()
    return next((f for f in found if not _package(f.file, libraries)), None)


def package_line(found: list[Line]) -> Line | None:
    """The innermost frame of the installed package that the program itself belongs to, if it does to one."""
    libraries = _libraries()
    packages = (_package(f.file, libraries) for f in reversed(found))
    own = next((package for package in packages if package not in (*libraries, *_STANDARD)), "")
    return next((f for f in found if f.file.startswith(own)), None) if own else None


def library_line(found: list[Line]) -> Line | None:
    """The innermost frame outside of JAX and mpjax."""
    return next((f for f in found if not f.file.startswith(_JAX)), None)


# The line that a person looks for, by preference.
LINES = (user_line, package_line, library_line)


def called_classes(found: list[Line]) -> tuple[str, ...]:
    """The classes whose `__call__` ran, outermost first: what is known of modules that open no scope.

    Args:
      found: frames of the program, the innermost first.
    """
    layers = tuple(path for framework in imported() for path in framework.layers)
    # Of a framework's own classes only its layers are modules, and not the wrappers of its transformations.
    others = (*_JAX, *_directories())
    calls = (f for f in reversed(found) if f.function.endswith(".__call__"))
    return tuple(
        f.function.split(".")[-2] for f in calls if f.file.startswith(layers) or not f.file.startswith(others)
    )


def _directories() -> tuple[str, ...]:
    """Where the frameworks are that the program has imported."""
    return tuple(os.path.join(framework.directory, "") for framework in imported())


def _libraries() -> tuple[str, ...]:
    return (*_LIBRARIES, *_directories())


@functools.cache
def _package(file: str, libraries: tuple[str, ...]) -> str:
    """The directory, or the single file, of the installed package that a file belongs to; empty for a user's own."""
    library = next((path for path in libraries if file.startswith(path)), None)
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

    Of dotted names they are the class, as in `lib.nn.Linear`, or what stands before a method, as in `block_0.attend`.
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
