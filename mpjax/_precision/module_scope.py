"""Entering and leaving a module or a function: its region, the casts at its edges, and its name in an audit.

A framework calls `call_module` around each method of a module (see `mpjax/_frameworks`), `autocast` calls
`call_function` around a function. What is known of the modules that run is thread-local and ends with the call.

While an audit records, modules also leave marks on JAX's name stack. A name stack alone says which names were opened
around an operation, which is not where the module stands in its model: a method may call others of its own module,
a module may be an attribute of another, and a user may open scopes around both.
"""

import contextlib
import dataclasses
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from mpjax._precision import casting
from mpjax._precision.policy_map import PolicyMap
from mpjax._precision.regions import Region, ambient, current

T = TypeVar("T")
IsLeaf = Callable[[Any], bool]

# Of each model, by the name of its class: from the paths of modules to their classes, None of those that do not run.
Classes = dict[str, dict[str, type | None]]
# The scope around the cast of a result to its output dtype, while an audit records.
OUTPUT_SCOPE = "mpjax_output"

_MARK = re.compile(r"⟦([^⟦⟧:]*):([^⟦⟧]*)⟧")


@dataclasses.dataclass(frozen=True)
class Mark:
    """A module of a model, as it is written on the name stack while an audit records.

    Attributes:
      root: the name of the class of the model that it belongs to; empty if unknown.
      path: its `/`-joined path in that model.
      base: the path of the module of another framework that its model is an attribute of, None if there is none.
    """

    root: str
    path: str
    base: str | None = None

    def __str__(self) -> str:
        return f"⟦{self.root}:{self.path}⟧"


@dataclasses.dataclass
class ModuleRecord:
    """The modules that a function under policies has called.

    Attributes:
      policies: the map that the function runs under.
      governed: the entries of the map that matched a module.
      called: class and entry of each module that was called, by path, in the order of the calls.
      paths: the paths of all modules that are known, also of those that were not called.
    """

    policies: PolicyMap
    governed: set[int] = dataclasses.field(default_factory=set)
    called: dict[str, tuple[type, int]] = dataclasses.field(default_factory=dict)
    paths: set[str] = dataclasses.field(default_factory=set)

    def add(self, path: str, cls: type, region: Region) -> None:
        """Records the call of a module in its region."""
        self.called.setdefault(path, (cls, region.entry))
        self.add_paths([path], cls)

    def add_paths(self, paths: Iterable[str], cls: type | None = None) -> None:
        """Records modules, called or not; of those that are not called the class is not known."""
        for path in paths:
            self.paths.add(path)
            if (entry := self.policies.match(path, cls)) is not None:
                self.governed.add(entry)

    def check(self) -> None:
        """Raises if a pattern of the map governs no module.

        Where JAX reuses an earlier trace of an inner `jit`, the modules in it are not called, and what they are is not
        known: then there is nothing to raise, as the call that was traced has seen them.

        Raises:
          ValueError: naming the pattern and the closest paths.
        """
        if self.policies.entries and self.paths and self.paths <= self.called.keys():
            self.policies.check_governs(self.governed, self.paths)


class Carry(NamedTuple):
    """Where a recurrent cell takes its carry and where it returns it.

    Attributes:
      argument: the position of the carry among the arguments.
      name: the name of that argument.
      result: its position in the tuple that the cell returns; None if the carry is all that it returns.
    """

    argument: int
    name: str
    result: int | None


class _Thread(threading.local):
    """What runs in this thread.

    Attributes:
      modules: path and class of the modules that run, innermost last. They tell a module's call of another from a call
        of its own methods, which is no boundary.
      record: of the innermost function under policies, None outside of such.
      classes: the classes of the modules that an audit has seen, None unless an audit records.
      marks: the marks that are open, innermost last.
    """

    def __init__(self) -> None:
        self.modules: list[tuple[str, type]] = []
        self.record: ModuleRecord | None = None
        self.classes: Classes | None = None
        self.marks: list[Mark] = []


_thread = _Thread()


def running() -> tuple[str, type] | None:
    """Path and class of the innermost running module; None outside of modules."""
    return _thread.modules[-1] if _thread.modules else None


