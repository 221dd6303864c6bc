"""Regions: which policy is in force, and what happens to values that enter and leave a module.

A region is a module and all below it that resolve to the same policy entry. The region in force is the
*ambient* one. It lives in a JAX user context, which is thread-local and part of every trace and jit cache
key, so a function that was traced in one region is traced again in another.
"""

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from mpjax._precision import casting, module_scope
from mpjax._precision.policy import Policy
from mpjax._precision.policy_map import DEFAULT_ENTRY, PolicyMap


class Region:
    """The policy in force at a point of the program, and where that point is.

    Regions are immutable, hashable and compare by value: they are part of JAX's cache keys. The path is kept
    only under a map with patterns, since under a single policy all modules shall share their traces.

    Attributes:
      policies: the whole map, from which modules further in are resolved.
      entry: the map's entry that governs here.
      path: the `/`-joined path of the module that is running, None outside of modules.
      parent: the region that was entered before, under a map with patterns.
      in_module: whether a module is running, rather than the function around it.
      forced: whether modules further in stay in this very region, as in `full_precision`.
      transparent: whether operations run just as they come, as inside JAX's own rules for a decomposition.
    """

    __slots__ = (
        "_key",
        "compute_dtype",
        "entry",
        "forced",
        "hash",
        "in_module",
        "parent",
        "path",
        "policies",
        "policy",
        "transparent",
    )

    def __init__(
        self,
        policies: PolicyMap,
        entry: int = DEFAULT_ENTRY,
        *,
        path: str | None = None,
        parent: "Region | None" = None,
        in_module: bool = False,
        forced: bool = False,
        transparent: bool = False,
    ) -> None:
        patterned = bool(policies.entries)
        self.policies = policies
        self.entry = entry
        self.path = path if patterned else None
        self.parent = parent if patterned else None
        self.in_module = in_module
        self.forced = forced
        self.transparent = transparent
        self.policy: Policy = policies.policy(entry)
        self.compute_dtype: np.dtype = self.policy.compute_dtype
        if self.policy.gemm is not None:
            raise NotImplementedError(
                f"Policy '{self.policy}' asks for gemm={self.policy.gemm}, which this version can name but not "
                f"yet run; leave it out: '{str(self.policy).partition(',gemm=')[0]}'."
            )
        self._key = (policies, entry, self.path, self.parent, in_module, forced, transparent)
        self.hash = hash(self._key)

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Region) and self.hash == other.hash and self._key == other._key

    def __repr__(self) -> str:
        where = f" at '{self.path}'" if self.path else ""
        return f"<mpjax region {self.policy}{where}>"

    def is_same_as(self, other: "Region") -> bool:
        """Whether both come from the same entry of the same map."""
        return self.entry == other.entry and self.policies == other.policies

    def inherited_entry(self, path: str) -> int:
        """The entry of the nearest ancestor of `path` among the modules that are running."""
        region: Region | None = self
        while region is not None and region.policies == self.policies:
            if region.in_module and region.path is not None and _is_ancestor(region.path, path):
                return region.entry
            region = region.parent
        return self.policies.resolve(path)


ambient = jax.make_user_context(None)
# Runs operations as they come, and marks products as decided so that they stay so when differentiated.
TRANSPARENT = Region(PolicyMap(default="float32"), transparent=True)
FULL_PRECISION = Region(PolicyMap(default="float32"), forced=True)


def current() -> Region | None:
    """The ambient region of this thread."""
    return ambient.value


class _Running(threading.local):
    """The modules that run in this thread, innermost last.

    It tells a module's call of another from a call of its own methods, which is no boundary. An element is
    (path, class).
    """

    def __init__(self) -> None:
        self.modules: list[tuple[str, type]] = []
        # Whether the function that runs has called a module.
        self.entered = False


_running = _Running()


def running() -> tuple[str, type] | None:
    """Path and class of the innermost running module; None outside of modules."""
    return _running.modules[-1] if _running.modules else None


