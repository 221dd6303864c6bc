"""Optimizers of optax, whose own arithmetic mixes dtypes and ranks, for tests that run under strict promotion."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import jax
import optax

Args = ParamSpec("Args")
T = TypeVar("T")


@contextlib.contextmanager
def standard_promotion() -> Iterator[None]:
    """JAX's promotion of dtypes and ranks as users have it unless they ask for another."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def standard(f: Callable[Args, T]) -> Callable[Args, T]:
    @functools.wraps(f)
    def run(*args: Args.args, **kwargs: Args.kwargs) -> T:
        with standard_promotion():
            return f(*args, **kwargs)

    return run


def use_standard_promotion_in_optax() -> None:
    """Has optax's own optimizers, those made from here on, and `optax.apply_updates` compute under standard promotion.

    An optimizer of mpjax or of a test is not optax's: what it does itself stays under strict promotion.
    """
    new = optax.GradientTransformation.__new__

    def wrapped(cls: type, init: Callable, update: Callable) -> optax.GradientTransformation:
        return new(cls, *(standard(f) if f.__module__.startswith("optax.") else f for f in (init, update)))

    optax.GradientTransformation.__new__ = wrapped
    optax.apply_updates = standard(optax.apply_updates)


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