def record_paths(paths: Iterable[str]) -> None:
    """Records modules of the function that runs, which may not be called, as a decoder when only the encoder is."""
    if _thread.record is not None and _thread.record.policies.entries:
        _thread.record.add_paths(paths)


def call_module(
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    path: str,
    cls: type,
    region: Region | None = None,
    is_leaf: IsLeaf | None = None,
    carry: Carry | None = None,
    inputs_dtype: np.dtype | None = None,
) -> Any:
    """Calls a module's method in the module's region; outside of policies it is a plain call.

    Args:
      call: the method, bound.
      args: its arguments.
      kwargs: its keyword arguments.
      path: the module's `/`-joined path.
      cls: the module's class.
      region: the module's region; by default what the map of the ambient region says of path and class.
      is_leaf: which nodes in arguments and results to leave alone.
      carry: if the module is a recurrent cell, where its carry is, which is returned in the dtype of the argument.
      inputs_dtype: what narrower arguments are widened to, by default the compute dtype; float32 for a layer that
        takes squares of its input.

    Returns:
      What the method returns, in the compute dtype if the caller belongs to the same region, else in the
      output dtype.
    """
    caller = current()
    if (caller is not None and caller.forced) or running() == (path, cls):
        return call(*args, **kwargs)
    if region is None:
        if caller is None:
            return call(*args, **kwargs)
        region = caller.of_module(path, cls)
        if _thread.record is not None:
            _thread.record.add(path, cls, region)
    name = f"module '{path}' ({cls.__name__})" if path else f"module {cls.__name__}"
    same = caller is not None and caller.in_module and caller.is_same_as(region)
    dtype = region.policy.compute_dtype if same else region.policy.output_dtype
    before = None if carry is None else casting.dtypes_of(_argument(carry, args, kwargs))
    args, kwargs = widen((args, kwargs), inputs_dtype or region.compute_dtype, is_leaf)
    _thread.modules.append((path, cls))
    try:
        with _inside(region, name):
            out = call(*args, **kwargs)
    finally:
        _thread.modules.pop()
    result = cast_output(out, dtype, is_leaf)
    return result if carry is None or before is None else _with_carry(carry, out, result, before)


def call_function(
    call: Callable[..., T],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    region: Region,
    name: str,
    record: ModuleRecord | None = None,
) -> T:
    """Calls a function in `region` and returns its results unchanged.

    Args:
      call: the function.
      args: its arguments, widened to the compute dtype where they are narrower.
      kwargs: its keyword arguments, likewise.
      region: what governs it.
      name: what errors call it.
      record: where the modules that it calls are recorded.
    """
    args, kwargs = widen((args, kwargs), region.compute_dtype)
    outer = _thread.modules, _thread.record
    _thread.modules, _thread.record = [], record
    try:
        with _inside(region, name):
            return call(*args, **kwargs)
    finally:
        _thread.modules, _thread.record = outer


def widen(tree: T, dtype: np.dtype, is_leaf: IsLeaf | None = None) -> T:
    """Casts the 16- and 32-bit floating leaves that are narrower than `dtype` to it, and no others.

    Nothing is ever narrowed on the way in: a position of 2047 or a timestep of 999 must reach the module
    that embeds it unrounded. The matmuls narrow their operands anyway.
    """

    def widen_leaf(x: Any) -> Any:
        if not casting.castable(x):
            return x
        return x.astype(dtype) if x.dtype.itemsize < dtype.itemsize else x

    return casting.map_changed(widen_leaf, tree, is_leaf)


def cast_output(tree: T, dtype: np.dtype, is_leaf: IsLeaf | None = None) -> T:
    """Casts the 16- and 32-bit floating leaves to `dtype`; a scalar (an auxiliary loss) is never narrowed."""

    def cast(x: Any) -> Any:
        if not casting.castable(x) or (x.ndim == 0 and dtype.itemsize < x.dtype.itemsize):
            return x
        return casting.cast_leaf(x, dtype)

    with jax.named_scope(OUTPUT_SCOPE) if is_recording() else contextlib.nullcontext():
        return casting.map_changed(cast, tree, is_leaf)


