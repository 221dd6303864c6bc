"""The rules per operation: which dtypes each primitive takes and returns under a policy."""

import functools
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from programs import PRODUCTS, exported_products, operand_dtypes, trace

import mpjax
from mpjax import autocast, full_precision
from mpjax._precision import ops, rules

BF16 = "p=f32,c=bf16,o=f32"
F16 = "p=f32,c=f16,o=f32"
NO_SCALE = mpjax.NoOpLossScale()
POLICIES = pytest.mark.parametrize(("policy", "half"), [(BF16, "bfloat16"), (F16, "float16")])


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


X, W = normal(4, 6), normal(6, 5, seed=1)


def matmuls(fn: Callable[..., Any], *args: Any) -> set[tuple[str, str]]:
    return set(operand_dtypes(fn, *args))


def in_out(fn: Callable[..., Any], *args: Any, name: str) -> list[tuple[tuple[str, ...], str]]:
    """Floating operand dtypes and result dtype of every operation called `name`."""
    return [
        (
            tuple(v.aval.dtype.name for v in eqn.invars if jnp.issubdtype(v.aval.dtype, jnp.floating)),
            eqn.outvars[0].aval.dtype.name,
        )
        for eqn in trace(fn, *args)
        if eqn.primitive.name == name
    ]


def loss_and_grads(fn: Callable[..., Any], policy: Any, n: int) -> Callable[..., Any]:
    """Value and gradients with respect to the first n arguments, the backward pass inside the policy."""
    grad_fn = mpjax.value_and_grad(lambda *args: jnp.sum(fn(*args)), policy, argnums=tuple(range(n)))
    return functools.partial(grad_fn, NO_SCALE)


def grads_outside(fn: Callable[..., Any], policy: Any, n: int) -> Callable[..., Any]:
    """Gradients with respect to the first n arguments, taken of the autocast function from outside."""
    return jax.grad(lambda *args: jnp.sum(autocast(fn, policy)(*args)), argnums=tuple(range(n)))


def assert_near(actual: Any, expected: Any, fraction: float = 0.03) -> None:
    """Equal up to a share of the largest entry, as half precision rounds relative to what it adds up."""
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
        np.testing.assert_allclose(a, e, rtol=0, atol=fraction * np.abs(e).max())


# ---------------------------------------------------------------------------------- without a policy


