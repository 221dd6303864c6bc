"""The optimizer's part of a step: an update in float32, or none.

optax's transformations take further arguments by name. `value`, `grad`, `value_fn` and `obj_fn` are what those in optax
ask for; a transformation gets the ones that its update function accepts, as in `optax.chain`.
"""

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from mpjax._precision import casting
from mpjax._training import cross_device, overwritten
from mpjax._training.finite import to_float32
from mpjax._training.overwritten import Split
from mpjax._training.types import AxisName, Finite, Grads, OptState, Params, PyTree

ExtraArgs = Mapping[str, Any]  # what `tx.update` gets by name
_STANDARD = ("updates", "state", "params")


def apply_if_finite(
    tx: optax.GradientTransformation,
    grads: Grads,
    params: Params,
    opt_state: OptState,
    finite: Finite,
    extra_args: ExtraArgs | None = None,
    new: PyTree = (),
    old: PyTree = (),
) -> tuple[Params, OptState, PyTree]:
    """New parameters and optimizer state, in the dtypes of the old ones, or the old ones.

    Args:
      tx: an optax transformation.
      grads: float32 gradients.
      params: the parameters.
      opt_state: the optimizer's state.
      finite: whether to apply the update, shape [] and dtype bool.
      extra_args: further arguments for `tx.update`; see `arguments`.
      new: values that take effect with the update.
      old: the ones before, in the same structure.

    Returns:
      Parameters, optimizer state, and `new` or `old`.
    """
    # A cond, not a select over every leaf: the optimizer's work is saved on a skip and, above all, no
    # second copy of the state is written when there is none. One for all, as a GPU waits for each.
    return lax.cond(
        finite,
        lambda grads, params, opt_state, new, old: (*_updated(tx, grads, params, opt_state, extra_args), new),
        lambda grads, params, opt_state, new, old: (params, opt_state, old),
        *(grads, params, opt_state, new, old),
    )


def is_finite_for(
    tx: optax.GradientTransformation, finite: Finite, loss: jax.Array, axis_name: AxisName | None = None
) -> Finite:
    """Whether a step can be taken: the gradients are finite, and so is the loss where the optimizer looks at it."""
    if not any("value" in names for names in _asked_for(tx.update)):
        return finite
    return finite & cross_device.agree(jnp.isfinite(loss), axis_name)


def update_fn(tx: optax.GradientTransformation) -> Callable[..., tuple[PyTree, OptState]]:
    """`tx.update`, which gets those of the further arguments that it accepts.

    Raises:
      TypeError: when called, if a transformation asks for an argument that does not reach it, naming both and the
        way out.
    """

    def update(
        grads: Grads, state: OptState, params: Params | None = None, **extra_args: Any
    ) -> tuple[PyTree, OptState]:
        try:
            return tx.update(grads, state, params, **_accepted(tx.update, extra_args))
        except (TypeError, ValueError) as e:
            if (found := _missing(str(e))) is None:
                raise
            raise TypeError(_explained(*found, extra_args)) from None

    return update


def _updated(
    tx: optax.GradientTransformation,
    grads: Grads,
    params: Params,
    opt_state: OptState,
    extra_args: ExtraArgs | None,
) -> tuple[Params, OptState]:
    """Parameters and optimizer state after an update that sees float32 alone, in the dtypes they had before.

    Optimizers cast parts of their state to the dtype of the parameters, where an epsilon of 1e-30 is zero.
    """
    old, gradients = overwritten.split(params), overwritten.split(grads)
    trained, put_back = overwritten.optimizer_view(old.trained)
    grad, _ = overwritten.optimizer_view(gradients.trained)
    wide = to_float32(trained)

    def whole(trained: Params) -> Params:
        return overwritten.merge(Split(put_back(trained), old.overwritten))

    further = _arguments(grad, wide, whole, extra_args or {})
    updates, new_opt_state = update_fn(tx)(grad, opt_state, wide, **further)
    _check_structure(new_opt_state, opt_state)
    new = casting.cast_to_dtypes(optax.apply_updates(wide, updates), casting.dtypes_of(trained))
    return (
        overwritten.merge(Split(put_back(new), gradients.overwritten)),
        casting.cast_to_dtypes(new_opt_state, casting.dtypes_of(opt_state)),
    )


def _check_structure(new: OptState, old: OptState) -> None:
    found: Any = jax.tree.structure(new)
    expected: Any = jax.tree.structure(old)
    if found != expected:
        raise ValueError(
            f"The optimizer's state has another structure after an update, {found}, than before, {expected}. A step "
            "that may be skipped needs the same in both cases: initialize the optimizer's state as its update leaves "
            "it, or leave out the part of the optimizer that changes it, such as optax.monitor."
        )


