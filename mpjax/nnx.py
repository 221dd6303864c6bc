"""How flax.nnx modules enter and leave their regions, and an optimizer that knows the loss scale.

nnx has no interceptors, so `apply_policy` returns a copy of a model whose modules belong to subclasses that
do what linen.py's interceptor does. Which policy governs a module is decided then, once, and travels
with its class: through `nnx.jit`, `nnx.scan`, `nnx.vmap` and `nnx.remat`.
"""

import contextlib
import dataclasses
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import jmp
import optax
from flax import nnx
from flax.nnx.nn import recurrent

from mpjax import casting, dtypes, gradients, marks, parallel, regions
from mpjax.autocast import Watch, module_hooks, under
from mpjax.loss_scale import as_loss_scale, check_loss_scale, loss_scale_for
from mpjax.placement import placed
from mpjax.policy_map import PolicyMap, as_policy_map
from mpjax.train_state import apply_if_finite, check_stored

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
        with scope, marks.opened(_mark(self, governed.path, cls), cls):
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


def _mark(self: nnx.Module, path: str, cls: type) -> marks.Mark:
    """By which an audit knows whose operations it reads."""
    caller = marks.innermost()
    root = cls.__name__ if not path else caller.root if caller else ""
    if caller is None:  # modules that do not run are modules of the model, too
        marks.present(root, _governed_paths(self))
    return marks.Mark(root, path, base=path if issubclass(cls, nnx.bridge.ToNNX) else None)


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


# ------------------------------------------------------------------------------------------- training


def value_and_grad(
    loss_fn: Callable[..., Any],
    *,
    has_aux: bool = False,
    wrt: nnx.filterlib.Filter = nnx.Param,
    axis_name: Any = None,
    reduce_dtype: str = "float32",
) -> Callable[..., tuple[Any, nnx.State, jax.Array]]:
    """`mpjax.value_and_grad` for loss functions of an nnx model under policies.

    Args:
      loss_fn: `(model, *args) -> loss`, or `(loss, aux)` with `has_aux`; the loss is a float32 scalar.
      has_aux: whether it returns auxiliary results.
      wrt: which variables to differentiate with respect to.
      axis_name: as of `mpjax.value_and_grad`; the model's state is averaged too.
      reduce_dtype: as of `mpjax.value_and_grad`.

    Returns:
      A function of `(loss_scale, model, *args)` that returns `(value, grads, finite)`; see
      `mpjax.value_and_grad`. What the model changed in itself (batch statistics) is kept only if the gradients
      are finite, but its random streams move on.

    Raises:
      ValueError: when called, if the model carries no policy or a parameter is not stored as it says.
    """

    @functools.wraps(loss_fn)
    def value_and_grad_fn(loss_scale: Any, model: nnx.Module, *args: Any) -> tuple[Any, nnx.State, jax.Array]:
        policies = policies_of(model)
        if policies is None:
            raise ValueError(
                f"{type(model).__name__} carries no policy; pass mpjax.nnx.apply_policy(model, policies)."
            )
        _check_params(model, policies)
        graphdef, params, rest = nnx.split(model, wrt, ...)  # type: ignore[misc]

        def pure_loss(params: nnx.State, rest: nnx.State, *args: Any) -> tuple[Any, Any]:
            merged = nnx.merge(graphdef, params, rest, copy=True)
            out = loss_fn(merged, *args)
            loss, aux = gradients.split_loss(out, has_aux)
            _, _, new_rest = nnx.split(merged, wrt, ...)  # type: ignore[misc]
            return loss, (aux, new_rest)

        functools.update_wrapper(pure_loss, loss_fn, updated=())
        # The modules carry the map's patterns, and they were checked when it was applied.
        grad_fn = gradients.value_and_unscaled_grad(
            pure_loss, policies.default, axis_name=axis_name, reduce_dtype=reduce_dtype
        )
        (loss, (aux, new_rest)), grads = grad_fn(loss_scale, params, rest, *args)
        grads = gradients.average(grads, params, loss, policies, loss_scale, axis_name, reduce_dtype)
        loss = parallel.combine_metrics(loss, axis_name)
        new_rest = parallel.average_state(new_rest, rest, axis_name)
        finite = gradients.all_finite(grads, averaged_over=axis_name)
        nnx.update(model, _kept_if(finite, new_rest, rest))
        return ((loss, aux) if has_aux else loss), grads, finite

    return value_and_grad_fn


