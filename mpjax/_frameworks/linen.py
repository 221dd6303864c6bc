"""How flax.linen modules enter and leave their regions: one interceptor around every call.

Nothing has to be done to a model. `mpjax.autocast`, `mpjax.value_and_grad` and the train step open the
interceptor; it asks the policy map for each module by its path and class.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax

from mpjax._frameworks.autocast import Watch, module_hooks
from mpjax._precision import casting, module_scope, regions
from mpjax._precision.policy_map import ancestors

# Collections in which a changed dtype is the module's own business.
_NOT_STATE = ("params", "intermediates", "perturbations", "losses")


@contextlib.contextmanager
def _intercepted(watch: Watch) -> Iterator[None]:
    def interceptor(
        next_fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any], context: nn.module.InterceptorContext
    ) -> Any:
        region = regions.current()
        if region is None or region.forced or not _is_method(context) or context.method_name == "setup":
            return next_fun(*args, **kwargs)
        return _call(next_fun, args, kwargs, context, region, watch)

    with nn.intercept_methods(interceptor):
        yield


module_hooks.append(_intercepted)


def _is_method(context: nn.module.InterceptorContext) -> bool:
    """Flax lifts a function over a module (`nn.scan(lambda cell, carry, x: …)`) as if it were a method of it.

    But it is code of the caller.
    """
    return callable(getattr(type(context.module), context.method_name, None))


@contextlib.contextmanager
def _marked() -> Iterator[None]:
    """Marks what modules trace for an audit."""

    def interceptor(
        next_fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any], context: nn.module.InterceptorContext
    ) -> Any:
        module, caller = context.module, module_scope.innermost()
        if not _is_method(context):
            with module_scope.opened(caller):
                return next_fun(*args, **kwargs)
        path = "/".join(module.path)
        mark = module_scope.Mark(_root(module, caller), path)
        if caller is not None and caller.base is not None:  # a linen model inside of an nnx module
            mark = module_scope.Mark(caller.root, f"{caller.base}/{path}".strip("/"), caller.base)
        # The policy of a module of nnx governs the whole of a linen model inside of it.
        if mark.base is None and not path:
            module_scope.present(mark.root, _variable_paths(module))
        with module_scope.opened(mark, type(module) if mark.base is None else None):
            return next_fun(*args, **kwargs)

    with nn.intercept_methods(interceptor):
        yield


module_scope.hooks.append(_marked)


def _root(module: nn.Module, caller: module_scope.Mark | None) -> str:
    """The class of the model: the caller's within lifted transformations, where modules lose their parents."""
    while module.path and isinstance(module.parent, nn.Module):
        module = module.parent
    if module.path and caller is not None:
        return caller.root
    return "" if module.path else type(module).__name__


def _call(
    next_fun: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    context: nn.module.InterceptorContext,
    region: regions.Region,
    watch: Watch,
) -> Any:
    module = context.module
    path = "/".join(module.path)
    policies = region.policies
    entry = policies.match(path, type(module))
    watch.paths.add(path)
    if entry is None:
        entry = region.inherited_entry(path)
    else:
        watch.governed.add(entry)
    watch.modules.setdefault(path, (type(module), entry))
    stored = _stored_dtypes(module)

    def call(*args: Any, **kwargs: Any) -> Any:
        out = next_fun(*args, **kwargs)
        _keep_stored_dtypes(module, stored)
        if module.is_initializing():
            _store_params(module, policies.policy(entry).param_dtype)
        return out

    out = regions.call_module(
        call,
        args,
        kwargs,
        regions.Region(policies, entry, path=path, parent=region, in_module=True),
        path=path,
        cls=type(module),
        carries=isinstance(module, nn.RNNCellBase) and context.method_name == "__call__",
    )
    if policies.entries and not path:
        _see_variables(module, region, watch)
    return out


def _see_variables(module: nn.Module, region: regions.Region, watch: Watch) -> None:
    """Counts modules that were not called (a decoder, when only the encoder runs) as governed."""
    for path in _variable_paths(module):
        watch.paths.add(path)
        entry = region.policies.match(path)
        if entry is not None:
            watch.governed.add(entry)


def _variable_paths(module: nn.Module) -> Iterator[str]:
    """The paths of the modules that have variables, and of those that they stand in."""
    flat, _ = jax.tree_util.tree_flatten_with_path(dict(module.variables))
    for keys, _ in flat:
        names = [str(k.key) for k in keys[1:] if isinstance(k, jax.tree_util.DictKey)]
        yield from ancestors("/".join(names[:-1]))


def _own_variables(module: nn.Module, collection: str) -> dict[str, Any]:
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


def _keep_stored_dtypes(module: nn.Module, stored: dict[tuple[str, str], Any]) -> None:
    """State keeps the dtype it is stored in, whatever precision its new value was computed in."""
    for (collection, name), before in stored.items():
        _replace(module, collection, name, functools.partial(casting.cast_to_dtypes, leaf_dtypes=before))


def _store_params(module: nn.Module, dtype: Any) -> None:
    if module.is_mutable_collection("params"):
        for name in _own_variables(module, "params"):
            _replace(module, "params", name, lambda value: casting.cast_floating(value, dtype))


def _replace(module: nn.Module, collection: str, name: str, f: Callable[[Any], Any]) -> None:
    value: Any = module.get_variable(collection, name)
    new = f(value)
    if casting.dtypes_of(new) != casting.dtypes_of(value):
        module.put_variable(collection, name, new)
