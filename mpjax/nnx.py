"""flax.nnx under policies: models, gradients, and an optimizer that knows the loss scale.

What makes modules follow a policy is in _frameworks/nnx.py.
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
from mpjax._training import optimizer
from mpjax._training.finite import all_finite, select_tree, to_float32
from mpjax._training.gradients import check_floating, gradient_fn, split_loss, unscale
from mpjax._training.loss_scale import LossScale, as_loss_scale, check_loss_scale, loss_scale_for
from mpjax._training.reduction import Reduction
from mpjax._training.state_sharding import placed
from mpjax._training.train_state import check_stored
from mpjax._training.types import AxisName, Finite, KeyPath, Leaf, LossFn

M = TypeVar("M", bound=nnx.Module)


def value_and_grad(
    loss_fn: LossFn,
    *,
    has_aux: bool = False,
    wrt: nnx.filterlib.Filter = nnx.Param,
    axis_name: AxisName | None = None,
    reduce_dtype: str = "float32",
) -> Callable[..., tuple[Any, nnx.State, Finite]]:
    """`mpjax.value_and_grad` for loss functions of an nnx model under policies.

        loss, grads, finite = mpjax.nnx.value_and_grad(loss_fn)(optimizer.loss_scale, model, batch)

    Args:
      loss_fn: `(model, *args) -> loss`, or `(loss, aux)` with `has_aux`; the loss is a float32 scalar.
      has_aux: whether it returns auxiliary results.
      wrt: which variables to differentiate with respect to.
      axis_name: as of `mpjax.value_and_grad`; the model's state is averaged too.
      reduce_dtype: as of `mpjax.value_and_grad`.

    Returns:
      A function of `(loss_scale, model, *args)` that returns `(value, grads, finite)`; see
      `mpjax.value_and_grad`. What the model changed in itself (batch statistics) takes effect only if the gradients
      are finite, but its random streams advance in either case.

    Raises:
      ValueError: if `reduce_dtype` is another; when called, if the model carries no policy or a parameter is not
        stored as it says.
    """
    reduction = Reduction(axis_name, reduce_dtype)

    @functools.wraps(loss_fn)
    def value_and_grad_fn(
        loss_scale: LossScale, model: nnx.Module, *args: Any
    ) -> tuple[Any, nnx.State, Finite]:
        policies = policies_of(model)
        if policies is None:
            raise ValueError(
                f"{type(model).__name__} carries no policy; pass mpjax.nnx.apply_policy(model, policies)."
            )
        # Refuses masters that something, such as `nnx.update` with cast values, has overwritten.
        check_stored(stored_dtypes(model), policies)
        graphdef, params, rest = nnx.split(model, wrt, ...)  # type: ignore[misc]
        check_floating(params, "the model")

        def pipeline_loss(params: nnx.State, rest: nnx.State, *args: Any) -> Any:
            merged = nnx.merge(graphdef, params, rest, copy=True)
            loss, aux = split_loss(loss_fn(merged, *args), has_aux)
            _, _, new_rest = nnx.split(merged, wrt, ...)  # type: ignore[misc]
            return loss, (new_rest, {}, aux)

        functools.update_wrapper(pipeline_loss, loss_fn, updated=())
        out = gradient_fn(pipeline_loss, policies, reduction)(as_loss_scale(loss_scale), params, rest, *args)
        nnx.update(model, _new_if(out.finite, out.model_state, rest))
        return ((out.loss, out.aux) if has_aux else out.loss), out.grads, out.finite

    return value_and_grad_fn


class Optimizer(nnx.Optimizer[M]):
    """`flax.nnx.Optimizer` that unscales gradients, skips steps that are not finite and adjusts its scale.

    With `jax.grad` or `nnx.grad` of a loss that `scale` has scaled:

        grads = nnx.grad(lambda model: optimizer.scale(loss_fn(model, batch)))(model)
        finite = optimizer.update(model, grads)

    or with `mpjax.nnx.value_and_grad`, which also keeps the backward pass under the policy:

        loss, grads, finite = mpjax.nnx.value_and_grad(loss_fn)(optimizer.loss_scale, model, batch)
        optimizer.apply_gradients(model, grads, finite)

    An optax transformation that asks for the loss gets it by name: `optimizer.update(model, grads, value=loss)`, with
    the unscaled loss, and `value_fn=…`, a function of the parameters alone, for one that evaluates the loss itself.

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
        loss_scale: LossScale | None = None,
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
        check_floating(nnx.state(model, wrt), "the model")
        if loss_scale is None:
            loss_scale = loss_scale_for(policies_of(model) or "float32")
        loss_scale = as_loss_scale(loss_scale)
        check_loss_scale(loss_scale)
        in_float32 = optax.GradientTransformationExtraArgs(
            lambda params: tx.init(to_float32(params)), optimizer.update_fn(tx)
        )
        super().__init__(model, in_float32, wrt=wrt)
        self.skipped = nnx.OptState(jnp.zeros([], jnp.int32))
        self._loss_scale = nnx.data(jax.tree.map(lambda x: nnx.OptState(jnp.asarray(x)), loss_scale))
        nnx.update(self, placed(nnx.state(self), nnx.state(model, wrt)))

    @property
    def loss_scale(self) -> LossScale:
        """The loss scale as a pure value."""
        return nnx.as_pure(self._loss_scale)

    def scale(self, loss: jax.Array) -> jax.Array:
        """The loss times the current scale."""
        return self.loss_scale.scale(loss)

    def update(self, model: M, grads: nnx.State, /, **kwargs: Any) -> Finite:  # type: ignore[override]
        """Takes a step with the gradients of the scaled loss.

        Args:
          model: the model to update.
          grads: what `nnx.grad` returned for the loss times `scale`.
          **kwargs: what the optax transformation asks for by name, such as `value`, the unscaled loss. The
            gradients it gets as `grad`.

        Returns:
          Whether the gradients were finite and so the step was taken, shape [] and dtype bool.
        """
        grads = unscale(self.loss_scale, grads)
        return self.apply_gradients(model, grads, all_finite(grads), **kwargs)

    def apply_gradients(self, model: M, grads: nnx.State, finite: Finite, **kwargs: Any) -> Finite:
        """Takes a step with unscaled gradients, if `finite`, and adjusts the loss scale.

        Args:
          model: the model to update.
          grads: what `mpjax.nnx.value_and_grad` returned.
          finite: likewise.
          **kwargs: what the optax transformation asks for by name, such as `value`, the unscaled loss. The
            gradients it gets as `grad`.

        Returns:
          Whether the step was taken: `finite`, and for a transformation that asks for the loss whether that is
          finite too.

        Raises:
          TypeError: if the transformation asks for an argument that it was not given.
        """
        grads = to_float32(nnx.as_pure(nnx.state(grads, self.wrt)))
        params = nnx.as_pure(nnx.state(model, self.wrt))
        if kwargs.get("value") is not None:
            finite = optimizer.is_finite_for(self.tx, finite, kwargs["value"])
        new_params, new_opt_state, _ = optimizer.apply_if_finite(
            self.tx, grads, params, nnx.as_pure(self.opt_state), finite, kwargs
        )
        nnx.update(model, new_params)
        nnx.update(self.opt_state, nnx.state(new_opt_state))
        nnx.update(self._loss_scale, nnx.state(self.loss_scale.adjust(finite)))
        self.step[...] += 1
        self.skipped[...] += 1 - finite.astype(jnp.int32)
        return finite


def _new_if(finite: Finite, new: nnx.State, old: nnx.State) -> nnx.State:
    """The model's new state, or its old one; random streams advance in either case."""
    before = dict(nnx.to_flat_state(old))

    def chosen(path: KeyPath, leaf: Leaf) -> Leaf:
        if path not in before or isinstance(leaf, nnx.RngState):
            return leaf
        # Variables are pytrees; a leaf may also be a bare array.
        return select_tree(finite, leaf, before[path])

    return nnx.from_flat_state([(path, chosen(path, leaf)) for path, leaf in nnx.to_flat_state(new)])