def test_importing_mpjax_changes_no_program_that_runs_without_a_policy() -> None:
    script = """
        import jax, jax.numpy as jnp
        from jax import lax

        def f(x, w):
            y = jax.nn.softmax(x @ w) + jnp.var(x) + lax.rsqrt(1 + x @ w)
            y = lax.scan(lambda c, _: (jnp.tanh(c @ w), jnp.cumsum(c)), y, None, length=2)[0]
            return (jnp.zeros_like(y).at[0].add(y[1]) ** 2).mean()

        def programs():
            jax.clear_caches()
            x = jnp.ones((3, 3))
            traced = jax.jit(jax.grad(jax.checkpoint(f), argnums=(0, 1))).trace(x, x)
            yield str(traced.jaxpr)
            yield traced.lower().as_text()
            x = x.astype(jnp.bfloat16)
            yield str(jax.make_jaxpr(lambda x, w: jax.nn.softmax(x @ w) * lax.rsqrt(x))(x, x))

        before = list(programs())
        import mpjax
        after = list(programs())
        assert len(before) == 3 and before == after
        mpjax.autocast(jax.jit(f), "p=f32,c=bf16,o=f32")(jnp.ones((3, 3)), jnp.eye(3))
        assert before == list(programs())
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)


def test_a_float32_policy_gives_the_very_bits_of_the_plain_function() -> None:
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.nn.softmax(x @ w) + jnp.var(jnp.exp(x @ w), axis=-1, keepdims=True)

    np.testing.assert_array_equal(jax.jit(autocast(fn, "float32"))(X, W), jax.jit(fn)(X, W))


# ------------------------------------------------------------------------------------- the compute rule


@POLICIES
def test_matmuls_have_operands_and_results_of_the_compute_dtype(policy: str, half: str) -> None:
    assert in_out(autocast(lambda x, w: x @ w, policy), X, W, name="dot_general") == [((half, half), half)]


@POLICIES
def test_the_matmuls_of_the_backward_pass_take_the_compute_dtype_too(policy: str, half: str) -> None:
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w)

    for grads in (loss_and_grads(fn, policy, 2), grads_outside(fn, policy, 2)):
        assert operand_dtypes(grads, X, W) == [(half, half)] * 3


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, w: jnp.einsum("ij,jk->ki", x, w),
        lambda x, w: jnp.einsum("ij,jk,lk,lm->im", x, w, w, w),
        lambda x, w: jnp.tensordot(x, w, 1),
        lambda x, w: jnp.vdot(x[0], w[:, 0]),
        lambda x, w: jnp.inner(x, w.T),
        lambda x, w: jnp.linalg.multi_dot([x, w, w.T, w]),
        lambda x, w: jnp.linalg.matrix_power(w @ w.T, 3),
        lambda x, w: lax.dot(x, w),
        lambda x, w: jax.vmap(lambda r: r @ w)(x),
        lambda x, w: jax.nn.dot_product_attention(*[jnp.reshape(x, (2, 4, 1, 3))] * 3),
        lambda x, w: jax.nn.one_hot(jnp.array([0, 3, 5]), 6) @ w,
    ],
)
def test_every_way_to_write_a_matmul_follows_the_policy(fn: Callable[..., Any]) -> None:
    assert matmuls(grads_outside(fn, BF16, 2), X, W) == {("bfloat16", "bfloat16")}
    assert jax.eval_shape(autocast(fn, BF16), X, W).dtype == jnp.float32


IMAGES = normal(2, 8, 8, 4)
KERNEL, GROUPED = normal(3, 3, 4, 6, seed=1), normal(3, 3, 2, 6, seed=1)


@pytest.mark.parametrize(
    ("kernel", "options"),
    [
        (KERNEL, {"window_strides": (1, 1), "padding": "SAME"}),
        (KERNEL, {"window_strides": (2, 2), "padding": "VALID"}),
        (KERNEL, {"window_strides": (1, 1), "padding": "SAME", "rhs_dilation": (2, 2)}),
        (KERNEL, {"window_strides": (1, 1), "padding": ((2, 2), (2, 2)), "lhs_dilation": (2, 2)}),
        (GROUPED, {"window_strides": (1, 1), "padding": "SAME", "feature_group_count": 2}),
        (KERNEL, {"window_strides": (1, 1), "padding": "SAME", "preferred_element_type": jnp.float32}),
    ],
    ids=["plain", "strided", "dilated", "transposed", "grouped", "preferred_element_type"],
)
def test_convolutions_take_the_compute_dtype_forward_and_backward(kernel: jax.Array, options: Any) -> None:
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(x, w, dimension_numbers=("NHWC", "HWIO", "NHWC"), **options) ** 2

    grads = grads_outside(fn, BF16, 2)
    assert operand_dtypes(grads, IMAGES, kernel) == [("bfloat16", "bfloat16")] * 3
    assert_near(jax.jit(autocast(fn, BF16))(IMAGES, kernel), jax.jit(fn)(IMAGES, kernel))


def test_ragged_matmuls_take_the_compute_dtype_forward_and_backward() -> None:
    sizes = jnp.array([1, 3], jnp.int32)
    grads = grads_outside(lambda x, w: lax.ragged_dot(x, w, sizes), BF16, 2)
    assert matmuls(grads, X, normal(2, 6, 5)) == {("bfloat16", "bfloat16")}
    assert [g.dtype for g in jax.eval_shape(grads, X, normal(2, 6, 5))] == [jnp.float32] * 2


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_the_stablehlo_for_accelerators_has_only_16_bit_matmuls(platform: str) -> None:
    def fn(x: jax.Array, w: jax.Array, image: jax.Array, kernel: jax.Array) -> jax.Array:
        y = jnp.einsum("ij,jk->ik", x, w)
        return jnp.sum(jnp.sin(y)) + jnp.sum(lax.conv(image, kernel, (1, 1), "SAME") ** 2)

    args = X, W, normal(1, 2, 4, 4), normal(3, 2, 3, 3)
    for grads in (loss_and_grads(fn, BF16, 4), grads_outside(fn, BF16, 4)):
        assert exported_products(grads, *args, platform=platform) == [("bf16", "bf16")] * 6
    plain = jax.grad(fn, argnums=(0, 1, 2, 3))
    assert set(exported_products(plain, *args, platform=platform)) == {("f32", "f32")}


def wide(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.dot_general(x, w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)


@POLICIES
def test_a_result_asked_to_be_wider_than_its_operands_keeps_its_width(policy: str, half: str) -> None:
    fn = autocast(wide, policy)
    narrow = X.astype(half), W.astype(half)
    assert in_out(fn, *narrow, name="dot_general") == [((half, half), "float32")]


@POLICIES
@pytest.mark.parametrize("around", [lambda f: f, jax.jit, jax.checkpoint], ids=["bare", "jit", "remat"])
def test_the_backward_matmuls_of_a_wide_result_take_16_bit_operands(
    policy: str, half: str, around: Any
) -> None:
    for grads in (loss_and_grads(around(wide), policy, 2), grads_outside(around(wide), policy, 2)):
        assert matmuls(grads, X.astype(half), W.astype(half)) == {(half, half)}
        exported = exported_products(grads, X.astype(half), W.astype(half), platform="tpu")
        assert len(exported) >= 2  # the forward matmul, which a sum does not need, may be gone
        assert set(exported) == {({"bfloat16": "bf16", "float16": "f16"}[half],) * 2}


@POLICIES
def test_float32_operands_ask_for_no_width_by_asking_for_float32(policy: str, half: str) -> None:
    assert in_out(autocast(wide, policy), X, W, name="dot_general") == [((half, half), half)]


def test_a_matmul_that_contracts_nothing_is_left_alone() -> None:
    def outer(positions: jax.Array, frequencies: jax.Array) -> jax.Array:
        return jnp.einsum("i,j->ij", positions, frequencies) + positions[:, None] @ frequencies[None, :]

    fn = autocast(outer, BF16)
    positions, frequencies = jnp.arange(2048.0), jnp.linspace(0.1, 1, 8)
    assert "bfloat16" not in str(jax.make_jaxpr(fn)(positions, frequencies))
    assert fn(positions, jnp.ones(8))[2047, 0] == 4094.0


def test_a_matmul_at_highest_precision_is_left_alone_and_so_are_its_gradients() -> None:
    fn = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)
    assert operand_dtypes(grads_outside(fn, BF16, 2), X, W) == [("float32", "float32")] * 3


def test_a_matmul_with_an_explicit_algorithm_is_left_alone() -> None:
    fn = functools.partial(jnp.matmul, precision=lax.DotAlgorithmPreset.F32_F32_F32)
    assert matmuls(autocast(fn, BF16), X, W) == {("float32", "float32")}


@pytest.mark.parametrize("precision", [None, "default", "high"])
def test_any_other_precision_follows_the_policy(precision: Any) -> None:
    fn = functools.partial(jnp.matmul, precision=precision)
    assert matmuls(autocast(fn, BF16), X, W) == {("bfloat16", "bfloat16")}


def test_operands_of_two_dtypes_meet_in_the_compute_dtype() -> None:
    assert matmuls(autocast(lax.dot, BF16), X.astype(jnp.float16), W) == {("bfloat16", "bfloat16")}


def test_integer_matmuls_stay_exact() -> None:
    a, b = jnp.array([[32001, 2909]]), jnp.array([[1], [3]])
    assert autocast(jnp.matmul, BF16)(a, b).tolist() == [[32001 + 3 * 2909]]


def test_complex_and_float64_matmuls_are_never_touched() -> None:
    assert autocast(jnp.matmul, BF16)(X + 1j, W).dtype == jnp.complex64
    with jax.enable_x64(True):
        x = np.ones((2, 3), np.float64)
        assert autocast(lambda x: x @ x.T, BF16)(x).dtype == jnp.float64
        assert operand_dtypes(autocast(lambda x: x @ x.T, BF16), x) == [("float64", "float64")]


def test_eight_bit_operands_keep_their_format() -> None:
    x, w = X.astype(jnp.float8_e4m3fn), W.astype(jnp.float8_e4m3fn)
    dot = functools.partial(lax.dot, preferred_element_type=jnp.float32)
    assert in_out(autocast(dot, BF16), x, w, name="dot_general") == [
        (("float8_e4m3fn", "float8_e4m3fn"), "float32")
    ]


def test_empty_arrays_pass_through_every_rule() -> None:
    def fn(x: jax.Array) -> jax.Array:
        return jnp.exp(x @ x.T).sum() + jnp.zeros(3, x.dtype).at[jnp.zeros(0, int)].add(x[:, 0]).sum()

    assert autocast(fn, BF16)(jnp.ones((0, 2), jnp.bfloat16)) == 0.0


# ------------------------------------------------------------------------------------- float32 inside

HALF_INPUTS = jnp.linspace(0.1, 0.9, 12, dtype=jnp.bfloat16).reshape(3, 4)
FLOAT32_INSIDE: dict[str, Callable[[Any], Any]] = {
    "exp": jnp.exp,
    "exp2": jnp.exp2,
    "expm1": jnp.expm1,
    "log": jnp.log,
    "log1p": jnp.log1p,
    "pow": lambda x: lax.pow(x, x),
    "rsqrt": lax.rsqrt,
    "erf_inv": jax.scipy.special.erfinv,
    "lgamma": jax.scipy.special.gammaln,
    "digamma": jax.scipy.special.digamma,
    "reduce_sum": lambda x: lax.reduce(x, np.zeros((), x.dtype), lax.add, (0,)),
    "reduce_prod": lambda x: jnp.prod(x, 0),
    "cumsum": lambda x: lax.cumsum(x),
    "cumprod": lambda x: lax.cumprod(x),
    "cumlogsumexp": lambda x: lax.cumlogsumexp(x),
    "reduce_window_sum": lambda x: lax.reduce_window(
        x, np.zeros((), x.dtype), lax.add, (2, 2), (1, 1), "VALID"
    ),
}


def test_each_operation_of_the_table_that_runs_in_float32_inside_is_tried() -> None:
    in_float32 = {rules.float32_rule, rules.float32_elementwise_rule}
    assert set(FLOAT32_INSIDE) == {row.name for row in ops.TABLE if row.rule in in_float32}


@pytest.mark.parametrize("name", FLOAT32_INSIDE)
def test_16_bit_operands_of_sums_and_exponentials_run_in_float32(name: str) -> None:
    found = in_out(autocast(FLOAT32_INSIDE[name], "bf16"), HALF_INPUTS, name=name)
    assert found
    assert all(set(operands) == {"float32"} and result == "float32" for operands, result in found)


@pytest.mark.parametrize("name", FLOAT32_INSIDE)
def test_what_ran_in_float32_is_returned_in_the_dtype_of_the_operands(name: str) -> None:
    fn = FLOAT32_INSIDE[name]
    assert autocast(lambda x: jax.eval_shape(fn, x).dtype, BF16)(HALF_INPUTS) == jnp.bfloat16
    found, expected = jax.jit(lambda x: (autocast(fn, BF16)(x), fn(x.astype(jnp.float32))))(HALF_INPUTS)
    assert_near(found, expected, 0.01)


@pytest.mark.parametrize("name", sorted(set(FLOAT32_INSIDE) - {"reduce_window_sum"}))
def test_derivatives_through_float32_inside_keep_the_dtype_of_the_input(name: str) -> None:
    def fn(x: jax.Array) -> jax.Array:
        return jnp.sum(FLOAT32_INSIDE[name](x).astype(jnp.float32))

    found, expected = jax.jit(
        lambda x: (jax.grad(autocast(fn, "bf16"))(x), jax.grad(fn)(x.astype(jnp.float32)))
    )(HALF_INPUTS)
    assert found.dtype == jnp.bfloat16
    assert_near(found, expected, 0.02)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: jax.nn.softmax(x),
        lambda x: jax.nn.log_softmax(x),
        lambda x: jax.nn.logsumexp(x, axis=-1),
        lambda x: jnp.max(x, axis=-1),
        lambda x: jnp.sort(x, axis=-1),
        lambda x: jnp.var(x, axis=-1),
        lambda x: jnp.linalg.norm(x, axis=-1),
        lambda x: jax.nn.gelu(x),
        lambda x: jax.nn.silu(x),
        lambda x: jax.nn.softplus(x),
        lambda x: lax.associative_scan(jnp.add, x),
        lambda x: jnp.cumprod(x, axis=0),
        lambda x: x**2.5,
    ],
)
def test_jax_own_derivatives_run_on_16_bit_values_in_every_mode(fn: Callable[[Any], Any]) -> None:
    def total(x: jax.Array) -> jax.Array:
        return jnp.sum(fn(x.astype(jnp.float16)).astype(jnp.float32) ** 2)

    @jax.jit
    def in_every_mode(x: jax.Array) -> Any:
        expected = jax.grad(lambda x: jnp.sum(fn(x) ** 2))(x)
        outside, inside = jax.grad(autocast(total, F16)), autocast(jax.grad(total), F16)
        batched = autocast(jax.vmap(jax.grad(total)), F16)
        forward = jax.jacfwd(autocast(total, F16))
        return expected, (outside(x), inside(x), batched(x[None])[0], forward(x))

    expected, found = in_every_mode(jnp.abs(normal(3, 4)) + 0.1)
    assert_near(found, (expected,) * 4)


def test_scatter_add_runs_in_float32_and_keeps_the_dtype_of_its_buffer() -> None:
    def fn(x: jax.Array) -> jax.Array:
        return jnp.zeros(2, x.dtype).at[jnp.zeros(1000, int)].add(x)

    ones = jnp.ones(1000, jnp.bfloat16)
    assert in_out(autocast(fn, "bf16"), ones, name="scatter-add") == [(("float32", "float32"), "float32")]
    out = autocast(fn, "bf16")(ones)
    assert (out.dtype, out.tolist()) == (jnp.bfloat16, [1000.0, 0.0])


def test_segment_sums_do_not_stop_at_256() -> None:
    fn = autocast(lambda x: jax.ops.segment_sum(x, jnp.zeros(1000, int), 1), "bf16")
    assert fn(jnp.ones(1000, jnp.bfloat16)).tolist() == [1000.0]


def test_float32_operands_of_sums_stay_float32_under_a_half_policy() -> None:
    found = {v.aval.dtype.name for e in trace(autocast(jax.nn.softmax, F16), X) for v in e.outvars}
    assert found <= {"float32", "bool"}


def test_the_mean_of_131072_ones_is_one_and_its_gradient_2_to_the_minus_17() -> None:
    ones = jnp.ones(131072, jnp.float16)
    assert autocast(jnp.mean, "f16")(ones) == 1.0
    grad = jax.grad(autocast(lambda x: jnp.mean(x).astype(jnp.float32), "f16"))(ones)
    assert (grad.dtype, grad[0]) == (jnp.float16, 2.0**-17)


# ---------------------------------------------------------------------------------- float32 outside

SQUARE = normal(4, 4) @ normal(4, 4).T + 4 * jnp.eye(4)
DECOMPOSITIONS: dict[str, Callable[[Any], Any]] = {
    "cholesky": jnp.linalg.cholesky,
    "qr": lambda a: jnp.linalg.qr(a)[1],
    "eigh": lambda a: jnp.linalg.eigh(a)[0],
    "svd": lambda a: jnp.linalg.svd(a, compute_uv=False),
    "inv": jnp.linalg.inv,
    "slogdet": lambda a: jnp.linalg.slogdet(a)[1],
    "solve": lambda a: jnp.linalg.solve(a, jnp.ones(4, a.dtype)),
    "triangular_solve": lambda a: jax.scipy.linalg.solve_triangular(a, jnp.ones(4, a.dtype), lower=True),
    "fft": lambda a: jnp.abs(jnp.fft.fft2(a)),
}


@pytest.mark.parametrize("name", DECOMPOSITIONS)
def test_decompositions_and_their_gradients_run_in_float32(name: str) -> None:
    fn = DECOMPOSITIONS[name]
    run = mpjax.value_and_grad(lambda a: jnp.sum(fn(a)), BF16)
    plain = jax.value_and_grad(lambda a: jnp.sum(fn(a)))
    (value, grad, _), expected = jax.jit(lambda a: (run(NO_SCALE, a), plain(a)))(SQUARE)
    if name in ("inv", "slogdet", "solve"):  # their JAX rules are made of matmuls, too
        assert_near((value, grad), expected, 0.03)
    else:
        assert_near((value, grad), expected, 1e-5)


@pytest.mark.parametrize("name", DECOMPOSITIONS)
def test_decompositions_take_16_bit_operands(name: str) -> None:
    fn = DECOMPOSITIONS[name]
    narrow = SQUARE.astype(jnp.bfloat16)
    out, expected = jax.jit(lambda a: (autocast(fn, BF16)(a), fn(a.astype(jnp.float32))))(narrow)
    assert_near(out, expected, 0.02)
    grad = jax.eval_shape(jax.grad(lambda a: jnp.sum(autocast(fn, BF16)(a))), narrow)
    assert grad.dtype == jnp.bfloat16


# ------------------------------------------------------------------ promotion, buffers, constants, masks


def half_matmul(x: jax.Array) -> jax.Array:
    """A matmul whose result is in the compute dtype, as `lax` returns it."""
    return lax.dot(x, x)


EYE = jnp.eye(4)


def dtype_inside(fn: Callable[..., Any], policy: str = BF16) -> Any:
    return autocast(lambda x: jax.eval_shape(fn, x).dtype, policy)(EYE)


def test_python_numbers_leave_a_16_bit_value_as_it_is() -> None:
    assert dtype_inside(half_matmul) == jnp.bfloat16
    assert dtype_inside(lambda x: 2.0 * half_matmul(x) / 3 + 1) == jnp.bfloat16


def test_mixing_with_float32_promotes_as_jax_does() -> None:
    assert dtype_inside(lambda x: half_matmul(x) + x) == jnp.float32
    assert dtype_inside(lambda x: half_matmul(x) * np.float32(2)) == jnp.float32


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: lax.add(half_matmul(x), x),
        lambda x: lax.mul(x, half_matmul(x)),
        lambda x: lax.max(half_matmul(x), x),
        lambda x: lax.select(x > 0, half_matmul(x), x),
        lambda x: lax.clamp(x - 1, half_matmul(x), x + 1),
        lambda x: lax.concatenate([half_matmul(x), x], 0),
        lambda x: lax.gt(half_matmul(x), x).astype(jnp.float32),
        lambda x: lax.pad(half_matmul(x), jnp.float32(0), ((1, 0, 0), (0, 0, 0))),
        lambda x: lax.dot(half_matmul(x), x),
        lambda x: lax.reduce(half_matmul(x), jnp.float32(0), lax.add, (0,)),
        lambda x: lax.reduce_window(half_matmul(x), np.float32(0), lax.add, (2, 2), (1, 1), "VALID"),
        lambda x: lax.reduce_window(half_matmul(x), -np.inf, lax.max, (2, 2), (1, 1), "VALID"),
        lambda x: lax.cond(x[0, 0] > 0, lambda: half_matmul(x), lambda: half_matmul(x.T)),
    ],
)
def test_lax_operations_written_for_one_dtype_still_run(fn: Callable[[Any], Any]) -> None:
    assert_near(autocast(fn, BF16)(EYE), fn(EYE))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: lax.dynamic_update_slice(jnp.zeros((4, 4)), half_matmul(x), (0, 0)),
        lambda x: lax.dynamic_update_index_in_dim(jnp.zeros((4, 4)), half_matmul(x)[1], 1, 0),
        lambda x: jnp.zeros((4, 4)).at[1].set(half_matmul(x)[1]),
        lambda x: jnp.zeros((4, 4)).at[1].add(half_matmul(x)[1]),
        lambda x: lax.fori_loop(0, 4, lambda i, b: b.at[i].set(half_matmul(x)[i]), jnp.zeros((4, 4))),
    ],
)
def test_a_buffer_keeps_its_dtype_whatever_is_written_to_it(fn: Callable[[Any], Any]) -> None:
    assert dtype_inside(fn, "bf16") == jnp.float32
    assert_near(autocast(fn, BF16)(EYE), fn(EYE))


def test_a_mutable_array_keeps_its_dtype() -> None:
    def fn(x: jax.Array) -> jax.Array:
        ref = jax.new_ref(jnp.zeros((4, 4)))
        ref[...] = half_matmul(x)
        ref[...] += half_matmul(x)
        return ref[...]

    assert dtype_inside(fn, "bf16") == jnp.float32
    np.testing.assert_array_equal(jax.jit(autocast(fn, BF16))(EYE), 2 * EYE)


MASKED: dict[str, Callable[[Any, Any], Any]] = {
    "where": lambda logits, mask: jnp.where(mask, logits, -1e9),
    "added": lambda logits, mask: logits + jnp.where(mask, 0.0, -1e9),
    "added twice": lambda logits, mask: logits + jnp.where(mask, 0.0, -1e9) + jnp.where(mask, 0.0, -1e9),
    "multiplied": lambda logits, mask: logits + (1 - mask) * -1e9,
    "finfo": lambda logits, mask: jnp.where(mask, logits, jnp.finfo(logits.dtype).min),
}


@pytest.mark.parametrize("how", MASKED)
@pytest.mark.parametrize("policy", ["f16", F16])
def test_a_row_that_is_masked_throughout_attends_evenly_and_is_never_nan(how: str, policy: str) -> None:
    def attend(logits: jax.Array, mask: jax.Array) -> jax.Array:
        logits = lax.dot(logits, jnp.eye(4, dtype=logits.dtype))
        return jax.nn.softmax(MASKED[how](logits, mask)).astype(jnp.float32)

    mask = jnp.array([[False] * 4, [True, True, False, False]])
    logits = jnp.zeros((2, 4))
    out, vjp = jax.jit(lambda x: jax.vjp(lambda x: autocast(attend, policy)(x, mask), x))(logits)
    assert out.tolist() == [[0.25] * 4, [0.5, 0.5, 0.0, 0.0]]
    assert jnp.all(jnp.isfinite(vjp(out)[0]))


def test_a_constant_that_fits_costs_the_program_nothing() -> None:
    def names(constant: float) -> list[str]:
        fn = autocast(lambda x: half_matmul(x) * 0.5 + constant, "f16")
        return [eqn.primitive.name for eqn in trace(fn, EYE)]

    assert "mpjax_saturate" not in names(-6e4)
    assert "mpjax_saturate" in names(-1e9)


def test_an_infinity_that_the_user_wrote_stays_one() -> None:
    fn = autocast(lambda x: jnp.where(x > 0, half_matmul(x), -jnp.inf), "f16")
    assert fn(EYE)[0].tolist() == [1.0, -jnp.inf, -jnp.inf, -jnp.inf]


def test_an_overflow_of_computed_values_is_not_hidden() -> None:
    assert autocast(lambda x: half_matmul(x * 300) * 2, "f16")(EYE)[0, 0] == jnp.inf
    assert autocast(lambda x: (x * 1e6).astype(jnp.float16), F16)(EYE)[0, 0] == jnp.inf


@pytest.mark.parametrize("policy", [F16, BF16, "float32"])
def test_the_cross_entropy_of_a_confident_prediction_keeps_its_digits(policy: str) -> None:
    def loss(logits: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(logits[None], jnp.array([0])).mean()

    logits = jnp.array([10.0, 0, 0, 0])
    value, grad, _ = jax.jit(mpjax.value_and_grad(loss, policy))(NO_SCALE, logits)
    np.testing.assert_allclose(value, 1.3625e-4, rtol=1e-3)
    np.testing.assert_allclose(grad[0], -1.3625622e-4, rtol=1e-4)


def test_full_precision_keeps_the_digits_of_a_loss_of_16_bit_logits() -> None:
    @full_precision
    def loss(logits: jax.Array) -> jax.Array:
        return -jax.nn.log_softmax(logits)[0]

    value, grad = jax.jit(autocast(jax.value_and_grad(loss), "f16"))(jnp.array([10.0, 0, 0, 0], jnp.float16))
    np.testing.assert_allclose(value, 1.3625e-4, rtol=1e-3)
    np.testing.assert_allclose(grad[0].astype(jnp.float32), -1.3625e-4, rtol=1e-3)


# ------------------------------------------------------------------------------- repeated use of a weight


@POLICIES
@pytest.mark.parametrize("around", [lambda f: f, jax.checkpoint, jax.jit], ids=["bare", "remat", "jit"])
def test_a_closed_over_weight_used_1000_times_in_scan_has_gradient_1000(
    policy: str, half: str, around: Any
) -> None:
    def loss(w: jax.Array) -> jax.Array:
        body = around(lambda x: jnp.ones((1, 2), x.dtype) @ w)
        return lax.scan(lambda c, x: (c + jnp.sum(body(x).astype(jnp.float32)), None), 0.0, jnp.ones(1000))[0]

    _, grad, _ = jax.jit(mpjax.value_and_grad(loss, policy))(NO_SCALE, jnp.ones((2, 1)))
    assert (grad.dtype, grad.tolist()) == (jnp.float32, [[1000.0], [1000.0]])
    assert matmuls(mpjax.value_and_grad(loss, policy), NO_SCALE, jnp.ones((2, 1))) == {(half, half)}


@POLICIES
def test_an_embedding_row_looked_up_1000_times_has_gradient_1000(policy: str, half: str) -> None:
    def loss(table: jax.Array) -> jax.Array:
        return jnp.sum(table[jnp.zeros(1000, int)].astype(half).astype(jnp.float32))

    _, grad, _ = jax.jit(mpjax.value_and_grad(loss, policy))(NO_SCALE, jnp.ones((3, 2)))
    assert grad.tolist() == [[1000.0, 1000.0], [0.0, 0.0], [0.0, 0.0]]


@POLICIES
def test_a_table_that_embeds_and_projects_adds_up_both_gradients_in_float32(policy: str, half: str) -> None:
    def loss(table: jax.Array) -> jax.Array:
        return jnp.sum(table[jnp.zeros(1000, int)] @ table.T)

    _, grad, _ = jax.jit(mpjax.value_and_grad(loss, policy))(NO_SCALE, jnp.ones((4, 2)))
    # 1000 positions times the 4 rows of the head, and 1000 of the projection; bfloat16 has no 5000.
    assert grad[:, 0].tolist() == [5000.0, 1000.0, 1000.0, 1000.0]


# ----------------------------------------------------------------------------------- transformations


@jax.custom_vjp
def custom_matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    return x @ w


custom_matmul.defvjp(lambda x, w: (x @ w, (x, w)), lambda res, g: (g @ res[1].T, res[0].T @ g))


@jax.custom_jvp
def custom_sine(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.sin(x @ w)


@custom_sine.defjvp
def _(primals: Any, tangents: Any) -> Any:
    (x, w), (dx, dw) = primals, tangents
    return jnp.sin(x @ w), jnp.cos(x @ w) * (dx @ w + x @ dw)


AROUND: dict[str, Callable[[Any], Any]] = {
    "bare": lambda f: f,
    "jit": lambda f: jax.jit(jax.jit(f)),
    "remat": jax.checkpoint,
    "remat that saves matmuls": functools.partial(
        jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable
    ),
    "vmap": lambda f: lambda x, w: jax.vmap(f, (0, None))(x[None], w)[0],
    "scan": lambda f: lambda x, w: lax.scan(lambda c, x: (c, f(x, w)), 0.0, x[None])[1][0],
    "cond": lambda f: lambda x, w: lax.cond(x[0, 0] > -9, f, lambda x, w: f(-x, w), x, w),
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "matmul": lambda x, w: jnp.sin(x @ w),
    "custom_vjp": custom_matmul,
    "custom_jvp": custom_sine,
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_transformations_inside_and_outside_keep_forward_and_backward_in_the_policy(
    function: str, around: str
) -> None:
    fn, wrap = FUNCTIONS[function], AROUND[around]
    for grads in (
        loss_and_grads(wrap(fn), BF16, 2),
        jax.grad(lambda x, w: jnp.sum(wrap(autocast(fn, BF16))(x, w)), argnums=(0, 1)),
    ):
        found = operand_dtypes(grads, X, W)
        assert len(found) >= 3
        assert set(found) == {("bfloat16", "bfloat16")}
    assert [g.dtype for g in jax.eval_shape(grads, X, W)] == [jnp.float32, jnp.float32]


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_full_precision_stays_float32_in_the_backward_pass_of_a_half_policy(
    function: str, around: str
) -> None:
    fn = AROUND[around](full_precision(FUNCTIONS[function]))
    for grads in (loss_and_grads(fn, BF16, 2), grads_outside(fn, BF16, 2)):
        found = operand_dtypes(grads, X, W)
        assert len(found) >= 3
        assert set(found) == {("float32", "float32")}


def test_full_precision_around_scan_jit_and_remat_stays_float32() -> None:
    @full_precision
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        body = jax.checkpoint(jax.jit(lambda c: jnp.tanh(c @ w)))
        return lax.scan(lambda c, _: (body(c), None), x, None, length=2)[0]

    grads = loss_and_grads(lambda x, w: fn(x @ w, w), BF16, 2)
    found = operand_dtypes(grads, X[:, :5], W[:5])
    assert set(found) == {("bfloat16", "bfloat16"), ("float32", "float32")}
    # x @ w outside of it: once forward, twice backward.
    assert found.count(("bfloat16", "bfloat16")) == 3


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_full_precision_reaches_the_program_for_accelerators(platform: str) -> None:
    fn = jax.checkpoint(full_precision(lambda x, w: jnp.tanh(x @ w)))
    exported = exported_products(loss_and_grads(fn, BF16, 2), X, W, platform=platform)
    assert exported == [("f32", "f32")] * 4


def test_jvp_linearize_and_jacobians_agree_with_float32() -> None:
    def fn(x: jax.Array) -> jax.Array:
        return jnp.sin(x @ W)

    cast = autocast(fn, BF16)
    expected = jax.jit(lambda x: jax.jvp(fn, (x,), (x,)))(X)
    assert_near(jax.jit(lambda x: jax.jvp(cast, (x,), (x,)))(X), expected, 0.05)
    assert_near(jax.jit(lambda x: jax.linearize(cast, x)[1](x))(X), expected[1], 0.05)
    assert_near(jax.jit(jax.jacfwd(cast))(X), jax.jit(jax.jacrev(fn))(X), 0.05)
    hessian = jax.jit(jax.hessian(lambda x: jnp.sum(cast(x))))
    assert_near(hessian(X), jax.jit(jax.hessian(lambda x: jnp.sum(fn(x))))(X), 0.05)


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_composes_from_inside_and_from_outside(check_vma: bool) -> None:
    mesh = Mesh(np.array(jax.devices()[:1]), ("replicas",))
    shard = functools.partial(jax.shard_map, mesh=mesh, check_vma=check_vma)

    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        y = jax.nn.softmax(x @ w) + lax.rsqrt(1 + jnp.cumsum((x @ w) ** 2, 0))
        return y + jnp.zeros_like(y).at[jnp.array([0, 0])].add(y[:2])

    def inside(x: jax.Array, w: jax.Array) -> jax.Array:
        return shard(fn, in_specs=(P("replicas"), P()), out_specs=P("replicas"))(x, w)

    def outside(x: jax.Array, w: jax.Array) -> jax.Array:
        return shard(autocast(fn, BF16), in_specs=(P("replicas"), P()), out_specs=P("replicas"))(x, w)

    assert matmuls(grads_outside(inside, BF16, 2), X, W) == {("bfloat16", "bfloat16")}
    assert matmuls(loss_and_grads(inside, BF16, 2), X, W) == {("bfloat16", "bfloat16")}
    grads = jax.grad(lambda x, w: jnp.sum(outside(x, w)), argnums=(0, 1))
    assert matmuls(grads, X, W) == {("bfloat16", "bfloat16")}
    assert_near(jax.jit(outside)(X, W), jax.jit(fn)(X, W), 0.05)


def test_pmap_composes_from_inside_and_from_outside() -> None:
    np.testing.assert_array_equal(jax.pmap(autocast(half_matmul, BF16))(EYE[None])[0], EYE)
    assert (
        autocast(lambda x: jax.pmap(lambda x: half_matmul(x) * 1.0)(x), "bf16")(EYE[None]).dtype
        == jnp.bfloat16
    )


def test_eager_jitted_and_lowered_runs_agree() -> None:
    fn = autocast(lambda x, w: jnp.tanh(x @ w), BF16)
    eager = fn(X, W)
    assert eager.dtype == jnp.float32
    assert_near(jax.jit(fn)(X, W), eager, 0.01)
    assert_near(jax.jit(fn).lower(X, W).compile()(X, W), eager, 0.01)
    with jax.disable_jit():
        assert_near(fn(X, W), eager, 0.01)
    assert jax.eval_shape(fn, X, W).dtype == jnp.float32


def test_nothing_leaks_and_debugging_tools_run() -> None:
    def loss(w: jax.Array) -> jax.Array:
        jax.debug.callback(lambda x: None, X @ w)
        body = jax.checkpoint(lambda c: jax.nn.softmax(c @ w @ w.T).astype(c.dtype))
        return jnp.sum(lax.scan(lambda c, _: (body(c), None), X, None, length=2)[0])

    with jax.checking_leaks(), jax.debug_nans(True):
        _, grad, finite = jax.jit(mpjax.value_and_grad(loss, BF16))(NO_SCALE, W)
        jax.jit(jax.grad(autocast(loss, BF16)))(W)
    assert (grad.dtype, bool(finite)) == (jnp.float32, True)


def test_donated_arguments_are_donated() -> None:
    x = jnp.ones((4, 4))
    jax.jit(autocast(half_matmul, BF16), donate_argnums=0)(x)
    assert x.is_deleted()


def test_the_library_needs_no_implicit_promotion() -> None:
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        fn = autocast(lambda x, w: jax.nn.softmax(x @ w), BF16)
        jax.jit(jax.grad(lambda x, w: jnp.sum(fn(x, w))))(X, W)
        autocast(lambda x: x.at[0].add(x[1]), "bf16")(HALF_INPUTS)
        autocast(lambda x: jnp.where(x > 0, half_matmul(x), -1e9), "f16")(EYE)


def test_no_float64_appears_where_x64_is_enabled() -> None:
    with jax.enable_x64(True):
        args = np.ones((3, 4), np.float32), np.ones((4, 2), np.float32)

        def fn(x: jax.Array, w: jax.Array) -> jax.Array:
            return jnp.where(x @ w > 0, jax.nn.softmax(x @ w) * 2.0 + jnp.var(x), -1e9)

        for grads in (loss_and_grads(fn, F16, 2), grads_outside(fn, F16, 2)):
            found = {v.aval.dtype.name for e in trace(grads, *args) for v in e.outvars}
            assert found <= {"float32", "float16", "bool", "int32", "int64"}


# --------------------------------------------------------------------------------- what goes in and out


def test_outputs_follow_the_output_dtype() -> None:
    def fn(x: jax.Array) -> Any:
        return {"a": x, "b": (half_matmul(x), None)}

    out = autocast(fn, "p=f32,c=bf16,o=f16")(EYE)
    assert (out["a"].dtype, out["b"][0].dtype, out["b"][1]) == (jnp.float16, jnp.float16, None)


def test_a_scalar_result_is_never_narrowed_but_widened() -> None:
    assert autocast(lambda x: jnp.sum(x), "bf16")(X).dtype == jnp.float32
    assert autocast(lambda x: jnp.sum(half_matmul(x)), BF16)(EYE).dtype == jnp.float32


def test_inputs_are_never_narrowed() -> None:
    seen = []
    fn = autocast(lambda t, n: seen.append((t.dtype, n.dtype)) or t, BF16)
    assert fn(jnp.float32(999.0), np.float32([2047.0])) == 999.0
    assert seen == [(jnp.float32, np.float32)]


def test_inputs_narrower_than_the_compute_dtype_are_widened_to_it() -> None:
    seen = []
    autocast(lambda x, y: seen.append((x.dtype, y.dtype)), "float32")(HALF_INPUTS, y=HALF_INPUTS)
    assert seen == [(jnp.float32, jnp.float32)]


def test_integers_bools_keys_none_numbers_and_strings_pass_untouched() -> None:
    tree = {
        "ids": jnp.array([2909, 32001, 50257]),
        "mask": jnp.array([True, False]),
        "key": jax.random.key(0),
        "raw": jax.random.PRNGKey(0),
        "none": None,
        "number": 0.1,
        "name": "x",
        "complex": jnp.ones(2, jnp.complex64),
    }
    out = autocast(lambda t: t, "f16")(tree)
    assert out["ids"].tolist() == [2909, 32001, 50257]
    assert all(out[k] is tree[k] for k in tree)


def test_numpy_stays_numpy_and_float64_stays_float64() -> None:
    out = autocast(lambda *xs: xs, "bf16")(np.ones(2, np.float32), np.ones(2, np.float64))
    assert [type(x) for x in out] == [np.ndarray, np.ndarray]
    assert [x.dtype for x in out] == [jnp.bfloat16, np.float64]


def test_integer_arguments_have_float0_gradients() -> None:
    _, vjp = jax.vjp(autocast(lambda i, x: x * i, BF16), jnp.array(3), X)
    assert vjp(X)[0].dtype == jax.dtypes.float0


@pytest.mark.parametrize("sample", [jax.random.normal, jax.random.gumbel])
def test_random_numbers_do_not_depend_on_the_policy(sample: Any) -> None:
    def fn(key: jax.Array) -> jax.Array:
        return sample(key, (100,))

    key = jax.random.key(0)
    np.testing.assert_array_equal(jax.jit(autocast(fn, BF16))(key), jax.jit(fn)(key))


def sinusoids(positions: jax.Array) -> jax.Array:
    frequencies = 10000.0 ** (-jnp.arange(32) / 32)
    angles = jnp.einsum("i,j->ij", positions, frequencies)
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


@pytest.mark.parametrize("policy", [BF16, F16])
def test_sinusoids_of_2048_positions_are_within_2_thousandths(policy: str) -> None:
    positions = jnp.arange(2048.0)
    passed_in = jax.jit(autocast(sinusoids, policy))(positions)
    computed = jax.jit(autocast(lambda: sinusoids(jnp.arange(2048.0)), policy))()
    expected = jax.jit(sinusoids)(positions)
    np.testing.assert_allclose(passed_in, expected, atol=0.002)
    np.testing.assert_allclose(computed, expected, atol=0.002)


def test_the_matmuls_of_the_rule_table_exist_in_this_jax() -> None:
    def fn(x: jax.Array) -> jax.Array:
        y = lax.ragged_dot(x, jnp.ones((1, 4, 4)), jnp.array([4]))
        return lax.conv(y[None, None], x[None, None], (1, 1), "SAME")[0, 0] @ x

    names = {e.primitive.name for e in trace(autocast(fn, BF16), EYE)}
    assert set(PRODUCTS) <= names