def _argument(carry: Carry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[carry.argument] if len(args) > carry.argument else kwargs.get(carry.name)


def _with_carry(carry: Carry, out: Any, result: Any, before: tuple[np.dtype | None, ...]) -> Any:
    """The result of a recurrent cell, with its carry in the dtypes that it had among the arguments."""
    if carry.result is None:
        return casting.cast_to_dtypes(out, before)
    if not isinstance(out, tuple) or len(out) != 2:
        return result
    restored = casting.cast_to_dtypes(out[carry.result], before)
    return (restored, result[1]) if carry.result == 0 else (result[0], restored)


# ----------------------------------------------------------------------------------------------- errors

_FLOAT_TYPE = re.compile(r"\b(?:float(?:16|32|64)|bfloat16|f16|f32|bf16)(?=\[)")
_MUST_AGREE = ("carry", "body_fun output", "must have equal")


@contextlib.contextmanager
def _inside(region: Region, name: str) -> Iterator[None]:
    """Runs what is traced within in a region.

    Dtypes mix there because the policy asks for it, so strict promotion, which refuses that, is not in force. To JAX's
    error about a changing loop carry it adds what the policy has to do with it.
    """
    strict = jax.config.jax_numpy_dtype_promotion == "strict"  # type: ignore[attr-defined]
    promotion = jax.numpy_dtype_promotion("standard") if strict else contextlib.nullcontext()
    try:
        with ambient(region), promotion:
            yield
    except TypeError as e:
        noted = any(note.startswith("mpjax:") for note in getattr(e, "__notes__", ()))
        found = list(dict.fromkeys(_FLOAT_TYPE.findall(str(e))))
        if not noted and len(found) > 1 and any(word in str(e) for word in _MUST_AGREE):
            one, other = found[:2]
            # JAX names the input of a loop first, then the output of its body.
            way = (
                f"start the loop's carry in {other}, the dtype that the body makes of it, or cast it at the end of the "
                "body with `.astype(carry.dtype)`"
                if "carry" in str(e)
                else "cast what the branches return to one dtype with `.astype`"
            )
            e.add_note(
                f"mpjax: this happened in {name}, under policy '{region.policy}', where matmuls return "
                f"{region.compute_dtype.name} and JAX promotes what mixes with float32: one side is {one}, "
                f"the other {other}. Ways out: {way}, or give the module another policy, such as "
                "'p=f32,c=f32,o=f32', by an entry in the PolicyMap."
            )
        raise


# ----------------------------------------------------------------------------------------------- audits


@contextlib.contextmanager
def recording() -> Iterator[Classes]:
    """While it is open, modules that run leave marks on the name stack; yields their classes."""
    outer = _thread.classes, _thread.marks
    _thread.classes, _thread.marks = {}, []
    try:
        yield _thread.classes
    finally:
        _thread.classes, _thread.marks = outer


def is_recording() -> bool:
    """Whether an audit traces in this thread."""
    return _thread.classes is not None


def innermost() -> Mark | None:
    """The module that runs in this thread, as far as it is marked."""
    return _thread.marks[-1] if _thread.marks else None


@contextlib.contextmanager
def marked(mark: Mark | None, cls: type | None = None) -> Iterator[None]:
    """Marks what is traced within as a module's; does nothing unless an audit records.

    Args:
      mark: the module; None leaves everything unchanged.
      cls: its class.
    """
    if mark is None or _thread.classes is None:
        yield
        return
    if cls is not None:
        _thread.classes.setdefault(mark.root, {})[mark.path] = cls
    _thread.marks.append(mark)
    try:
        with jax.named_scope(str(mark)):
            yield
    finally:
        _thread.marks.pop()


def add_modules(root: str, paths: Iterable[str]) -> None:
    """Records modules of a model that may not run, as a decoder does not when only the encoder is called."""
    if _thread.classes is not None:
        known = _thread.classes.setdefault(root, {})
        for path in paths:
            known.setdefault(path, None)


def last_mark(stack: str) -> tuple[str, Mark, str] | None:
    """The innermost mark on a name stack, between what is outside and what is inside of it."""
    start = stack.rfind("⟦")
    found = _MARK.match(stack, start) if start >= 0 else None
    if found is None:
        return None
    return stack[:start], Mark(found[1], found[2]), stack[found.end() :]
