"""Equinox: its modules carry their policy, after `apply_policy`.

Modules are immutable pytrees. The class of a module is part of its tree structure, so the policy is carried through
`eqx.partition`, `filter_jit`, `filter_vmap`, `tree_at`, and a scan over stacked layers.
"""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from mpjax._frameworks import governed as governing
from mpjax._frameworks.governed import Governed, governed_of, original_class
from mpjax._frameworks.protocol import Framework, ModuleParameters
from mpjax._precision import casting, dtypes, module_scope
from mpjax._precision.module_scope import Carry
from mpjax._precision.policy_map import PolicyMap

T = TypeVar("T")

_CELL = Carry(argument=1, name="hidden", result=None)
# They take squares of their inputs, which in float16 overflow from 256 on.
_WIDE = (eqx.nn.BatchNorm,)
_FLOAT32 = np.dtype(np.float32)
_DIRECTORY = os.path.dirname(eqx.__file__)


class Equinox(Framework):
    """What Equinox tells mpjax."""

    name = "equinox"
    directory = _DIRECTORY
    layers = (os.path.join(_DIRECTORY, "nn", ""),)

    def is_model(self, x: Any) -> bool:
        """Whether `x` is an Equinox module."""
        return isinstance(x, eqx.Module)

    def check_arguments(self, policies: PolicyMap, args: Sequence[Any]) -> None:
        """A map with patterns cannot reach modules that do not carry it.

        Equinox modules that cannot be called hold data, and a bound method may belong to a module that carries one.
        """
        models = (x for x in args if self.is_model(x) and callable(x))
        plain = (x for x in models if not any(governed_of(m) for _, m in _modules(x)))
        governing.check_carries(policies, plain, "Equinox")

    def apply_policy(self, model: eqx.Module, policies: PolicyMap) -> eqx.Module:
        """A copy whose modules carry their policies; see `mpjax.apply_policy`."""
        classes = {path: original_class(module) for path, module in _modules(model)}
        governed = governing.resolve(policies, classes)
        return _governed(model, "", governed)

    def modules(
        self, model: eqx.Module, policies: PolicyMap, inputs: Sequence[Any], kwargs: dict[str, Any]
    ) -> Iterator[ModuleParameters]:
        """All modules of the model, called or not, by path."""
        for path, module in sorted(_modules(self.apply_policy(model, policies))):
            governed = governed_of(module)
            assert governed is not None
            yield ModuleParameters(path, original_class(module), governed.entry, _own_parameters(module))

    def split(self, models: list[Any]) -> tuple[list[Any], Callable[[list[Any]], list[Any]]]:
        """Their arrays; what is none, such as an activation function or a flag, stays with the function that merges."""
        arrays, static = eqx.partition(models, _is_array_or_shape)
        return arrays, lambda arrays: eqx.combine(arrays, static)


FRAMEWORK = Equinox()


def _modules(module: Any, path: str = "") -> Iterator[tuple[str, eqx.Module]]:
    """A module and all below it, with their paths; initial values of state are no modules of their own."""
    if isinstance(module, eqx.nn.StateIndex):
        return
    yield path, module
    for name, child in _children(module):
        yield from _modules(child, f"{path}/{name}".strip("/"))


def _children(module: eqx.Module) -> Iterator[tuple[str, eqx.Module]]:
    """The modules directly below one, in its attributes and their containers, by their paths from it."""
    for field in _dynamic_fields(module):
        flat, _ = jax.tree_util.tree_flatten_with_path(vars(module)[field], is_leaf=_is_module)
        for keys, x in flat:
            if _is_module(x):
                yield "/".join([field, *(jax.tree_util.keystr((k,), simple=True) for k in keys)]), x


def _dynamic_fields(module: eqx.Module) -> list[str]:
    fields = dataclasses.fields(module)  # type: ignore[arg-type]
    return [f.name for f in fields if not f.metadata.get("static", False) and f.name in vars(module)]


def _governed(module: eqx.Module, path: str, governed: dict[str, Governed]) -> eqx.Module:
    """A copy of a module, and of all below it, that carries what governs it."""
    if isinstance(module, eqx.nn.StateIndex):
        return module
    dtype = governed[path].policies.policy(governed[path].entry).param_dtype

    def convert(field: str, keys: Any, x: Any) -> Any:
        if _is_module(x):
            names = [field, *(jax.tree_util.keystr((k,), simple=True) for k in keys)]
            return _governed(x, "/".join([path, *names]).strip("/"), governed)
        if isinstance(x, jax.ShapeDtypeStruct) and x.dtype in dtypes.CASTABLE:
            return x.update(dtype=dtype)
        return casting.cast_floating(x, dtype)

    copy: eqx.Module = object.__new__(_subclass(original_class(module), governed[path]))
    vars(copy).update(vars(module))
    for field in _dynamic_fields(module):
        value = vars(module)[field]
        vars(copy)[field] = jax.tree_util.tree_map_with_path(
            lambda keys, x, field=field: convert(field, keys, x), value, is_leaf=_is_module
        )
    return copy


