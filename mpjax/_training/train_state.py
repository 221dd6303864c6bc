"""`TrainState`: Flax's, with the policy, the loss scale and the model's state.

A skipped step is a transaction that did not happen: parameters, optimizer state and model state stay
bit-identical, and only the loss scale and the counters move.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from flax.training import train_state

from mpjax._precision import casting
from mpjax._precision.policy_map import PolicyMap, as_policy_map, leaf_dtypes
from mpjax._training import optimizer, overwritten
from mpjax._training.finite import all_finite, to_float32
from mpjax._training.gradients import check_floating
from mpjax._training.loss_scale import LossScale, as_loss_scale, check_loss_scale, loss_scale_for
from mpjax._training.state_sharding import placed
from mpjax._training.types import Finite, Grads, Leaf, ModelState, Params, Policies, PyTree

T = TypeVar("T")


class TrainState(train_state.TrainState):
    """All that changes in training. Code that takes Flax's `TrainState` takes it.

    Attributes:
      step: batches seen, shape [] and dtype int32.
      apply_fn: usually `model.apply`; static.
      params: the parameters, in their param dtype.
      tx: the optax transformation; static.
      opt_state: its state. Its own counts (schedules, bias correction) count applied updates only.
      loss_scale: a loss scale.
      model_state: what the model itself changes, such as batch statistics; None without.
      skipped: steps whose gradients were not finite, shape [] and dtype int32.
      policy: the `PolicyMap` that the model runs under, or None; static.
    """

    loss_scale: LossScale = None  # type: ignore[assignment]  # create makes one
    model_state: ModelState | None = None
    skipped: jax.Array | int = 0
    policy: PolicyMap | None = struct.field(pytree_node=False, default=None)

    @classmethod
    def create(  # type: ignore[override]
        cls,
        *,
        apply_fn: Callable[..., Any] | None,
        params: Params,
        tx: optax.GradientTransformation,
        policy: Policies | None = None,
        loss_scale: LossScale | None = None,
        model_state: ModelState | None = None,
        **kwargs: Any,
    ) -> Self:
        """Returns the state before the first step.

            state = mpjax.TrainState.create(apply_fn=model.apply, params=params, tx=tx, policy="p=f32,c=bf16,o=f32")

        Args:
          apply_fn: stored for convenience; may be None.
          params: the parameters. They are stored in the param dtype of the policy that governs them; 16-bit ones
            are refused where that is float32, as bits that were lost do not come back.
          tx: any optax transformation.
          policy: a policy string, a policy, a dict from pattern to policy, or a `PolicyMap`; None leaves precision
            alone, as Flax's own state does.
          loss_scale: a loss scale, ours or jmp's; by default what the policy needs: dynamic if anything
            computes in float16, else none.
          model_state: a pytree of what the model itself changes.
          **kwargs: fields that a subclass adds.

        Returns:
          The state. Where parameters are sharded, it is placed on their mesh: what mirrors a parameter (such as Adam's
          moments) like the parameter, everything else on all devices. Under `jax.jit` pass `state_shardings`.

        Raises:
          TypeError: if a parameter is not floating.
          ValueError: if the loss scale is zero, negative, not finite or not a scalar, or a parameter has fewer
            bits than its policy stores.
        """
        policies = None if policy is None else as_policy_map(policy)
        check_floating(params, "params")
        if policies is not None:
            check_params(params, policies, only_narrower=True)
            params = cast_params(params, policies)
        loss_scale = loss_scale_for(policies) if loss_scale is None else as_loss_scale(loss_scale)
        check_loss_scale(loss_scale)
        trained, _ = overwritten.optimizer_view(overwritten.split(params).trained)
        state = cls(
            # Not a Python 0, for which jit would trace a second time after the first step.
            step=jnp.zeros([], jnp.int32),
            apply_fn=apply_fn,  # type: ignore[arg-type]
            params=params,
            tx=tx,
            opt_state=tx.init(to_float32(trained)),
            loss_scale=jax.tree.map(jnp.asarray, loss_scale),
            model_state=model_state,
            skipped=jnp.zeros([], jnp.int32),
            policy=policies,
            **kwargs,
        )
        return _without_aliases(placed(state, params))

    def apply_gradients(  # type: ignore[override]
        self,
        *,
        grads: Grads,
        finite: Finite | bool | None = None,
        value: jax.Array | None = None,
        value_fn: Callable[..., jax.Array] | None = None,
        extra_args: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Self:
        """Returns the state after one step, which is skipped if the gradients are not finite.

            state = state.apply_gradients(grads=grads, finite=finite, loss_scale=loss_scale.adjust(finite))

        Args:
          grads: gradients with the structure of `params`; unscaled. They are used in float32.
          finite: whether to apply them, shape [] and dtype bool; by default whether all are finite.
          value: the unscaled loss, shape [], for optimizers that ask for it, such as
            `optax.contrib.reduce_on_plateau`. These also skip the step if it is not finite.
          value_fn: `params -> loss` on the same batch, for optimizers that evaluate the loss themselves, such as
            `optax.lbfgs`. Its parameters are float32.
          extra_args: what else the optimizer asks for, by name.
          **kwargs: new values of other fields. On a skip they are dropped like the rest, but for
            `loss_scale`, which changes on a skip above all: pass `loss_scale.adjust(finite)`.

        Returns:
          The state with `step` one higher, and `skipped` too if nothing else changed.

        Raises:
          ValueError: if a new value has another structure than the old one.
          TypeError: if the optimizer asks for an argument that it was not given.
        """
        grads = to_float32(grads)
        finite = jnp.asarray(all_finite(grads) if finite is None else finite, bool)
        if value is not None:
            finite = optimizer.is_finite_for(self.tx, finite, value)
        dynamic = {k: v for k, v in kwargs.items() if k != "loss_scale" and _is_node(self, k)}
        static = {k: v for k, v in kwargs.items() if k not in dynamic}
        old = {k: getattr(self, k) for k in dynamic}
        new = {k: shaped_like(v, old[k], k) for k, v in dynamic.items()}
        further = {"value": value, "value_fn": value_fn, **(extra_args or {})}
        params, opt_state, dynamic = optimizer.apply_if_finite(
            self.tx, grads, self.params, self.opt_state, finite, further, new, old
        )
        return self.replace(
            step=self.step + 1,
            skipped=self.skipped + (1 - finite.astype(jnp.int32)),
            params=params,
            opt_state=opt_state,
            **dynamic,
            **static,
        )


def cast_params(params: Params, policies: Policies) -> Params:
    """Casts each floating parameter to the param dtype of the policy that governs its module.

        params = mpjax.cast_params(restored, "p=f32,c=bf16,o=f32")

    Args:
      params: parameters whose key paths spell the paths of their modules, as Flax's do.
      policies: a policy string, a policy, a dict from pattern to policy, or a `PolicyMap`.
    """
    stored = leaf_dtypes(params, as_policy_map(policies), "param_dtype")
    return casting.cast_to_dtypes(params, tuple(dtype for _, _, dtype in stored))


def check_params(params: Params, policies: PolicyMap, *, only_narrower: bool = False) -> None:
    """Raises if a parameter is not stored in the param dtype of its policy, as after a wrong restore.

    Args:
      params: the parameters.
      policies: the map that governs them.
      only_narrower: let those pass that have more bits than the policy stores.

    Raises:
      ValueError: listing the first such parameters and the ways out.
    """
    check_stored(
        [
            (path, leaf.dtype, dtype)
            for path, leaf, dtype in leaf_dtypes(params, policies, "param_dtype")
            if dtype is not None
            and casting.castable(leaf)
            and not (only_narrower and leaf.dtype.itemsize > dtype.itemsize)
        ],
        policies,
    )


def check_stored(found: list[tuple[str, np.dtype, np.dtype]], policies: PolicyMap) -> None:
    """Raises if dtypes differ from those that the policies ask for.

    Args:
      found: path, dtype and wanted dtype of each parameter.
      policies: the map that wants them.

    Raises:
      ValueError: listing the first such parameters and the ways out.
    """
    wrong = [
        f"'{path}' is {dtype}, its policy stores {wanted}" for path, dtype, wanted in found if dtype != wanted
    ]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ValueError(
            f"Parameters disagree with the policy '{policies}': {'; '.join(wrong[:3])}{more}. If they were "
            "restored from a run under another policy, train under that one; or cast them, with "
            "mpjax.cast_params(params, policy), and make the state anew with TrainState.create."
        )


def shaped_like(new: PyTree, old: PyTree, field: str) -> PyTree:
    """`new` in the containers and dtypes of `old`."""
    paths = [
        [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
        for tree in (new, old)
    ]
    if paths[0] != paths[1]:
        missing, extra = sorted(set(paths[1]) - set(paths[0])), sorted(set(paths[0]) - set(paths[1]))
        raise ValueError(
            f"The new {field} has another structure than the state's: missing {missing[:3]}, unexpected "
            f"{extra[:3]}. Return it whole, or create the state with {field}=… of the same structure."
        )
    rebuilt = jax.tree.unflatten(jax.tree.structure(old), jax.tree.leaves(new))
    return casting.cast_to_dtypes(rebuilt, casting.dtypes_of(old))


def _is_node(state: TrainState, field: str) -> bool:
    fields = {f.name: f for f in dataclasses.fields(state)}
    return field in fields and fields[field].metadata.get("pytree_node", True)


def _without_aliases(state: T) -> T:
    """Copies arrays that occur twice (some optimizers keep the parameters): a buffer is donated only once."""
    seen: set[int] = set()

    def copy_if_seen(x: Leaf) -> Leaf:
        if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):
            return x
        if id(x) in seen:
            return jnp.copy(x)
        seen.add(id(x))
        return x

    return jax.tree.map(copy_if_seen, state)