def _arguments(
    grad: Grads, params: Params, whole: Callable[[Params], Params], given: ExtraArgs
) -> dict[str, Any]:
    """What a transformation gets by name: the gradients, what was given, and the loss as the optimizer can call it."""
    arguments: dict[str, Any] = {"grad": grad, **{k: v for k, v in given.items() if v is not None}}
    if (value_fn := arguments.get("value_fn")) is not None:
        arguments["value_fn"] = _of_optimizers_params(value_fn, params, whole)
        arguments.setdefault("obj_fn", arguments["value_fn"])
    return arguments


def _of_optimizers_params(
    value_fn: Callable[..., jax.Array], params: Params, whole: Callable[[Params], Params]
) -> Callable[..., jax.Array]:
    """`value_fn` as a function of the parameters that the optimizer sees."""
    expected: Any = jax.tree.structure(params)

    @functools.wraps(value_fn)
    def of_optimizers_params(params: Params, *args: Any, obj_fn: Any = None, **kwargs: Any) -> jax.Array:
        if jax.tree.structure(params) != expected:
            raise ValueError(
                "The optimizer evaluates the loss at a part of the parameters, as a line search inside of "
                "optax.masked or optax.partition does. Put it outside of them, as in optax.chain("
                "optax.masked(…), optax.scale_by_backtracking_linesearch(…))."
            )
        return value_fn(whole(params), *args, **kwargs)

    # optax's line searches refuse what their value_fn does not name, while others ask for obj_fn.
    signature = inspect.signature(value_fn)
    names = dict(signature.parameters)
    names.setdefault("obj_fn", inspect.Parameter("obj_fn", inspect.Parameter.KEYWORD_ONLY, default=None))
    in_order = sorted(names.values(), key=lambda p: p.kind)
    of_optimizers_params.__signature__ = signature.replace(parameters=in_order)  # type: ignore[attr-defined]
    return of_optimizers_params


def _accepted(update: Callable[..., Any], arguments: ExtraArgs) -> ExtraArgs:
    """The arguments that a function accepts by name."""
    parameters = inspect.signature(update).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return arguments
    return {k: v for k, v in arguments.items() if k in parameters}


def _missing(message: str) -> tuple[str, str] | None:
    """Which transformation asks for what, from Python's message or from optax's own."""
    if found := re.match(r"([\w.<>]*)\(\) missing \d+ required [\w -]*arguments?: (.+)", message):
        function, names = found.groups()
        is_update = function.rpartition(".")[2].startswith("update")
        return (function.split(".")[0], names) if is_update else None
    found = re.match(r"(\w+) must be provided to (\S+) update function", message)
    return (found[2].removesuffix("'s"), f"'{found[1]}'") if found and found[1] not in _STANDARD else None


def _explained(transformation: str, names: str, given: ExtraArgs) -> str:
    asked = re.findall(r"'(\w+)'", names)
    if asked and all(name in given for name in asked):
        way_out = (
            "A wrapper around it, such as optax.lookahead, does not pass such arguments on: use the transformation "
            "without it"
        )
    elif set(asked) <= {"value", "grad", "value_fn", "obj_fn"}:
        way_out = (
            "mpjax.make_train_step gives it value, grad, value_fn and obj_fn. In a loop of your own pass the "
            "unscaled loss as value=…, and as value_fn=… the loss as a function of the parameters alone"
        )
    else:
        way_out = (
            "mpjax knows value, grad, value_fn and obj_fn. Take the gradients with mpjax.value_and_grad and pass the "
            f"others to apply_gradients(…, extra_args={{{asked[0]!r}: …}})"
        )
    return f"The optimizer's transformation '{transformation}' asks for {names}, which it was not given. {way_out}."


def _asked_for(update: Callable[..., Any]) -> Iterator[tuple[str, ...]]:
    """The parameters' names of an update function and of all those that it has closed over.

    optax builds transformations out of closures, so that this is where the parts of a chain are found.
    `inject_hyperparams` makes its inner transformation anew at each update; it may ask for anything.
    """
    seen: set[int] = set()
    stack: list[Any] = [update]
    while stack:
        x = stack.pop()
        if id(x) in seen:
            continue
        seen.add(id(x))
        if inspect.isfunction(x):
            code = x.__code__
            if x.__name__.startswith("update"):
                yield code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            if "inner_factory" in code.co_freevars:
                yield ("value",)
            stack += [cell.cell_contents for cell in x.__closure__ or () if _is_filled(cell)]
        elif inspect.ismethod(x):
            stack += [x.__func__, *getattr(x.__self__, "__dict__", {}).values()]
        elif isinstance(x, functools.partial):
            stack += [x.func, *x.args, *x.keywords.values()]
        elif isinstance(x, (list, tuple)):
            stack += x
        elif isinstance(x, dict):
            stack += x.values()


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
