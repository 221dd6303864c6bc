"""How flax.nnx modules enter and leave their regions.

nnx has no interceptors, so `apply_policy` returns a copy of a model whose modules belong to subclasses that
do what linen.py's interceptor does. Which policy governs a module is decided then, once, and travels
with its class: through `nnx.jit`, `nnx.scan`, `nnx.vmap` and `nnx.remat`.
"""

import contextlib
import dataclasses
import functools
import types
from collections.abc import Iterator
from typing import Any, TypeVar

import jax
import jmp
from flax import nnx
from flax.nnx.nn import recurrent

from mpjax._frameworks.autocast import Watch, module_hooks, under
from mpjax._precision import casting, dtypes, module_scope, regions
from mpjax._precision.policy_map import PolicyMap, as_policy_map

M = TypeVar("M", bound=nnx.Module)

_ATTRIBUTE = "mpjax_policy"


@dataclasses.dataclass(frozen=True)
class Governed:
    """What a module of a model under policies carries: the map, its entry in it and its own path."""

    policies: PolicyMap
    entry: int
    path: str

    def __str__(self) -> str:
        return str(self.policies.policy(self.entry))

    __repr__ = __str__


def apply_policy(model: M, policies: "str | dict | jmp.Policy | PolicyMap") -> M:
    """Returns a copy of an nnx model that runs under policies.

    Its parameters are stored in their param dtype and are otherwise the model's; modules that
    the model shares stay shared, the model itself is untouched. A model that runs under policies already
    gets the new ones.

    Args:
      model: any nnx module.
      policies: a policy string, a policy, a dict from pattern to policy, or a `PolicyMap`. A pattern must match
        the whole path of a module, such as `"blocks/0/attn"`.

    Raises:
      ValueError: if a pattern of the map governs no module of the model.
      TypeError: if `model` is no nnx module.
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(
            f"apply_policy expects a flax.nnx module, got {type(model).__name__}. For flax.linen modules and "
            "plain functions use mpjax.autocast(fn, policies)."
        )
    policies = as_policy_map(policies)
    copy = nnx.merge(*nnx.split(model), copy=True)
    modules = {"/".join(map(str, path)): module for path, module in nnx.iter_modules(copy)}
    classes = {path: original_class(module) for path, module in modules.items()}
    if policies.entries:
        matches = {policies.match(path, cls) for path, cls in classes.items()}
        policies.check_governs({m for m in matches if m is not None}, modules)
    for path, module in modules.items():
        governed = Governed(policies, policies.resolve(path, classes), path)
        object.__setattr__(module, "__class__", _under_policy(classes[path], governed))
        _store_params(module, governed)
    return copy


@contextlib.contextmanager
def _refuse_unpatterned(watch: Watch) -> Iterator[None]:
    """A map with patterns cannot reach a plain nnx module: say so rather than ignore them."""
    for model in watch.args if watch.policies.entries else ():
        if isinstance(model, nnx.Module) and policies_of(model) is None:
            raise ValueError(
                f"The policy map '{watch.policies}' has patterns, but the nnx module {type(model).__name__} does "
                "not carry them. Pass mpjax.nnx.apply_policy(model, policies) instead of the model."
            )
    yield


module_hooks.append(_refuse_unpatterned)


def policies_of(model: nnx.Module) -> PolicyMap | None:
    """The map that a model runs under, or None."""
    governed = getattr(model, _ATTRIBUTE, None)
    return None if governed is None else governed.policies


def governed_modules(model: nnx.Module) -> dict[str, tuple[type, int, list[nnx.Param[Any]]]]:
    """Class, entry and own parameters of each module of a model under policies, by path."""
    modules = {}
    for _, module in nnx.iter_modules(model):
        governed: Governed | None = getattr(module, _ATTRIBUTE, None)
        if governed is not None:
            params = [x for x in _own_variables(module) if isinstance(x, nnx.Param)]
            modules[governed.path] = (original_class(module), governed.entry, params)
    return modules


def stored_dtypes(model: nnx.Module) -> list[tuple[str, Any, Any]]:
    """Path and dtype of each parameter of a model under policies, and the dtype that its policy stores it in."""
    found = []
    for path, module in nnx.iter_modules(model):
        governed: Governed | None = getattr(module, _ATTRIBUTE, None)
        if governed is None:
            continue
        wanted = governed.policies.policy(governed.entry).param_dtype
        for name, variable in vars(module).items():
            if isinstance(variable, nnx.Param) and casting.castable(variable.get_value()):
                found.append(("/".join(map(str, (*path, name))), variable.get_value().dtype, wanted))
    return found


def original_class(module: nnx.Module) -> type:
    """The class that the module had before `apply_policy`."""
    cls = type(module)
    return cls.__mro__[1] if _ATTRIBUTE in vars(cls) else cls


@functools.cache
def _under_policy(cls: type, governed: Governed) -> type:
    """The subclass of `cls` whose public methods run in their module's region.

    The policy is an attribute of the class: modules, and what walks over their attributes, see no other.
    """
    namespace: dict[str, Any] = {
        _ATTRIBUTE: governed,
        "__doc__": cls.__doc__,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__reduce__": _reduce,
    }
    base = next(c for c in cls.__mro__ if c in (nnx.Module, nnx.Object))
    inherited = set(dir(base))
    for name in dir(cls):
        if name != "__call__" and (name.startswith("_") or name in inherited):
            continue
        # A cell's initial carry is state, not a result.
        method = _find(cls, name)
        if name != "initialize_carry" and _is_method(method):
            namespace[name] = _in_region(name, method, governed, cls)
    return type(cls)(cls.__name__, (cls,), namespace)


def _find(cls: type, name: str) -> Any:
    return next((vars(c)[name] for c in cls.__mro__ if name in vars(c)), None)


def _is_method(x: Any) -> bool:
    """Functions, and what transforms such as `nnx.jit` make of them when they decorate a method."""
    if isinstance(x, types.FunctionType):
        return True
    return callable(x) and hasattr(x, "__get__") and not isinstance(x, (type, staticmethod, classmethod))


def _in_region(name: str, method: Any, governed: Governed, cls: type) -> Any:
    # Without the path: what governs each module is decided, so modules under one policy share their traces.
    region = regions.Region(governed.policies, governed.entry, in_module=True)

    @functools.wraps(method, updated=())
    def wrapper(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        bound = method.__get__(self, type(self))
        if regions.running() == (governed.path, cls):
            return bound(*args, **kwargs)
        if isinstance(self, nnx.bridge.ToNNX):  # the linen modules in it follow, as one region
            bound = under(bound, governed.policies.policy(governed.entry))
        state = _state_dtypes(self)
        scope = jax.named_scope(_relative_path(governed.path) or cls.__name__)
        with scope, module_scope.opened(_mark(self, governed.path, cls), cls):
            out = regions.call_module(
                bound,
                args,
                kwargs,
                region,
                path=governed.path,
                cls=cls,
                is_leaf=_is_module,
                carries=isinstance(self, recurrent.RNNCellBase) and name == "__call__",
            )
        for variable, before in state:
            kept = casting.cast_to_dtypes(variable.get_value(), before)
            if kept is not variable.get_value():
                variable.set_value(kept)
        return out

    return wrapper


def _mark(self: nnx.Module, path: str, cls: type) -> module_scope.Mark:
    """By which an audit knows whose operations it reads."""
    caller = module_scope.innermost()
    root = cls.__name__ if not path else caller.root if caller else ""
    if caller is None:  # modules that do not run are modules of the model, too
        module_scope.present(root, _governed_paths(self))
    return module_scope.Mark(root, path, base=path if issubclass(cls, nnx.bridge.ToNNX) else None)


def _governed_paths(model: nnx.Module) -> Iterator[str]:
    for _, module in nnx.iter_modules(model):
        if (governed := getattr(module, _ATTRIBUTE, None)) is not None:
            yield governed.path


def _relative_path(path: str) -> str:
    """The path as seen from the module that is running, so that nested scopes spell the whole."""
    outer = regions.running()
    return path.removeprefix(f"{outer[0]}/") if outer else path


def _is_module(x: Any) -> bool:
    # A module is a pytree too, but a copy of it made by mapping over its leaves is another module.
    return isinstance(x, (nnx.Module, nnx.Variable, nnx.Rngs))


def _own_variables(x: Any) -> list[nnx.Variable[Any]]:
    """The variables of a module, those in its containers included, without those of its submodules."""
    children = vars(x).values() if isinstance(x, nnx.Module) else x.values() if isinstance(x, dict) else x
    found: list[nnx.Variable[Any]] = []
    for child in children:
        if isinstance(child, nnx.Variable):
            found.append(child)
        elif isinstance(child, (nnx.List, nnx.Dict, list, tuple, dict)):
            found.extend(_own_variables(child))
    return found


def _state_dtypes(module: nnx.Module) -> list[tuple[nnx.Variable[Any], tuple[Any, ...]]]:
    """State keeps the dtype it is stored in, whatever precision its new value is computed in.

    The outermost module answers for the whole model, as a module may write another's state.
    """
    if regions.running() is None:
        variables = [x for _, x in nnx.iter_graph(module) if isinstance(x, nnx.Variable)]
    else:
        variables = _own_variables(module)
    return [
        (variable, casting.dtypes_of(variable.get_value()))
        for variable in variables
        if not isinstance(variable, (nnx.Param, nnx.Intermediate, nnx.RngState))
    ]


def _store_params(module: nnx.Module, governed: Governed) -> None:
    dtype = governed.policies.policy(governed.entry).param_dtype
    for variable in _own_variables(module):
        if isinstance(variable, nnx.Param):
            value = variable.get_value()
            if isinstance(value, jax.ShapeDtypeStruct):  # an abstract model, to restore into
                if value.dtype in dtypes.CASTABLE:
                    variable.set_value(value.update(dtype=dtype))
            else:
                variable.set_value(casting.cast_floating(value, dtype))


def _reduce(self: nnx.Module) -> Any:
    """Pickles and deep copies by the original class, as the subclass has no importable name."""
    return (_rebuild, (original_class(self), getattr(self, _ATTRIBUTE), dict(vars(self))))


def _rebuild(cls: type, governed: Governed, attributes: dict[str, Any]) -> nnx.Module:
    subclass = _under_policy(cls, governed)
    module: nnx.Module = object.__new__(subclass)
    vars(module).update(attributes)
    return module