def _own_parameters(module: eqx.Module) -> list[Any]:
    own = [vars(module)[field] for field in _dynamic_fields(module)]
    leaves = jax.tree.leaves(own, is_leaf=_is_module)
    return [x for x in leaves if not _is_module(x) and eqx.is_array(x) and eqx.is_inexact_array(x)]


def _subclass(cls: type, governed: Governed) -> type:
    return governing.subclass(cls, governed, eqx.Module, _run, _subclass)


def _run(
    self: eqx.Module,
    name: str,
    bound: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    governed: Governed,
) -> Any:
    """Runs a module's method in its region."""
    cls = original_class(self)

    def paths() -> Iterator[str]:
        return (g.path for _, module in _modules(self) if (g := governed_of(module)) is not None)

    is_cell = issubclass(cls, (eqx.nn.GRUCell, eqx.nn.LSTMCell)) and name == "__call__"
    with governing.scopes(cls, governed, paths), _keeps_dtypes((args, kwargs)) as ((args, kwargs), returned):
        return returned(
            module_scope.call_module(
                bound,
                args,
                kwargs,
                path=governed.path,
                cls=cls,
                region=governed.region,
                is_leaf=_is_leaf,
                carry=_CELL if is_cell else None,
                inputs_dtype=_FLOAT32 if issubclass(cls, _WIDE) else None,
            )
        )


def _is_array_or_shape(x: Any) -> bool:
    return eqx.is_array(x) or isinstance(x, (np.ndarray, np.generic, jax.ShapeDtypeStruct))


# ------------------------------------------------------------------------------------------------ state


@jax.tree_util.register_pytree_node_class
class _StoredState(eqx.nn.State):
    """State that keeps the dtypes it is stored in, whatever precision a new value was computed in.

    Equinox refuses a value of another dtype. Modules under a policy are given this in the place of their state.
    """

    def set(self, item: Any, value: Any) -> "_StoredState":
        """A new state with a new value."""
        stored = casting.dtypes_of(self.get(item))
        value = casting.cast_to_dtypes(jax.tree.map(jnp.asarray, value), stored)
        return _as(_StoredState, super().set(item, value))

    def substate(self, pytree: Any) -> "_StoredState":
        """A part of the state."""
        return _as(_StoredState, super().substate(pytree))

    def update(self, substate: eqx.nn.State) -> "_StoredState":
        """A new state with new values of a part of it."""
        return _as(_StoredState, super().update(_as(eqx.nn.State, substate)))


S = TypeVar("S", bound=eqx.nn.State)


def _as(cls: type[S], state: eqx.nn.State) -> S:
    values, keys = state.tree_flatten()
    return cls.tree_unflatten(keys, values)


@contextlib.contextmanager
def _keeps_dtypes(arguments: T) -> Iterator[tuple[T, Callable[[Any], Any]]]:
    """Arguments whose states keep their dtypes, and the function that makes plain ones of those that are returned.

    A state that has been replaced by a newer one may not be used again, which holds for the given ones, too.
    """
    given: list[tuple[eqx.nn.State, _StoredState]] = []

    def keeping(x: Any) -> Any:
        if type(x) is not eqx.nn.State:
            return x
        given.append((x, _as(_StoredState, x)))
        return given[-1][1]

    def plain(x: Any) -> Any:
        return _as(eqx.nn.State, x) if type(x) is _StoredState else x

    arguments = casting.map_changed(keeping, arguments, _is_leaf)
    yield arguments, lambda out: casting.map_changed(plain, out, _is_leaf) if given else out
    for state, inner in given:
        if _is_replaced(inner):
            state.update(state.substate(()))


def _is_replaced(state: eqx.nn.State) -> bool:
    try:
        state.tree_flatten()
    except ValueError:
        return True
    return False


def _is_module(x: Any) -> bool:
    return isinstance(x, eqx.Module)


def _is_leaf(x: Any) -> bool:
    # Models and their state are stored as they are; a cast is for activations.
    return isinstance(x, (eqx.Module, eqx.nn.State))
