"""A value that a rule widened is known by what it was widened from, and that shows nowhere but in its own program."""

import gc
import re
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from programs import trace

import mpjax
from mpjax._precision import rules

BF16 = "p=f32,c=bf16,o=f32"
X, W = jnp.ones((4, 6)), jnp.ones((6, 6))


def block(x, w):
    """Sums, exponentials and casts between matmuls: values are widened and narrowed again all along."""
    y = jax.nn.softmax(lax.dot(lax.dot(x, w).astype(jnp.float32), w))
    y = (y - jnp.mean(y.astype(jnp.float32), -1, keepdims=True)) * lax.rsqrt(
        jnp.var(y, -1, keepdims=True) + 1e-6
    )
    y = lax.scan(lambda c, _: (jnp.cumsum(c @ w, 0).astype(c.dtype), jax.nn.gelu(c @ w)), y, None, length=2)[
        1
    ][0]
    return jnp.sum(jax.vmap(lambda r: jax.nn.logsumexp(r @ w))(y).astype(jnp.float32))


def program(fn=block) -> str:
    """The program of a training step's gradient, traced anew."""
    jax.clear_caches()
    text = str(jax.make_jaxpr(jax.grad(mpjax.autocast(jax.checkpoint(fn), BF16), argnums=(0, 1)))(X, W))
    return re.sub(r"0x[0-9a-f]+", "", text)


@pytest.fixture(scope="module")
def expected() -> str:
    return program()


def test_a_matmul_takes_what_was_widened_and_not_a_cast_of_the_widened_value():
    fn = mpjax.autocast(lambda x, w: lax.dot(lax.dot(x, w).astype(jnp.float32), w), BF16)
    first, second = (e for e in trace(fn, X, W) if e.primitive.name == "dot_general")
    assert second.invars[0] is first.outvars[0]


def test_nothing_is_remembered_after_a_program_was_traced():
    program()
    gc.collect()
    assert not rules._widened_from


def test_the_program_does_not_depend_on_what_was_traced_before(expected):
    kept = []

    def other(x, w):
        kept.append(lax.dot(x, w).astype(jnp.float32))  # a value that outlives its program
        return jnp.sum(jnp.exp(kept[-1]))

    def broken(x, w):
        y = lax.dot(x, w).astype(jnp.float32)
        raise ValueError(y)  # an exception holds on to the values of the frames that it passed

    program(other)
    with pytest.raises(ValueError, match="float32") as held:
        program(broken)
    assert rules._widened_from
    assert program() == expected
    del held


def test_the_program_does_not_depend_on_the_garbage_collector(expected):
    def collected(x, w):
        gc.collect()
        y = jax.nn.softmax(x @ w)
        gc.collect()
        return y

    gc.disable()
    try:
        assert program() == expected
        without = program(lambda x, w: jnp.sum(jax.nn.softmax(x @ w) @ w))
    finally:
        gc.enable()
    assert program(lambda x, w: jnp.sum(collected(x, w) @ w)) == without
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        assert program() == expected
    finally:
        gc.set_threshold(*threshold)


def test_the_program_does_not_depend_on_other_threads(expected):
    found = []
    threads = [threading.Thread(target=lambda: found.extend(program() for _ in range(3))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 12


def test_a_value_at_the_address_of_one_that_is_gone_is_not_taken_for_it():
    value, gone = jnp.ones(2), jnp.zeros(2)
    rules._widened_from[id(value)] = (weakref.ref(gone), jnp.zeros(2, jnp.bfloat16))
    try:
        assert rules._was(value, np.dtype(jnp.bfloat16)) is None
        assert rules._cast(value, np.dtype(jnp.bfloat16)).tolist() == [1.0, 1.0]
    finally:
        del rules._widened_from[id(value)]
