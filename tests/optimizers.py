"""Optimizers of optax."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import optax
import optax.contrib

EVERY = {
    "adam": lambda: optax.adam(1e-2),
    "adamw": lambda: optax.adamw(1e-2, weight_decay=0.0),
    "rmsprop": lambda: optax.rmsprop(1e-2),
    "adabelief": lambda: optax.adabelief(1e-2),
    "amsgrad": lambda: optax.amsgrad(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=2),
    "novograd": lambda: optax.novograd(1e-2),
    "adan": lambda: optax.adan(1e-2, weight_decay=0.0),
}


def keeps_params() -> optax.GradientTransformation:
    """An optimizer whose state holds the parameters themselves, as some of optax's do."""
    return optax.GradientTransformation(
        lambda params: {"kept": params, "again": params},
        lambda updates, state, params=None: (jax.tree.map(lambda g: -g, updates), state),
    )


def _adam() -> optax.GradientTransformation:
    return optax.adam(1e-2)


def _after_sgd(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """A line search needs a direction in which the loss decreases."""
    return optax.chain(optax.sgd(0.5), tx)


def _norm(updates: Any, *args: Any, **kwargs: Any) -> jax.Array:
    return optax.tree.norm(updates)


def _muon_dimensions(params: Any) -> Any:
    return jax.tree.map(lambda x: optax.contrib.MuonDimensionNumbers(), params)


def _mask(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim == 2, params)


def _labels(params: Any) -> Any:
    return jax.tree.map(lambda x: "matrix" if x.ndim == 2 else "vector", params)


# How each function of optax that returns a gradient transformation is made, where its name and a learning rate are not
# enough.
ARGUMENTS: dict[str, Callable[[Callable[..., Any]], Any]] = {
    "optax.MultiSteps": lambda f: f(_adam(), every_k_schedule=2),
    "optax.adaptive_grad_clip": lambda f: f(0.1),
    "optax.add_noise": lambda f: f(eta=0.1, gamma=0.5, key=0),
    "optax.apply_if_finite": lambda f: f(_adam(), max_consecutive_errors=2),
    "optax.chain": lambda f: f(optax.clip_by_global_norm(1.0), _adam()),
    "optax.clip": lambda f: f(0.1),
    "optax.clip_by_block_rms": lambda f: f(0.1),
    "optax.clip_by_global_norm": lambda f: f(0.1),
    "optax.conditionally_mask": lambda f: f(_adam(), lambda step: step % 2 == 0),
    "optax.conditionally_transform": lambda f: f(_adam(), lambda step: step % 2 == 0),
    "optax.ema": lambda f: f(0.9),
    "optax.flatten": lambda f: f(_adam()),
    "optax.freeze": lambda f: optax.chain(_adam(), f(_mask)),
    "optax.inject_hyperparams": lambda f: f(optax.polyak_sgd)(max_learning_rate=0.5),
    "optax.lookahead": lambda f: f(_adam(), sync_period=2, slow_step_size=0.5),
    "optax.masked": lambda f: f(_adam(), _mask),
    "optax.multi_transform": lambda f: f({"matrix": _adam(), "vector": optax.polyak_sgd()}, _labels),
    "optax.named_chain": lambda f: f(("clip", optax.clip(0.1)), ("polyak", optax.polyak_sgd())),
    "optax.noisy_sgd": lambda f: f(0.1, key=0),
    "optax.partition": lambda f: f({"matrix": _adam(), "vector": optax.sgd(0.1)}, _labels),
    "optax.scale": lambda f: f(-0.1),
    "optax.scale_by_backtracking_linesearch": lambda f: _after_sgd(f(10, store_grad=True)),
    "optax.scale_by_learning_rate": lambda f: f(optax.linear_schedule(0.1, 0.0, 10)),
    "optax.scale_by_schedule": lambda f: f(optax.linear_schedule(-0.1, 0.0, 10)),
    "optax.scale_by_zoom_linesearch": lambda f: _after_sgd(f(10)),
    "optax.selective_transform": lambda f: f(_adam(), freeze_mask=_mask),
    "optax.snapshot": lambda f: f("norm", _norm),
    "optax.stateless": lambda f: f(lambda updates, params: jax.tree.map(lambda g: -0.1 * g, updates)),
    "optax.stateless_with_tree_map": lambda f: f(lambda g, p: -0.1 * g),
    "optax.trace": lambda f: f(0.9),
    "optax.with_extra_args_support": lambda f: f(_adam()),
    "optax.contrib.mechanize": lambda f: f(optax.adam(1e-1)),
    "optax.contrib.sam": lambda f: f(optax.sgd(0.1), optax.sgd(0.01), sync_period=2),
    "optax.contrib.scale_by_muon": lambda f: optax.masked(
        f(weight_dimension_numbers=lambda params: _muon_dimensions(params)), _mask
    ),
    "optax.contrib.schedule_free": lambda f: f(optax.sgd(0.1), learning_rate=0.1),
    "optax.contrib.split_real_and_imaginary": lambda f: f(_adam()),
}

# What is no optimizer for a training step, and why.
NO_ROW = {
    "optax.WrappedSchedule": "a schedule that counts, not a transformation",
    "optax.inject_stateful_hyperparams": "optax has deprecated it for inject_hyperparams",
    "optax.measure_with_ema": "a measure for optax.monitor, not an optimizer",
    "optax.monitor": "its state has another structure after the first update; see its own test",
    "optax.optimistic_adam": "optax has deprecated it for optimistic_adam_v2",
    **dict.fromkeys(
        (
            *("optax.matrix_inverse_pth_root", "optax.sigmoid_binary_cross_entropy"),
            *("optax.update_infinity_moment", "optax.update_moment", "optax.update_moment_per_elem_norm"),
            "optax.contrib.schedule_free_eval_params",
        ),
        "a function of arrays, which does not say what it returns",
    ),
    "optax.contrib.differentially_private_aggregate": "takes the gradients of single examples",
    "optax.contrib.dpsgd": "takes the gradients of single examples",
}


def transformations() -> dict[str, Callable[..., Any]]:
    """Every public function (or class) of the installed optax that makes a gradient transformation, by its name.

    Those that do not say what they return count too, so that none is forgotten.
    """
    found = {}
    for module in (optax, optax.contrib):
        for name, f in vars(module).items():
            if not name.startswith("_") and callable(f) and _makes_a_transformation(f):
                found[f"{module.__name__}.{name}"] = f
    return found


def _makes_a_transformation(f: Callable[..., Any]) -> bool:
    if inspect.isclass(f):
        methods = all(callable(getattr(f, name, None)) for name in ("init", "update"))
        return methods and not issubclass(f, tuple)  # which the two types of a transformation are
    if not inspect.isfunction(f):
        return False  # the name of a type
    returned = inspect.signature(f).return_annotation
    return returned is inspect.Signature.empty or "GradientTransformation" in str(returned)


def make(name: str) -> Any:
    """A transformation of optax by its name."""
    f = transformations()[name]
    if name in ARGUMENTS:
        return ARGUMENTS[name](f)
    takes_rate = "learning_rate" in inspect.signature(f).parameters
    return f(learning_rate=1e-2) if takes_rate else f()
