"""Assertions about precision for a project's own unit tests, which run on CPU and speak for TPU and GPU.

    from mpjax import testing

    def test_the_train_step_computes_in_bfloat16():
        testing.assert_policy_holds(step, state, batch, policies="p=f32,c=bf16,o=f32")

They trace the function and read the program; only `assert_skips_cleanly` runs it. A failure prints the findings.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._audit.audit import audit
from mpjax._audit.findings import Silenced
from mpjax._audit.result import Finding
from mpjax._precision import casting
from mpjax._precision.policy_map import PolicyMapLike, as_policy_map

T = TypeVar("T")

_MATMUL_KINDS = ("silent-upcast", "below-policy", "mixed-operands")
# As many halvings as lie between the largest and the smallest number of float32.
_MOST_BACKOFFS = 280
# What may change when a step is skipped.
_COUNTERS = ("step", "skipped", "loss_scale")


def assert_policy_holds(fn: Callable[..., Any], *args: Any, policies: PolicyMapLike) -> None:
    """Asserts that every matmul of `fn` takes the operands that the policies say, in forward and backward.

    Args:
      fn: any JAX function, such as a train step; it is traced unchanged, not under the policies.
      *args: its arguments: arrays or `jax.ShapeDtypeStruct`s.
      policies: a policy string, a policy, a dict from pattern to policy, or a `PolicyMap`.

    Raises:
      AssertionError: with the findings, if a matmul does not, or if there is none.
      ValueError: if a pattern of the policies governs no module of `fn`.
    """
    found = audit(fn, *args, policies=policies)
    if not found.matmuls:
        raise AssertionError(
            f"{found.name} has no matmul and no convolution, so nothing shows whether it holds a policy."
        )
    wrong = [f for f in found.findings if f.kind in _MATMUL_KINDS]
    _fail_with(wrong, f"{found.name} does not hold the policy '{as_policy_map(policies)}'")


def assert_no_findings(
    fn: Callable[..., Any],
    *args: Any,
    policies: PolicyMapLike | None = None,
    severity: str = "warning",
    ignore: Silenced | None = None,
) -> None:
    """Asserts that an audit finds nothing of a severity or a more severe one.

    Args:
      fn: any JAX function.
      *args: its arguments: arrays or `jax.ShapeDtypeStruct`s.
      policies: what to compare it with; see `mpjax.audit`.
      severity: "error", "warning" or "note".
      ignore: findings that are intended; see `mpjax.audit`.

    Raises:
      AssertionError: with the findings.
      ValueError: if the severity is none of these.
    """
    found = audit(fn, *args, policies=policies, ignore=ignore)
    _fail_with(found.at_least(severity), f"{found.name} has findings of severity '{severity}' or above")


def assert_traces_once(step: Callable[..., Any], *args: Any) -> None:
    """Asserts that a second call with the state that the first returned does not trace `step` again.

    Nothing is run: the state's dtypes, shapes and weak types are followed through one step.

    Args:
      step: `(state, *rest) -> state` or `-> (state, …)`, jitted or not.
      *args: its arguments, the state first: arrays or `jax.ShapeDtypeStruct`s.

    Raises:
      AssertionError: naming each leaf of the state that the second call would find changed.
      TypeError: if there are no arguments.
    """
    if not args:
        raise TypeError("assert_traces_once expects the arguments of the step, its state first, got none.")
    out = jax.eval_shape(step, *args)
    state = args[0]
    structure: Any = jax.tree.structure(state)
    new = out
    if structure != jax.tree.structure(out) and isinstance(out, tuple) and out:
        new = out[0]
    name = getattr(step, "__name__", type(step).__name__)
    if structure != jax.tree.structure(new):
        raise AssertionError(
            f"{name} is traced again by its second call: it does not return a state of the structure of its first "
            f"argument.\n  in:  {structure}\n  out: {jax.tree.structure(new)}"
        )
    changed = []
    flat = jax.tree_util.tree_flatten_with_path(state)[0]
    for (path, before), after in zip(flat, jax.tree.leaves(new), strict=True):
        if (was := _signature(before)) != (now := _signature(after)):
            changed.append(f"  {_where(path)}: {was} becomes {now}")
    if changed:
        raise AssertionError(
            f"{name} is traced again by its second call, as its state changes:\n" + "\n".join(changed)
        )


def assert_skips_cleanly(step: Callable[..., Any], state: Any, batch: Any, *rest: Any) -> None:
    """Asserts that a step whose gradients are not finite leaves the state bit-identical.

    Runs `step` on the batch unchanged, which must change the parameters (once a dynamic loss scale has found its
    range), and with NaN in each row of each parameter, which makes the loss and the gradients NaN. Then
    only `step`, `skipped` and `loss_scale` may have changed.

    Args:
      step: `(state, batch, …) -> state` or `-> (state, …)`. It must not donate its state.
      state: an `mpjax.TrainState` or another with fields `params` and `replace`.
      batch: a batch of finite numbers.
      *rest: further arguments of `step`, such as a key.

    Raises:
      AssertionError: naming each leaf that changed, or saying that nothing was learnt from the good batch.
      TypeError: if the state has no `params` to make NaN.
    """
    if not hasattr(state, "params") or not hasattr(state, "replace"):
        raise TypeError(
            f"assert_skips_cleanly expects a state with the fields of a TrainState, got {type(state).__name__}."
        )
    state = jax.tree.map(_copy, state)
    for _ in range(_MOST_BACKOFFS):
        good = _state_of(step(jax.tree.map(_copy, state), batch, *rest))
        if _changed(state.params, good.params):
            break
        scales = [jax.tree.map(_bits, getattr(s, "loss_scale", None)) for s in (state, good)]
        if scales[0] == scales[1]:
            raise AssertionError("The step changed no parameter on a good batch, so a skip would not show.")
        state = good  # skipped, as the scale was too large
    else:
        raise AssertionError(
            f"The step was skipped {_MOST_BACKOFFS} times in a row on a good batch, however far the loss scale went "
            "down, so a skip on a bad one would not show. Give a batch whose gradients are finite."
        )
    poisoned = state.replace(params=_poisoned(state.params))
    before = jax.tree.map(_copy, poisoned)
    after = _state_of(step(poisoned, batch, *rest))
    changed = [path for path in _changed(before, after) if path.split("/")[0] not in _COUNTERS]
    if changed:
        shown = "\n".join(f"  {path}" for path in changed[:10])
        more = f"\n  and {len(changed) - 10} more" if len(changed) > 10 else ""
        raise AssertionError(f"A step whose gradients are not finite changed its state:\n{shown}{more}")


def _fail_with(findings: list[Finding] | tuple[Finding, ...], what: str) -> None:
    if findings:
        shown = "\n\n".join(map(str, findings[:10]))
        more = f"\n\nand {len(findings) - 10} more" if len(findings) > 10 else ""
        raise AssertionError(f"{what}:\n\n{shown}{more}")


def _signature(x: Any) -> str:
    aval = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
    weak = ", weakly typed" if getattr(aval, "weak_type", False) else ""
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]{weak}"


def _state_of(out: Any) -> Any:
    return out[0] if isinstance(out, tuple) and not hasattr(out, "params") else out


def _copy(x: Any) -> Any:
    return jnp.copy(x) if isinstance(x, jax.Array) else x


def _poisoned(params: T) -> T:
    """The parameters with NaN in each row, so that any lookup meets one, and with finite numbers too."""

    def poison(x: Any) -> Any:
        if not casting.is_floating_array(x) or x.size == 0:
            return x
        return jnp.asarray(x).at[..., 0].set(jnp.nan) if x.ndim else jnp.full_like(x, jnp.nan)

    return jax.tree.map(poison, params)


def _changed(before: Any, after: Any) -> list[str]:
    """The paths of the leaves that differ in a bit, a dtype or a shape."""
    old, new = (jax.tree_util.tree_flatten_with_path(tree)[0] for tree in (before, after))
    if [p for p, _ in old] != [p for p, _ in new]:
        return ["(its structure)"]
    return [_where(p) for (p, a), (_, b) in zip(old, new, strict=True) if _bits(a) != _bits(b)]


def _bits(x: Any) -> Any:
    if not isinstance(x, (jax.Array, np.ndarray)):
        return x
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return str(x.dtype), x.shape, np.asarray(x).tobytes()


def _where(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