def call_module(
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    region: Region,
    *,
    path: str,
    cls: type,
    is_leaf: Callable[[Any], bool] | None = None,
    carries: bool = False,
) -> Any:
    """Calls a module's method in the module's region.

    Args:
      call: the method, bound.
      args: its arguments.
      kwargs: its keyword arguments.
      region: the module's region.
      path: the module's `/`-joined path.
      cls: the module's class.
      is_leaf: which nodes in arguments and results to leave alone.
      carries: whether the module is a recurrent cell, whose carry comes back in the dtype it came in.

    Returns:
      What the method returns, in the compute dtype if the caller belongs to the same region, else in the
      output dtype.
    """
    caller = current()
    if caller is not None and caller.forced:
        return call(*args, **kwargs)
    if running() == (path, cls):
        return call(*args, **kwargs)
    name = f"module '{path}' ({cls.__name__})" if path else f"module {cls.__name__}"
    same = caller is not None and caller.in_module and caller.is_same_as(region)
    handed_over = region.policy.compute_dtype if same else region.policy.output_dtype
    carried = casting.dtypes_of(args[0] if args else kwargs.get("carry")) if carries else None
    args, kwargs = widen((args, kwargs), region.compute_dtype, is_leaf)
    _running.modules.append((path, cls))
    _running.entered = True
    try:
        with ambient(region), _explained(name, region):
            out = call(*args, **kwargs)
    finally:
        _running.modules.pop()
    result = hand_over(out, handed_over, is_leaf)
    if carried is not None and isinstance(out, tuple) and len(out) == 2:
        return (casting.cast_to_dtypes(out[0], carried), result[1])
    return result


def call_function(
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    region: Region,
    name: str,
) -> tuple[Any, bool]:
    """Calls a function in `region`.

    Returns:
      What it returns, left as it is, and whether it called a module.
    """
    args, kwargs = widen((args, kwargs), region.compute_dtype)
    outer = _running.modules, _running.entered
    _running.modules, _running.entered = [], False
    try:
        with ambient(region), _explained(name, region):
            return call(*args, **kwargs), _running.entered
    finally:
        _running.modules, _running.entered = outer


def widen(tree: Any, dtype: np.dtype, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """Casts the 16- and 32-bit floating leaves that are narrower than `dtype` to it, and no others.

    Nothing is ever narrowed on the way in: a position of 2047 or a timestep of 999 must reach the module
    that embeds it unrounded. The products narrow their operands anyway.
    """

    def widen_leaf(x: Any) -> Any:
        if not casting.castable(x):
            return x
        return x.astype(dtype) if x.dtype.itemsize < dtype.itemsize else x

    return casting.map_changed(widen_leaf, tree, is_leaf)


def hand_over(tree: Any, dtype: np.dtype, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """Casts the 16- and 32-bit floating leaves to `dtype`; a scalar (an auxiliary loss) is never narrowed."""

    def hand_over_leaf(x: Any) -> Any:
        if not casting.castable(x):
            return x
        if x.ndim == 0 and dtype.itemsize < x.dtype.itemsize:
            return x
        return casting.cast_leaf(x, dtype)

    with module_scope.output():
        return casting.map_changed(hand_over_leaf, tree, is_leaf)


def _is_ancestor(ancestor: str, path: str) -> bool:
    return ancestor == "" or path == ancestor or path.startswith(ancestor + "/")


_FLOAT_TYPE = re.compile(r"\b(?:float(?:16|32|64)|bfloat16|f16|f32|bf16)(?=\[)")
_MUST_AGREE = ("carry", "body_fun output", "must have equal")


@contextlib.contextmanager
def _explained(name: str, region: Region) -> Iterator[None]:
    """Adds to JAX's refusal of a changing loop carry what the policy has to do with it."""
    try:
        yield
    except TypeError as e:
        noted = any(note.startswith("mpjax:") for note in getattr(e, "__notes__", ()))
        found = list(dict.fromkeys(_FLOAT_TYPE.findall(str(e))))
        if not noted and len(found) > 1 and any(word in str(e) for word in _MUST_AGREE):
            one, other = found[:2]
            # JAX names what goes into a loop first, then what comes out of its body.
            way = (
                f"start the loop's carry in {other}, what the body makes of it, or cast it at the end of the body "
                "with `.astype(carry.dtype)`"
                if "carry" in str(e)
                else "cast what the branches return to one dtype with `.astype`"
            )
            e.add_note(
                f"mpjax: this happened in {name}, under policy '{region.policy}', where products hand over "
                f"{region.compute_dtype.name} and JAX promotes what mixes with float32: one side is {one}, "
                f"the other {other}. Ways out: {way}, or give the module another policy, such as "
                "'p=f32,c=f32,o=f32', by an entry in the PolicyMap."
            )
        raise
