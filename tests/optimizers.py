"""Optimizers of optax."""

import jax
import optax

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
