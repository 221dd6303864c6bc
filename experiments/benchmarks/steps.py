"""One training step of a problem, as each library's documentation writes it.

A step is `(carry, batch) -> (carry, metrics)`, to be jitted with its carry donated. mpjax's metrics hold the loss
and the norm of the gradients; the others report the loss alone.
"""

import dataclasses
import functools
import importlib.util
from collections.abc import Callable
from typing import TypeAlias

import chex
import jax
import jax.numpy as jnp
import jmp
import optax
from flax.training import train_state
from flax.training.dynamic_scale import DynamicScale
from jax import lax

import mpjax
from experiments.benchmarks.problems import Loss, Problem

Carry: TypeAlias = chex.ArrayTree
Step = Callable[[Carry, chex.ArrayTree], tuple[Carry, chex.ArrayTree]]
Updated = tuple[optax.Params, optax.OptState]

NAMES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
SCALE = 2.0**15


@dataclasses.dataclass(frozen=True)
class Contender:
    """A step to be measured.

    Attributes:
      name: what tables and pictures call it.
      carry: a function that makes what the first step starts from.
      step: the step.
      loss: the loss that it differentiates, under its policy; for counting what the forward pass saves.
    """

    name: str
    carry: Callable[[], Carry]
    step: Step
    loss: Loss | None = None


def mpjax_step(problem: Problem, dtype: str, name: str = "mpjax") -> Contender:
    """mpjax: a policy and a train step; the model names no dtype."""
    policy = f"p=f32,c={NAMES[dtype]},o=f32"
    loss = problem.loss(None)

    def loss_fn(
        params: chex.ArrayTree, model_state: chex.ArrayTree, batch: chex.ArrayTree, rng: chex.PRNGKey
    ) -> tuple[jax.Array, chex.ArrayTree]:
        value, model_state = loss(params, model_state, batch)
        return value, (model_state, {})

    step = mpjax.make_train_step(loss_fn, has_model_state=True)

    def carry() -> Carry:
        return mpjax.TrainState.create(
            apply_fn=None,
            params=_copy(problem.params),
            tx=problem.tx,
            policy=policy,
            loss_scale=mpjax.DynamicLossScale(SCALE) if dtype == "float16" else None,
            model_state=_copy(problem.model_state),
        )

    return Contender(name, carry, step, mpjax.autocast(loss, policy))


def unscaled(problem: Problem, loss: Loss, name: str) -> Contender:
    """Plain JAX without a loss scale and without a check of the gradients."""

    def step(carry: Carry, batch: chex.ArrayTree) -> tuple[Carry, jax.Array]:
        params, opt_state, model_state = carry
        (value, model_state), grads = jax.value_and_grad(loss, has_aux=True)(params, model_state, batch)
        updates, opt_state = problem.tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, model_state), value

    return Contender(name, functools.partial(_start, problem), step, loss)


def dynamic_by_hand(problem: Problem, loss: Loss, name: str = "hand-written") -> Contender:
    """Plain JAX with a dynamic loss scale and a skip by `lax.cond`: the best hand-written step that we know."""

    def step(carry: Carry, batch: chex.ArrayTree) -> tuple[Carry, jax.Array]:
        (params, opt_state, model_state), (scale, streak) = carry

        def scaled(params: chex.ArrayTree) -> tuple[jax.Array, chex.ArrayTree]:
            value, new = loss(params, model_state, batch)
            return value * scale, (value, new)

        grads, (value, new_model_state) = jax.grad(scaled, has_aux=True)(params)
        grads = jax.tree.map(lambda g: g / scale, grads)
        finite = jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]).all()

        def apply(grads: optax.Updates, params: optax.Params, opt_state: optax.OptState) -> Updated:
            updates, opt_state = problem.tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        def skip(grads: optax.Updates, params: optax.Params, opt_state: optax.OptState) -> Updated:
            return params, opt_state

        params, opt_state = lax.cond(finite, apply, skip, grads, params, opt_state)
        model_state = jax.tree.map(functools.partial(jnp.where, finite), new_model_state, model_state)
        streak = jnp.where(finite, streak + 1, 0)
        scale = jnp.where(finite, jnp.where(streak % 2000 == 0, scale * 2, scale), jnp.maximum(1, scale / 2))
        return ((params, opt_state, model_state), (scale, streak)), value

    def carry() -> Carry:
        return _start(problem), (jnp.float32(SCALE), jnp.int32(0))

    return Contender(name, carry, step, loss)


