"""The gradient of what a matmul narrowed leaves its own matmul in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from jax import lax

import mpjax

BF16, F16 = "p=f32,c=bf16,o=f32", "p=f32,c=f16,o=f32"


def normal(*shape):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


def conv(x, w, **kwargs):
    return lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), **kwargs
    )


# Layouts of weights and activations: x, w and the function of both. Some are such that XLA folds a transposition
# into the gradient's matmul, which it cannot run on CPU with a float32 result.
LAYOUTS = {
    "dense": (normal(4, 16, 32), normal(32, 8), lambda x, w: x @ w),
    "tied": (normal(4, 16, 32), normal(8, 32), lambda x, w: x @ w.T),
    "weight first": (normal(16, 32), normal(8, 32), lambda x, w: (w @ x.T).T),
    "vector": (normal(4, 16, 32), normal(32), lambda x, w: x @ w),
    "heads": (normal(2, 16, 32), normal(32, 4, 8), lambda x, w: jnp.einsum("btd,dhk->bhtk", x, w)),
    "experts": (normal(16, 4, 32), normal(4, 32, 8), lambda x, w: jnp.einsum("bed,edf->bef", x, w)),
    "experts in the middle": (
        normal(16, 4, 32),
        normal(32, 4, 8),
        lambda x, w: jnp.einsum("bed,def->fbe", x, w),
    ),
    "vmapped": (normal(16, 3, 32), normal(32, 8, 3), jax.vmap(jnp.matmul, in_axes=(1, 2))),
    "both": (normal(2, 16, 4, 8), normal(2, 16, 4, 8), lambda x, w: jnp.einsum("bqhd,bkhd->bhqk", x, w)),
    "convolution": (normal(2, 8, 8, 4), normal(3, 3, 4, 6), conv),
    "grouped convolution": (
        normal(2, 8, 8, 4),
        normal(3, 3, 1, 8),
        lambda x, w: conv(x, w, feature_group_count=4),
    ),
}


def gradient(f, policy, **options):
    def loss(w, x):
        return jnp.mean(f(x, w).astype(jnp.float32) ** 2)

    fn = mpjax.value_and_grad(loss, policy, **options)
    return lambda x, w: fn(mpjax.StaticLossScale(16.0), w, x)[1]


@pytest.mark.usefixtures("optimized_programs")
@pytest.mark.parametrize("policy", [BF16, F16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_gradient_of_a_weight_is_right_and_runs_in_every_layout(layout, policy):
    x, w, f = LAYOUTS[layout]
    grad, expected = jax.jit(gradient(f, policy))(x, w), gradient(f, "float32")(x, w)
    assert grad.dtype == np.float32
    np.testing.assert_allclose(grad, expected, atol=2e-2 * float(jnp.abs(expected).max()))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("reduce_dtype", "result"), [("float32", "float32"), ("compute", "bfloat16")])
def test_its_matmul_takes_16_bit_operands_and_gives_float32_or_where_asked_the_compute_dtype(
    layout, reduce_dtype, result
):
    x, w, f = LAYOUTS[layout]
    matmuls = [
        eqn
        for eqn in programs.trace(gradient(f, BF16, reduce_dtype=reduce_dtype), x, w)
        if eqn.primitive.name in programs.PRODUCTS
    ]
    assert {v.aval.dtype.name for eqn in matmuls for v in eqn.invars} == {"bfloat16"}
    assert matmuls[-1].outvars[0].aval.dtype.name == result
    assert matmuls[0].outvars[0].aval.dtype.name == "bfloat16"


@pytest.mark.parametrize("policy", [BF16, F16])
def test_a_gradient_is_not_rounded_to_the_compute_dtype(policy):
    x = jnp.ones((4097, 1))
    grad = jax.jit(jax.grad(mpjax.autocast(lambda w: (x @ w).astype(jnp.float32).sum(), policy)))(
        jnp.ones((1, 1))
    )
    assert grad.tolist() == [[4097.0]]


def test_the_gradient_of_a_16_bit_operand_leaves_its_matmul_in_16_bits():
    grads = jax.grad(mpjax.autocast(lambda w, x: (x @ w).astype(jnp.float32).sum(), BF16))
    (matmul,) = [
        eqn
        for eqn in programs.trace(grads, jnp.ones((2, 2), jnp.bfloat16), jnp.ones((2, 2)))
        if eqn.primitive.name == "dot_general"
    ][1:]
    assert matmul.outvars[0].aval.dtype == jnp.bfloat16


def test_second_derivatives_run():
    def loss(w):
        return jnp.sum(jnp.tanh(normal(4, 8) @ w).astype(jnp.float32))

    w, v = normal(8, 2), normal(8, 2)
    hessian_times_v = jax.jvp(jax.grad(mpjax.autocast(loss, BF16)), (w,), (v,))[1]
    np.testing.assert_allclose(hessian_times_v, jax.jvp(jax.grad(loss), (w,), (v,))[1], atol=0.1)


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_the_program_for_an_accelerator_has_the_matmul_and_no_barrier(platform):
    x, w, f = LAYOUTS["dense"]
    text = jax.export.export(jax.jit(gradient(f, BF16)), platforms=[platform])(x, w).mlir_module()
    assert "optimization_barrier" not in text
    assert "(tensor<4x16x8xbf16>, tensor<4x16x32xbf16>) -> tensor<8x32xf32>" in text
