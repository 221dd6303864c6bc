"""flax.nnx: its modules carry their policy, after `apply_policy`.

Modules are mutable, so state that a method has written is given back the dtype that it is stored in.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
from flax import nnx

from mpjax._frameworks import governed as governing
from mpjax._frameworks.autocast import under
from mpjax._frameworks.governed import Governed, governed_of, original_class
from mpjax._frameworks.protocol import Framework, ModuleParameters
from mpjax._precision import casting, dtypes, module_scope
from mpjax._precision.module_scope import Carry
from mpjax._precision.policy_map import PolicyMap, PolicyMapLike, as_policy_map

M = TypeVar("M", bound=nnx.Module)

_CELL = Carry(argument=0, name="carry", result=0)
# A cell's initial carry is state, not a result.
_EXCLUDED = ("initialize_carry",)
_DIRECTORY = os.path.dirname(nnx.__file__)


class Nnx(Framework):
    """What flax.nnx tells mpjax."""

    name = "flax.nnx"
    directory = _DIRECTORY
    layers = (os.path.join(_DIRECTORY, "nn", ""), os.path.join(_DIRECTORY, "helpers.py"))

    def is_model(self, x: Any) -> bool:
        """Whether `x` is an nnx module."""
        return isinstance(x, nnx.Module)

    def check_arguments(self, policies: PolicyMap, args: Sequence[Any]) -> None:
        """A map with patterns cannot reach modules that do not carry it."""
        governing.check_carries(policies, (x for x in args if self.is_model(x)), "nnx")

    def apply_policy(self, model: M, policies: PolicyMap) -> M:
        """A copy whose modules carry their policies; see `mpjax.apply_policy`."""
        copy = nnx.merge(*nnx.split(model), copy=True)
        modules = {"/".join(map(str, path)): module for path, module in nnx.iter_modules(copy)}
        classes = {path: original_class(module) for path, module in modules.items()}
        for path, governed in governing.resolve(policies, classes).items():
            module = modules[path]
            object.__setattr__(module, "__class__", _subclass(classes[path], governed))
            _store_params(module, governed)
        return copy

    def modules(
        self, model: nnx.Module, policies: PolicyMap, inputs: Sequence[Any], kwargs: dict[str, Any]
    ) -> Iterator[ModuleParameters]:
        """All modules of the model, called or not, by path."""
        graphdef, state = nnx.split(model)
        found: dict[str, ModuleParameters] = {}

        def build(state: Any) -> None:
            for module in _governed_modules(self.apply_policy(nnx.merge(graphdef, state), policies)):
                governed = governed_of(module)
                assert governed is not None
                params = [x.get_value() for x in _own_variables(module) if isinstance(x, nnx.Param)]
                found[governed.path] = ModuleParameters(
                    governed.path, original_class(module), governed.entry, params
                )

        jax.eval_shape(build, state)
        yield from (found[path] for path in sorted(found))

    def split(self, models: list[Any]) -> tuple[list[Any], Callable[[list[Any]], list[Any]]]:
        """Their state; what several models share is in the state of the first of them only."""
        graphdef, state = nnx.split(models)
        states = [state.get(i, {}) for i in range(len(models))]

        def merge(states: list[Any]) -> list[Any]:
            return nnx.merge(graphdef, nnx.State({i: s for i, s in enumerate(states) if s}))

        return states, merge


FRAMEWORK = Nnx()


def apply_policy(model: M, policies: PolicyMapLike) -> M:
    """Returns a copy of an nnx model that runs under policies.

    Its parameters are stored in their param dtype and are otherwise the model's; modules that
    the model shares stay shared, the model itself is untouched. A model that runs under policies already
    gets the new ones.

    Args:
      model: any nnx module.
      policies: a policy string, a policy, a dict from pattern to policy, or a `PolicyMap`. A pattern must match
        the whole path of a module, such as `"blocks/0/attn"`.

    Raises:
      ValueError: if a pattern of the map governs no module of the model, or a policy cannot be run.
      TypeError: if `model` is no nnx module.
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(
            f"apply_policy expects a flax.nnx module, got {type(model).__name__}. For flax.linen modules and "
            "plain functions use mpjax.autocast(fn, policies)."
        )
    return FRAMEWORK.apply_policy(model, as_policy_map(policies))


def policies_of(model: nnx.Module) -> PolicyMap | None:
    """The map that a model runs under, or None."""
    governed = governed_of(model)
    return None if governed is None else governed.policies


def stored_dtypes(model: nnx.Module) -> list[tuple[str, Any, Any]]:
    """Path and dtype of each parameter of a model under policies, and the dtype that its policy stores it in."""
    found = []
    for path, module in nnx.iter_modules(model):
        governed = governed_of(module)
        if governed is None:
            continue
        wanted = governed.policies.policy(governed.entry).param_dtype
        for name, variable in vars(module).items():
            if isinstance(variable, nnx.Param) and casting.castable(variable.get_value()):
                found.append(("/".join(map(str, (*path, name))), variable.get_value().dtype, wanted))
    return found


def _governed_modules(model: nnx.Module) -> Iterator[nnx.Module]:
    return (module for _, module in nnx.iter_modules(model) if governed_of(module) is not None)


def _subclass(cls: type, governed: Governed) -> type:
    base = next(c for c in cls.__mro__ if c in (nnx.Module, nnx.Object))
    return governing.subclass(cls, governed, base, _run, _subclass, _EXCLUDED)


def _run(
    self: nnx.Module,
    name: str,
    bound: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    governed: Governed,
) -> Any:
    """Runs a module's method in its region."""
    bridges_linen = isinstance(self, nnx.bridge.ToNNX)
    if bridges_linen:  # the linen modules in it follow, as one region
        bound = under(bound, governed.policies.policy(governed.entry))
    cls, state = original_class(self), _state_dtypes(self)

    def paths() -> Iterator[str]:
        return (g.path for module in _governed_modules(self) if (g := governed_of(module)) is not None)

    with governing.scopes(cls, governed, paths, governed.path if bridges_linen else None):
        out = module_scope.call_module(
            bound,
            args,
            kwargs,
            path=governed.path,
            cls=cls,
            region=governed.region,
            is_leaf=_is_module,
            carry=_CELL if isinstance(self, nnx.RNNCellBase) and name == "__call__" else None,
        )
    for variable, before in state:
        stored = casting.cast_to_dtypes(variable.get_value(), before)
        if stored is not variable.get_value():
            variable.set_value(stored)
    return out


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
    if module_scope.running() is None:
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