class Optimizer(nnx.Optimizer[M]):
    """`flax.nnx.Optimizer` that unscales gradients, skips steps that are not finite and adjusts its scale.

    With `jax.grad` or `nnx.grad` of a loss that `scale` has scaled:

        grads = nnx.grad(lambda model: optimizer.scale(loss_fn(model, batch)))(model)
        finite = optimizer.update(model, grads)

    or with `mpjax.nnx.value_and_grad`, which also keeps the backward pass under the policy:

        loss, grads, finite = mpjax.nnx.value_and_grad(loss_fn)(optimizer.loss_scale, model, batch)
        optimizer.apply_gradients(model, grads, finite)

    Attributes:
      step: batches seen.
      skipped: steps that were skipped.
    """

    def __init__(
        self,
        model: M,
        tx: optax.GradientTransformation,
        *,
        wrt: nnx.filterlib.Filter = nnx.Param,
        loss_scale: Any = None,
    ) -> None:
        """Initialises the optimizer's state.

        Args:
          model: the model; its policy, if it carries one, decides on the loss scale by default.
          tx: any optax transformation.
          wrt: which variables to train.
          loss_scale: a loss scale, ours or jmp's.

        Raises:
          TypeError: if a variable to train is not floating.
          ValueError: if the loss scale is zero, negative, not finite or not a scalar.
        """
        gradients.check_floating(nnx.state(model, wrt), "the model")
        if loss_scale is None:
            loss_scale = loss_scale_for(policies_of(model) or "float32")
        loss_scale = as_loss_scale(loss_scale)
        check_loss_scale(loss_scale)
        in_float32 = optax.GradientTransformationExtraArgs(
            lambda params: tx.init(gradients.to_float32(params)), optax.with_extra_args_support(tx).update
        )
        super().__init__(model, in_float32, wrt=wrt)
        self.skipped = nnx.OptState(jnp.zeros([], jnp.int32))
        self._loss_scale = nnx.data(jax.tree.map(lambda x: nnx.OptState(jnp.asarray(x)), loss_scale))
        nnx.update(self, placed(nnx.state(self), nnx.state(model, wrt)))

    @property
    def loss_scale(self) -> Any:
        """The loss scale as a pure value."""
        return nnx.as_pure(self._loss_scale)

    def scale(self, loss: jax.Array) -> jax.Array:
        """The loss times the current scale."""
        return self.loss_scale.scale(loss)

    def update(self, model: M, grads: Any, /, **kwargs: Any) -> jax.Array:  # type: ignore[override]
        """Takes a step with the gradients of the scaled loss.

        Args:
          model: the model to update.
          grads: what `nnx.grad` returned for the loss times `scale`.
          **kwargs: further arguments for the optax transformation.

        Returns:
          Whether the gradients were finite and so the step was taken, shape [] and dtype bool.
        """
        grads = gradients.unscale(self.loss_scale, grads)
        return self.apply_gradients(model, grads, gradients.all_finite(grads), **kwargs)

    def apply_gradients(self, model: M, grads: Any, finite: jax.Array, **kwargs: Any) -> jax.Array:
        """Takes a step with unscaled gradients, if `finite`, and adjusts the loss scale.

        Args:
          model: the model to update.
          grads: what `mpjax.nnx.value_and_grad` returned.
          finite: likewise.
          **kwargs: further arguments for the optax transformation.

        Returns:
          `finite`.
        """
        grads = gradients.to_float32(nnx.as_pure(nnx.state(grads, self.wrt)))
        params = nnx.as_pure(nnx.state(model, self.wrt))
        new_params, new_opt_state = apply_if_finite(
            self.tx, grads, params, nnx.as_pure(self.opt_state), finite, **kwargs
        )
        nnx.update(model, new_params)
        nnx.update(self.opt_state, nnx.state(new_opt_state))
        nnx.update(self._loss_scale, nnx.state(self.loss_scale.adjust(finite)))
        self.step[...] += 1
        self.skipped[...] += 1 - finite.astype(jnp.int32)
        return finite


def _check_params(model: nnx.Module, policies: PolicyMap) -> None:
    """Refuses masters that something, such as `nnx.update` with cast values, has overwritten."""
    found = []
    for path, module in nnx.iter_modules(model):
        governed: Governed | None = getattr(module, _ATTRIBUTE, None)
        if governed is None:
            continue
        wanted = governed.policies.policy(governed.entry).param_dtype
        for name, variable in vars(module).items():
            if isinstance(variable, nnx.Param) and casting.castable(variable.get_value()):
                found.append(("/".join(map(str, (*path, name))), variable.get_value().dtype, wanted))
    check_stored(found, policies)


def _kept_if(finite: jax.Array, new: nnx.State, old: nnx.State) -> nnx.State:
    """The model's new state, or its old one; random streams move on in either case."""
    before = dict(nnx.to_flat_state(old))

    def kept(path: Any, leaf: Any) -> Any:
        if path not in before or isinstance(leaf, nnx.RngState):
            return leaf
        # Variables are pytrees; a leaf may also be a bare array.
        return gradients.select_tree(finite, leaf, before[path])

    return nnx.from_flat_state([(path, kept(path, leaf)) for path, leaf in nnx.to_flat_state(new)])
