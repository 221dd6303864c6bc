"""JAX's standard promotion, for what cannot run under the strict one that the whole suite runs under."""

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
    optax.MultiSteps.update = standard(optax.MultiSteps.update)  # a class of its own
    optax.apply_updates = standard(optax.apply_updates)
