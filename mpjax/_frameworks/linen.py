"""flax.linen: its modules ask for their policy when they are called, by one interceptor around every call.

Nothing has to be done to a model. The interceptor asks the policy map for each module by its path and class.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import chex
import flax
import flax.linen as nn
import jax

from mpjax._frameworks.autocast import under
from mpjax._frameworks.protocol import Framework, ModuleParameters
from mpjax._precision import casting, module_scope, regions
from mpjax._precision.module_scope import Carry, Mark
from mpjax._precision.policy_map import PolicyMap, ancestors

# Collections in which a changed dtype is the module's own business.
_NOT_STATE = ("params", "intermediates", "perturbations", "losses")
_CELL = Carry(argument=0, name="carry", result=0)


class Linen(Framework):
    """What flax.linen tells mpjax."""

    name = "flax.linen"
    directory = os.path.dirname(flax.__file__)
    explained_without_inputs = False

    def is_model(self, x: Any) -> bool:
        """Whether `x` is a linen module."""
        return isinstance(x, nn.Module)

    def intercepted(self) -> contextlib.AbstractContextManager[None]:
        """Opens the interceptor."""
        return nn.intercept_methods(_interceptor)

    def modules(
        self, model: nn.Module, policies: PolicyMap, inputs: Sequence[Any], kwargs: dict[str, Any]
    ) -> Iterator[ModuleParameters]:
        """The modules that run when the model is initialised with `inputs`."""
        records = []

        def init(*inputs: Any) -> Any:
            rngs = {name: jax.random.key(0) for name in ("params", "dropout")}
            variables, record = under(model.init, policies).recorded(rngs, *inputs, **kwargs)
            records.append(record)
            return variables

        variables = jax.eval_shape(init, *inputs)
        params = nn.meta.unbox(variables.get("params", {}))
        for path, (cls, entry) in records[0].called.items():
            own = params
            for name in path.split("/") if path else ():
                own = own.get(name, {})
            leaves = [x for v in own.values() if not isinstance(v, Mapping) for x in jax.tree.leaves(v)]
            yield ModuleParameters(path, cls, entry, leaves)


FRAMEWORK = Linen()


def _interceptor(
    next_fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    context: nn.module.InterceptorContext,
) -> Any:
    """What happens around each method of each module."""
    module, region = context.module, regions.current()
    if not _is_method(context):
        with module_scope.marked(module_scope.innermost()):
            return next_fun(*args, **kwargs)
    path = "/".join(module.path)
    with _marked(module, path):
        if region is None or region.forced or context.method_name == "setup":
            return next_fun(*args, **kwargs)
        out = module_scope.call_module(
            functools.partial(_with_dtypes, next_fun, module),
            args,
            kwargs,
            path=path,
            cls=type(module),
            carry=_CELL if _is_cell_call(context) else None,
        )
    if region.policies.entries and not path:
        module_scope.record_paths(_variable_paths(module))
    return out


def _is_method(context: nn.module.InterceptorContext) -> bool:
    """Flax lifts a function over a module (`nn.scan(lambda cell, carry, x: …)`) as if it were a method of it.

    But it is code of the caller.
    """
    return callable(getattr(type(context.module), context.method_name, None))


def _is_cell_call(context: nn.module.InterceptorContext) -> bool:
    return isinstance(context.module, nn.RNNCellBase) and context.method_name == "__call__"


def _marked(module: nn.Module, path: str) -> contextlib.AbstractContextManager[None]:
    """The mark of a module while an audit records."""
    if not module_scope.is_recording():
        return contextlib.nullcontext()
    caller = module_scope.innermost()
    mark = Mark(_root(module, caller), path)
    if (
        caller is not None and caller.base is not None
    ):  # a linen model inside of a module of another framework
        mark = Mark(caller.root, f"{caller.base}/{path}".strip("/"), caller.base)
    # The policy of that module governs the whole of a linen model inside of it.
    if mark.base is None and not path:
        module_scope.add_modules(mark.root, _variable_paths(module))
    return module_scope.marked(mark, type(module) if mark.base is None else None)


def _root(module: nn.Module, caller: Mark | None) -> str:
    """The class of the model: the caller's within lifted transformations, where modules lose their parents."""
    while module.path and isinstance(module.parent, nn.Module):
        module = module.parent
    if module.path and caller is not None:
        return caller.root
    return "" if module.path else type(module).__name__


def _variable_paths(module: nn.Module) -> Iterator[str]:
    """The paths of the modules that have variables, and of those that contain them."""
    flat, _ = jax.tree_util.tree_flatten_with_path(dict(module.variables))
    for keys, _ in flat:
        names = [str(k.key) for k in keys[1:] if isinstance(k, jax.tree_util.DictKey)]
        yield from ancestors("/".join(names[:-1]))


# ------------------------------------------------------------------------------------ parameters and state


def _with_dtypes(next_fun: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Calls a method; state keeps the dtype that it is stored in, and new parameters have the param dtype."""
    region, stored = regions.current(), _stored_dtypes(module)
    out = next_fun(*args, **kwargs)
    for (collection, name), before in stored.items():
        # Whatever precision the new value was computed in.
        _replace(module, collection, name, functools.partial(casting.cast_to_dtypes, leaf_dtypes=before))
    if module.is_initializing() and region is not None:
        _store_params(module, region.policy.param_dtype)
    return out


def _own_variables(module: nn.Module, collection: str) -> dict[str, chex.ArrayTree]:
    """The variables of the module itself, without those of its submodules."""
    variables = module.variables.get(collection, {})
    return {k: v for k, v in variables.items() if not isinstance(v, Mapping)}


def _stored_dtypes(module: nn.Module) -> dict[tuple[str, str], Any]:
    scope = module.scope
    if scope is None or not scope.mutable or module.is_initializing():
        return {}
    return {
        (collection, name): casting.dtypes_of(value)
        for collection in module.variables
        if collection not in _NOT_STATE and module.is_mutable_collection(collection)
        for name, value in _own_variables(module, collection).items()
    }


def _store_params(module: nn.Module, dtype: Any) -> None:
    if module.is_mutable_collection("params"):
        for name in _own_variables(module, "params"):
            _replace(module, "params", name, lambda value: casting.cast_floating(value, dtype))


def _replace(
    module: nn.Module, collection: str, name: str, f: Callable[[chex.ArrayTree], chex.ArrayTree]
) -> None:
    value: Any = module.get_variable(collection, name)
    new = f(value)
    if casting.dtypes_of(new) != casting.dtypes_of(value):
        module.put_variable(collection, name, new)
