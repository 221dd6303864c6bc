"""Haiku: its modules ask for their policy when they are called, by one interceptor around every call.

The path of a module is Haiku's own name for it, by which its parameters are found, such as `mlp/~/linear_0`.
"""

import contextlib
import os
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


def _interceptor(
    next_fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], context: hk.MethodContext
) -> Any:
    """What happens around each method of each module."""
    module, region = context.module, regions.current()
    if context.method_name == "__init__":  # which gives the module its name
        return next_fun(*args, **kwargs)
    path, cls = module.module_name, type(module)
    with module_scope.marked(Mark("", path), cls):
        if region is None or region.forced:
            return next_fun(*args, **kwargs)
        with contextlib.ExitStack() as stack:
            if module_scope.running() is None:
                stack.enter_context(hk.custom_creator(_in_param_dtype, state=True))
                stack.enter_context(hk.custom_setter(_in_stored_dtype))
            is_cell = isinstance(module, hk.RNNCore) and context.method_name == "__call__"
            return module_scope.call_module(
                next_fun, args, kwargs, path=path, cls=cls, carry=_CELL if is_cell else None
            )


def _in_param_dtype(
    next_creator: Callable[..., jax.Array], shape: Any, dtype: Any, init: Any, context: hk.GetterContext
) -> jax.Array:
    """A new parameter or state is made in the param dtype, as Haiku's layers take the dtype of their input for it."""
    region = regions.current()
    if region is None or region.forced or np.dtype(dtype) not in dtypes.CASTABLE:
        return next_creator(shape, dtype, init)
    return casting.cast_floating(
        next_creator(shape, region.policy.param_dtype, init), region.policy.param_dtype
    )


def _in_stored_dtype(next_setter: Callable[..., Any], value: Any, context: hk.SetterContext) -> Any:
    """State keeps the dtype that it is stored in, whatever precision its new value was computed in."""
    try:
        stored = hk.get_state(context.name)
    except ValueError:  # there is none yet
        return next_setter(value)
    return next_setter(casting.cast_to_dtypes(value, casting.dtypes_of(stored)))
