"""Measures what precision costs and saves: bytes, gradients that become zero, updates that are lost."""

from collections.abc import Callable

import chex
import jax
import jax.extend
import jax.numpy as jnp

import mpjax
from experiments.tasks import Task


def tree_bytes(tree: chex.ArrayTree) -> int:
    """Bytes of the arrays in a pytree."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def tree_size(tree: chex.ArrayTree) -> int:
    """Number of entries of the arrays in a pytree."""
    return sum(x.size for x in jax.tree.leaves(tree))


def activation_bytes(task: Task, state: mpjax.TrainState, batch: chex.ArrayTree, rng: jax.Array) -> int:
    """Bytes that the forward pass of a task saves for the backward pass.

    Args:
      task: model and data.
      state: decides on shapes and dtypes; nothing is computed.
      batch: what one forward pass takes.
      rng: a key.
    """

    def loss(params: chex.ArrayTree, *args: chex.ArrayTree) -> chex.Array:
        return task.loss(params, *args)[0]

    under_policy = mpjax.autocast(loss, task.policies)
    return saved_bytes(under_policy, state.params, state.model_state, batch, rng)


def saved_bytes(loss: Callable[..., jax.Array], params: chex.ArrayTree, *args: chex.ArrayTree) -> int:
    """Bytes that the forward pass saves for the backward pass.

    They are counted on the traced program: everything that `jax.vjp` saves, except
    its inputs (parameters, model state and the batch). What XLA recomputes instead of saving is counted too.

    Args:
      loss: `(params, *args) -> loss`.
      params: what to differentiate with respect to.
      *args: further arguments.
    """

    def saved(params: chex.ArrayTree, *args: chex.ArrayTree) -> list[chex.Array]:
        _, backward = jax.vjp(lambda p: loss(p, *args), params)
        return jax.tree.leaves(backward)

    jaxpr = jax.make_jaxpr(saved)(params, *args).jaxpr
    given = {id(v) for v in (*jaxpr.invars, *jaxpr.constvars)}
    found = {
        id(v): v.aval
        for v in jaxpr.outvars
        if not isinstance(v, jax.extend.core.Literal) and id(v) not in given
    }
    return sum(a.size * a.dtype.itemsize for a in found.values())


def sizes(task: Task, state: mpjax.TrainState, accumulate_steps: int, rng: jax.Array) -> dict[str, int]:
    """Parameter count, and bytes of parameters, optimizer state and a microbatch's activations."""
    batch = jax.tree.map(lambda x: x[: len(x) // accumulate_steps], task.batch(0, 0))
    return {
        "parameters": tree_size(state.params),
        "param_bytes": tree_bytes(state.params),
        "optimizer_bytes": tree_bytes(state.opt_state),
        "activation_bytes": activation_bytes(task, state, batch, rng),
    }


Gradients = Callable[[chex.ArrayTree, chex.ArrayTree | None, chex.ArrayTree, chex.PRNGKey], chex.ArrayTree]


def float32_gradients(task: Task) -> Gradients:
    """A jitted function of `(params, model_state, batch, rng)` that returns gradients.

    Args:
      task: runs in float32.
    """
    grad_fn = mpjax.value_and_grad(task.loss, task.policies, has_aux=True)
    return jax.jit(lambda *args: grad_fn(mpjax.NoOpLossScale(), *args)[1])


class LossProbe:
    """Measures, on a state in training, what a precision loses against float32."""

    def __init__(self, task: Task, exact: Gradients) -> None:
        """Prepares to measure.

        Args:
          task: runs under the precision in question.
          exact: of `float32_gradients`, for the same model.
        """
        self._exact = exact
        self._grad_fn = mpjax.value_and_grad(task.loss, task.policies, has_aux=True)
        self._measure = jax.jit(self._shares)

    def __call__(self, state: mpjax.TrainState, batch: chex.ArrayTree, rng: jax.Array) -> dict[str, float]:
        """Shares, from 0 to 1.

        Returns:
          `zeroed`: of the gradient entries that are not zero in float32, those that are here.
          `lost`: of the entries whose update is not zero in float32, those whose value is
          unchanged when parameter plus update is stored in the parameter's dtype.
        """
        exact = self._exact(*mpjax.cast_to_full((state.params, state.model_state)), batch, rng)
        return {k: float(v) for k, v in self._measure(state, exact, batch, rng).items()}

    def _shares(
        self, state: mpjax.TrainState, exact: chex.ArrayTree, batch: chex.ArrayTree, rng: jax.Array
    ) -> dict[str, jax.Array]:
        model = (state.params, state.model_state)
        grads = self._grad_fn(state.loss_scale, *model, batch, rng)[1]
        zeroed = jax.tree.map(lambda e, g: (e != 0) & (g == 0), exact, grads)
        params, opt_state = mpjax.cast_to_full((state.params, state.opt_state))
        updates, _ = state.tx.update(exact, opt_state, params)
        lost = jax.tree.map(
            lambda stored, p, u: (u != 0) & ((p + u).astype(stored.dtype) == stored),
            state.params,
            params,
            updates,
        )
        return {"zeroed": _count(zeroed) / _nonzero(exact), "lost": _count(lost) / _nonzero(updates)}


def _count(tree: chex.ArrayTree) -> jax.Array:
    return sum((jnp.sum(x) for x in jax.tree.leaves(tree)), start=jnp.zeros([], int))


def _nonzero(tree: chex.ArrayTree) -> jax.Array:
    return jnp.maximum(1, _count(jax.tree.map(lambda x: x != 0, tree)))
