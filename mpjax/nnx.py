"""flax.nnx under policies: models, gradients, and an optimizer that knows the loss scale.

What makes modules follow a policy is in nnx_modules.py.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from mpjax._frameworks.nnx import apply_policy as apply_policy
from mpjax._frameworks.nnx import policies_of as policies_of
from mpjax._frameworks.nnx import stored_dtypes
from mpjax._training import cross_device, gradients
from mpjax._training.loss_scale import as_loss_scale, check_loss_scale, loss_scale_for
from mpjax._training.state_sharding import placed
from mpjax._training.train_state import apply_if_finite, check_stored

M = TypeVar("M", bound=nnx.Module)


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
        # Refuses masters that something, such as `nnx.update` with cast values, has overwritten.
        check_stored(stored_dtypes(model), policies)
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
        loss = cross_device.combine_metrics(loss, axis_name)
        new_rest = cross_device.average_state(new_rest, rest, axis_name)
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
        new_params, new_opt_state, _ = apply_if_finite(
            self.tx, grads, params, nnx.as_pure(self.opt_state), finite, **kwargs
        )
        nnx.update(model, new_params)
        nnx.update(self.opt_state, nnx.state(new_opt_state))
        nnx.update(self._loss_scale, nnx.state(self.loss_scale.adjust(finite)))
        self.step[...] += 1
        self.skipped[...] += 1 - finite.astype(jnp.int32)
        return finite


def _kept_if(finite: jax.Array, new: nnx.State, old: nnx.State) -> nnx.State:
    """The model's new state, or its old one; random streams move on in either case."""
    before = dict(nnx.to_flat_state(old))

    def kept(path: Any, leaf: Any) -> Any:
        if path not in before or isinstance(leaf, nnx.RngState):
            return leaf
        # Variables are pytrees; a leaf may also be a bare array.
        return gradients.select_tree(finite, leaf, before[path])

    return nnx.from_flat_state([(path, kept(path, leaf)) for path, leaf in nnx.to_flat_state(new)])