def jmp_step(problem: Problem, dtype: str, name: str = "jmp") -> Contender:
    """jmp, as its README trains: cast the tree, scale, unscale, and select every leaf."""
    policy = jmp.get_policy(f"params=float32,compute={dtype},output=float32")
    plain = problem.loss(None)
    scaling = jmp.DynamicLossScale(jnp.float32(SCALE)) if dtype == "float16" else jmp.NoOpLossScale()
    numbers, structure = jax.tree.flatten(
        scaling
    )  # the class insists on arrays, so it cannot be lowered itself

    def loss(
        params: chex.ArrayTree, model_state: chex.ArrayTree, batch: chex.ArrayTree
    ) -> tuple[jax.Array, chex.ArrayTree]:
        params, batch = policy.cast_to_compute((params, batch))
        value, new = plain(params, model_state, batch)
        return policy.cast_to_output(value), policy.cast_to_param(new)

    def step(carry: Carry, batch: chex.ArrayTree) -> tuple[Carry, jax.Array]:
        (params, opt_state, model_state), numbers = carry
        loss_scale = jax.tree.unflatten(structure, numbers)

        def scaled(params: chex.ArrayTree) -> tuple[jax.Array, chex.ArrayTree]:
            value, new = loss(params, model_state, batch)
            return loss_scale.scale(value), (value, new)

        grads, (value, new_model_state) = jax.grad(scaled, has_aux=True)(params)
        grads = loss_scale.unscale(policy.cast_to_param(grads))
        updates, new_opt_state = problem.tx.update(grads, opt_state, params)
        new = (optax.apply_updates(params, updates), new_opt_state, new_model_state)
        if dtype == "float16":
            finite = jmp.all_finite(grads)
            loss_scale = loss_scale.adjust(finite)
            new = jmp.select_tree(finite, new, (params, opt_state, model_state))
        return (new, jax.tree.leaves(loss_scale)), value

    def carry() -> Carry:
        return _start(problem), [jnp.asarray(x, jnp.result_type(x)) for x in numbers]

    return Contender(name, carry, step, loss)


def flax_step(problem: Problem, dtype: str, name: str = "Flax") -> Contender:
    """Flax, as its examples train: a dtype on every layer, `DynamicScale`, and a select of every leaf."""
    loss = problem.loss(jnp.dtype(dtype))
    if dtype != "float16":
        return unscaled(problem, loss, name)

    def step(carry: Carry, batch: chex.ArrayTree) -> tuple[Carry, jax.Array]:
        state, model_state, dynamic_scale = carry
        grad_fn = dynamic_scale.value_and_grad(lambda params: loss(params, model_state, batch), has_aux=True)
        dynamic_scale, finite, (value, new_model_state), grads = grad_fn(state.params)
        new = state.apply_gradients(grads=grads)
        select = functools.partial(jnp.where, finite)
        new = new.replace(
            opt_state=jax.tree.map(select, new.opt_state, state.opt_state),
            params=jax.tree.map(select, new.params, state.params),
        )
        return (new, jax.tree.map(select, new_model_state, model_state), dynamic_scale), value

    def carry() -> Carry:
        params, _, model_state = _start(problem)
        state = train_state.TrainState.create(apply_fn=None, params=params, tx=problem.tx)  # type: ignore[arg-type]
        scale = DynamicScale(fin_steps=jnp.int32(0), scale=jnp.float32(SCALE))  # type: ignore[arg-type]
        return state.replace(step=jnp.int32(0)), model_state, scale

    return Contender(name, carry, step, loss)


def has_mpx() -> bool:
    """Whether mixed-precision-for-JAX is installed."""
    return importlib.util.find_spec("mpx") is not None


def mpx_step(problem: Problem, name: str = "mpx") -> Contender:
    """mixed-precision-for-JAX in float16, as its README trains; the problem has no model state."""
    import equinox as eqx
    import mpx

    plain = problem.loss(None)
    scaling = mpx.DynamicLossScaling(jnp.float32(SCALE), jnp.ones((), jnp.float32), counter=jnp.int32(0))
    numbers, static = eqx.partition(scaling, eqx.is_array)  # as `eqx.filter_jit` does

    def loss(params: chex.ArrayTree, batch: chex.ArrayTree) -> jax.Array:
        return plain(params, {}, batch)[0]

    def step(carry: Carry, batch: chex.ArrayTree) -> tuple[Carry, jax.Array]:
        params, opt_state, numbers = carry
        grad_fn = mpx.filter_value_and_grad(loss, eqx.combine(numbers, static))
        value, scaling, finite, grads = grad_fn(params, batch)
        params, opt_state = mpx.optimizer_update(params, problem.tx, opt_state, grads, finite)
        return (params, opt_state, eqx.filter(scaling, eqx.is_array)), value

    def carry() -> Carry:
        params, opt_state, _ = _start(problem)
        return params, opt_state, _copy(numbers)

    return Contender(name, carry, step)


def _start(problem: Problem) -> Carry:
    params = _copy(problem.params)
    return params, problem.tx.init(params), _copy(problem.model_state)


def _copy(tree: chex.ArrayTree) -> chex.ArrayTree:
    """A copy, as a step takes its carry's buffers; the other contenders start from the same numbers."""
    return jax.tree.map(lambda x: x if isinstance(x, jax.ShapeDtypeStruct) else jnp.copy(x), tree)
