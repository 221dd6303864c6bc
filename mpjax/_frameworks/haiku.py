"""Haiku: its modules ask for their policy when they are called, by one interceptor around every call.

The path of a module is the name by which its parameters are found, such as `mlp/~/linear_0`. Modules of a transform
within another, as of `hk.layer_stack` or next to `hk.lift`, have the name of the lifted module before their own.
"""

import contextlib
import dataclasses
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import haiku as hk
import jax
import numpy as np

from mpjax._frameworks.autocast import under
from mpjax._frameworks.protocol import Framework, ModuleParameters
from mpjax._precision import casting, dtypes, module_scope, regions
from mpjax._precision.module_scope import Carry, Mark
from mpjax._precision.policy_map import PolicyMap

_CELL = Carry(argument=1, name="prev_state", result=1)
# They take squares of their inputs, which in float16 overflow from 256 on.
_WIDE = (hk.BatchNorm, hk.LayerNorm, hk.RMSNorm)
_FLOAT32 = np.dtype(np.float32)
_MODELS = (hk.Transformed, hk.TransformedWithState)


class Haiku(Framework):
    """What Haiku tells mpjax."""

    name = "haiku"
    directory = os.path.dirname(hk.__file__)
    explained_without_inputs = False

    def is_model(self, x: Any) -> bool:
        """Whether `x` is a pair of pure functions, as `hk.transform` returns it."""
        return isinstance(x, _MODELS)

    def intercepted(self) -> contextlib.AbstractContextManager[None]:
        """Opens the interceptor."""
        return hk.intercept_methods(_interceptor)

    def modules(
        self, model: Any, policies: PolicyMap, inputs: Sequence[Any], kwargs: dict[str, Any]
    ) -> Iterator[ModuleParameters]:
        """The modules that run when the model is initialised with `inputs`."""
        records = []

        def init(key: jax.Array, *inputs: Any) -> Any:
            made, record = under(model.init, policies).recorded(key, *inputs, **kwargs)
            records.append(record)
            return made[0] if isinstance(model, hk.TransformedWithState) else made

        params = jax.eval_shape(init, jax.random.key(0), *inputs)
        for path, (cls, entry) in records[0].called.items():
            yield ModuleParameters(path, cls, entry, jax.tree.leaves(params.get(path, {})))


FRAMEWORK = Haiku()


@dataclasses.dataclass
class _Running:
    """A module that runs.

    Attributes:
      name: Haiku's name for it, within its transform.
      frame: a number that grows with each transform, and each of Haiku's own loops, that is entered.
      prefix: what comes before its name in its path.
      lifted: the path under which the parameters of transforms within it are found.
    """

    name: str
    frame: int
    prefix: str
    lifted: str


class _Thread(threading.local):
    def __init__(self) -> None:
        self.running: list[_Running] = []


_thread = _Thread()


def _interceptor(
    next_fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], context: hk.MethodContext
) -> Any:
    """What happens around each method of each module."""
    module, region = context.module, regions.current()
    if context.method_name == "__init__":  # which gives the module its name
        return next_fun(*args, **kwargs)
    prefix = _prefix(module)
    if hasattr(
        module, "prefix_name"
    ):  # it lifts: gives the parameters of a transform a place among those of another
        if _thread.running:
            _thread.running[-1].lifted = (prefix + module.prefix_name).strip("/")
        return next_fun(*args, **kwargs)
    path, cls = prefix + module.module_name, type(module)
    with module_scope.marked(Mark("", path), cls), _pushed(module, prefix), contextlib.ExitStack() as stack:
        if region is None or region.forced:
            return next_fun(*args, **kwargs)
        if module_scope.running() is None:
            stack.enter_context(hk.custom_creator(_in_param_dtype))
            stack.enter_context(hk.custom_creator(_in_float32, params=False, state=True))
            stack.enter_context(hk.custom_setter(_in_stored_dtype))
        is_cell = isinstance(module, hk.RNNCore) and context.method_name == "__call__"
        out = module_scope.call_module(
            next_fun,
            args,
            kwargs,
            path=path,
            cls=cls,
            carry=_CELL if is_cell else None,
            inputs_dtype=_FLOAT32 if isinstance(module, _WIDE) else None,
        )
        if region.policies.entries and module_scope.running() is None:
            # Modules with parameters that were not called, as JAX has reused an earlier trace of an inner jit.
            module_scope.record_paths(path for path in hk.get_params() if path != "~")
        return out


@contextlib.contextmanager
def _pushed(module: hk.Module, prefix: str) -> Iterator[None]:
    running = _Running(module.module_name, _frame(module), prefix, prefix + module.module_name)
    _thread.running.append(running)
    try:
        yield
    finally:
        _thread.running.pop()


def _prefix(module: hk.Module) -> str:
    """What comes before the name of a module in its path: of a transform within a module, where it was lifted to."""
    frame = _frame(module)
    for outer in reversed(_thread.running):
        # In Haiku's own loops names go on, but in a transform within a module they begin anew.
        if frame == outer.frame or _root(module.module_name) == _root(outer.name):
            return outer.prefix
        if frame > outer.frame:
            return f"{outer.lifted}/"
    return ""


def _frame(module: hk.Module) -> int:
    return getattr(module, "_creation_frame_id", 0)  # private; without it modules have their own names


def _root(name: str) -> str:
    return name.partition("/")[0]


def _in_param_dtype(
    next_creator: Callable[..., jax.Array], shape: Any, dtype: Any, init: Any, context: hk.GetterContext
) -> jax.Array:
    """A new parameter is made in float32 and stored in the param dtype: Haiku's layers ask for that of their input."""
    region = regions.current()
    if region is None or region.forced or np.dtype(dtype) not in dtypes.CASTABLE:
        return next_creator(shape, dtype, init)
    return casting.cast_floating(next_creator(shape, _FLOAT32, init), region.policy.param_dtype)


def _in_float32(
    next_creator: Callable[..., Any], shape: Any, dtype: Any, init: Any, context: hk.GetterContext
) -> Any:
    """New state in the compute dtype, which is that of what a layer has computed, is made in float32."""
    region = regions.current()
    if region is None or region.forced or not _is_half(dtype) or np.dtype(dtype) != region.compute_dtype:
        return next_creator(shape, dtype, init)
    return next_creator(shape, _FLOAT32, init)


def _is_half(dtype: Any) -> bool:
    """Whether it is a 16-bit format; the dtype of state may also be a tree of dtypes."""
    if isinstance(dtype, (dict, list, tuple)):
        return False
    return np.dtype(dtype) in dtypes.CASTABLE and np.dtype(dtype).itemsize == 2


def _in_stored_dtype(next_setter: Callable[..., Any], value: Any, context: hk.SetterContext) -> Any:
    """State keeps the dtype that it is stored in, whatever precision its new value was computed in."""
    try:
        stored = hk.get_state(context.name)
    except ValueError:  # there is none yet
        return next_setter(value)
    return next_setter(casting.cast_to_dtypes(value, casting.dtypes_of(stored)))
