"""How many multiplications and additions the audit counts, and how many steps of a loop."""

import operator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import mpjax


def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def flops(fn: Any, *args: Any) -> int:
    return mpjax.audit(fn, *args).total_flops


# ----------------------------------------------------------------------------------------- convolutions


def convolution(padding: Any = "SAME", strides: Any = (1, 1), **options: Any) -> Any:
    options["dimension_numbers"] = ("NHWC", "HWIO", "NHWC")
    return lambda x, kernel: lax.conv_general_dilated(x, kernel, strides, padding, **options)


X, KERNEL = array(2, 9, 11, 6), array(3, 5, 6, 7)


@pytest.mark.parametrize(
    ("fn", "x", "kernel"),
    [
        (convolution(), array(8, 4, 4, 16), array(3, 3, 16, 16)),
        (convolution("VALID"), X, KERNEL),
        (convolution(strides=(2, 3)), X, KERNEL),
        (convolution(rhs_dilation=(2, 3)), X, KERNEL),
        (convolution([(1, 2), (2, 2)], lhs_dilation=(2, 2)), X, KERNEL),
        (convolution([(-1, 2), (6, -2)], rhs_dilation=(2, 3)), X, KERNEL),
        (convolution(feature_group_count=6), X, array(3, 3, 1, 12)),
        (convolution(batch_group_count=2), X, array(3, 3, 6, 8)),
        (lambda x, k: lax.conv_transpose(x, k, (2, 2), "SAME"), X, KERNEL),
        (jax.grad(lambda x, k: convolution("VALID")(x, k).sum(), 0), X, KERNEL),
        (jax.grad(lambda x, k: convolution("VALID")(x, k).sum(), 1), X, KERNEL),
        (jax.grad(lambda x, k: convolution(strides=(2, 2))(x, k).sum(), (0, 1)), X, KERNEL),
    ],
    ids=[
        "same",
        "valid",
        "strided",
        "dilated kernel",
        "dilated input",
        "negative padding",
        "feature groups",
        "batch groups",
        "transposed",
        "gradient of the input",
        "gradient of the kernel",
        "gradients of a strided one",
    ],
)
def test_flops_of_convolutions_are_xlas_within_a_percent(fn, x, kernel):
    analysis = jax.jit(fn).lower(x, kernel).compile().cost_analysis()
    assert flops(fn, x, kernel) == pytest.approx(analysis["flops"], rel=0.01)


def test_the_gradient_of_a_long_convolution_is_counted_in_closed_form():
    def loss(x, kernel):
        return lax.conv(x, kernel, (2,), "VALID").sum()

    outputs = (10**9 - 3) // 2 + 1
    counted = flops(jax.grad(loss, 1), array(1, 1, 10**9), array(1, 1, 3))
    assert counted == 2 * outputs * 3


# --------------------------------------------------------------------------------------- ragged matmuls


@pytest.mark.parametrize("n", [8, 16, 32])
def test_a_ragged_matmul_and_its_two_gradients_count_alike(n):
    def loss(a, b, sizes):
        return jnp.sum(lax.ragged_dot(a, b, sizes) ** 2)

    args = (array(64, 16), array(4, 16, n), array(4, dtype=jnp.int32))
    once = 2 * 64 * 16 * n
    assert flops(lax.ragged_dot, *args) == once
    assert flops(jax.grad(loss, (0, 1)), *args) == 3 * once


# ------------------------------------------------------------------------------------------------- loops


@pytest.mark.parametrize(
    ("start", "cond", "advance", "steps"),
    [
        (0, lambda i: i < 5, lambda i: i + 1, 5),
        (0, lambda i: i < 50, lambda i: i + 2, 25),
        (0, lambda i: i < 50, lambda i: 4 + i, 13),
        (0, lambda i: i <= 9, lambda i: i + 1, 10),
        (10, lambda i: i > 0, lambda i: i - 3, 4),
        (10, lambda i: i >= -2, lambda i: i - 3, 5),
        (-1, lambda i: operator.gt(50, i), lambda i: i + 3, 17),
        (5, lambda i: i < 0, lambda i: i + 1, 0),
    ],
)
def test_a_loop_that_counts_in_constant_steps_counts_each(start, cond, advance, steps):
    def f(x, w):
        return lax.while_loop(lambda c: cond(c[0]), lambda c: (advance(c[0]), c[1] @ w), (start, x))

    assert flops(f, array(4, 4), array(4, 4)) == steps * 128


@pytest.mark.parametrize(
    ("start", "cond", "advance"),
    [
        (0.0, lambda i: i < 50, lambda i: i + 2),
        (1, lambda i: i < 50, lambda i: i * 2),
        (0, lambda i: i < 50, lambda i: i + i),
        (5, lambda i: i < 10, lambda i: i - 1),
        (0, lambda i: i != 50, lambda i: i + 1),
        (0, lambda i: (i < 50) & (i > -1), lambda i: i + 1),
    ],
    ids=["float", "multiplied", "doubled", "away from the limit", "unequal", "two conditions"],
)
def test_any_other_loop_counts_once(start, cond, advance):
    def f(x, w):
        return lax.while_loop(lambda c: cond(c[0]), lambda c: (advance(c[0]), c[1] @ w), (start, x))

    assert flops(f, array(4, 4), array(4, 4)) == 128


def test_a_loop_up_to_a_constant_that_it_carries_counts_its_steps():
    def f(x, w):
        return lax.while_loop(
            lambda c: c[0] < c[1], lambda c: (c[0] + 1, c[1], c[2] @ w), (jnp.int32(0), jnp.int32(6), x)
        )

    assert flops(f, array(4, 4), array(4, 4)) == 6 * 128


def test_a_sum_of_few_steps_is_no_finding_whatever_the_counter_counts_to():
    def f(x):
        return lax.while_loop(lambda c: c[0] < 1000, lambda c: (c[0] + 4, c[1] + x), (0, jnp.zeros_like(x)))

    assert not mpjax.audit(f, array(4, dtype=jnp.bfloat16)).findings
