"""What CPUs are given to run for the bfloat16 matmuls of a policy; the programs of other platforms do not show it."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mpjax
from mpjax._precision import cpu_lowering
from mpjax._precision.rules import PolicyPrecision

pytestmark = pytest.mark.usefixtures("optimized_programs")

BF16 = "p=f32,c=bf16,o=f32"
MATMUL = re.compile(r"stablehlo\.dot_general.*: \(tensor<([^>]*)>, tensor<([^>]*)>\) -> tensor<([^>]*)>")


@pytest.fixture(params=[False, True], ids=["widened", "native"])
def native(request, monkeypatch, optimized_programs):
    """Both kinds of machines. Programs for native matmuls run on any, just not faster."""
    monkeypatch.setattr(cpu_lowering, "has_native_bfloat16", lambda: request.param)
    jax.clear_caches()
    yield request.param
    jax.clear_caches()


def dense(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def weights_and_inputs(batch=(2, 8), features=(32, 16)):
    rng = np.random.default_rng(0)
    w, x = rng.standard_normal(features), rng.standard_normal((*batch, features[0]))
    return jnp.asarray(w, jnp.float32), jnp.asarray(x, jnp.float32)


def gradients(policy=BF16, fn=dense):
    return jax.grad(mpjax.autocast(fn, policy), argnums=(0, 1))


def matmuls(text):
    return [tuple(t.rpartition("x")[2] for t in match) for match in MATMUL.findall(text)]


def exported(platform, fn, *args):
    return str(jax.export.export(jax.jit(fn), platforms=[platform])(*args).mlir_module())


def test_the_system_says_whether_the_cpu_multiplies_bfloat16(monkeypatch):
    for text, expected in [
        ("flags\t\t: fpu avx512_bf16 sse", True),
        ("flags\t\t: fpu amx_bf16", True),
        ("Features\t: fp asimd bf16", True),
        ("flags\t\t: fpu avx2 fma", False),
        ("model name\t: bf16", False),
    ]:
        monkeypatch.setattr(Path, "read_text", lambda self, text=text: text)
        assert cpu_lowering.has_native_bfloat16.__wrapped__() is expected

    def missing(self):
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    assert cpu_lowering.has_native_bfloat16.__wrapped__() is False


def test_matmuls_take_bfloat16_and_add_up_in_float32_on_a_cpu_that_can_and_float32_on_others(native):
    text = jax.jit(gradients()).lower(*weights_and_inputs()).as_text()
    operand = "bf16" if native else "f32"
    assert matmuls(text) == [(operand, operand, "f32")] * 3
    assert text.count("optimization_barrier") == (3 * 3 if native else 1)


def test_accelerators_get_the_matmul_as_it_is_traced(native):
    for platform in ("tpu", "cuda"):
        text = exported(platform, gradients(), *weights_and_inputs())
        assert matmuls(text) == [("bf16", "bf16", "bf16"), *[("bf16", "bf16", "f32")] * 2]
        assert "barrier" not in text


def test_matmuls_outside_of_policies_are_left_alone(native):
    w, x = (a.astype(jnp.bfloat16) for a in weights_and_inputs())
    assert matmuls(jax.jit(jnp.matmul).lower(x, w).as_text()) == [("bf16", "bf16", "bf16")]


def test_float16_matmuls_are_widened_on_every_cpu_and_float32_ones_left_alone(native):
    for policy in ("p=f32,c=f16,o=f32", "float32"):
        text = jax.jit(gradients(policy)).lower(*weights_and_inputs()).as_text()
        assert matmuls(text) == [("f32", "f32", "f32")] * 3
        assert ("barrier" in text) == (policy != "float32")


def test_the_weight_gradient_is_formed_in_the_layout_of_the_weight(native):
    for policy in (BF16, "p=f32,c=f16,o=f32"):
        text = jax.jit(jax.grad(mpjax.autocast(dense, policy))).lower(*weights_and_inputs()).as_text()
        assert MATMUL.findall(text)[-1][2] == "32x16xf32"


def test_a_long_sum_does_not_stop_where_bfloat16_does(native):
    w, x = jnp.ones((16, 8)), jnp.ones((8, 1024, 16))
    grad = jax.jit(jax.grad(mpjax.autocast(lambda w, x: jnp.sum(x @ w), BF16)))(w, x)
    np.testing.assert_array_equal(grad, np.full((16, 8), 8192.0))


def test_a_result_that_was_asked_to_be_wide_is_not_rounded(native):
    def wide(w, x):
        return lax.dot_general(x, w, (((2,), (0,)), ((), ())), preferred_element_type=jnp.float32)

    w, x = (a.astype(jnp.bfloat16) for a in weights_and_inputs())
    out = jax.jit(mpjax.autocast(wide, BF16))(w, x)
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    np.testing.assert_allclose(out, exact, rtol=1e-5, atol=1e-5)


LAYOUTS = [
    *[(lhs, rhs, "") for lhs in ("mk", "km") for rhs in ("kn", "nk")],
    *[(lhs, rhs, "") for lhs in ("hmk", "hkm", "kmh", "mkh") for rhs in ("kn", "nk")],
    *[(lhs, rhs, "") for lhs in ("mk", "km") for rhs in ("knh", "nkh", "nhk")],
    *[(lhs, rhs, "") for lhs in ("lkm", "klm", "mlk", "lmk") for rhs in ("lkn", "kln", "nlk")],
    *[(lhs, rhs, "b") for lhs in ("bmk", "bkm", "mkb") for rhs in ("bkn", "bnk", "knb")],
    *[(lhs, rhs, "bh") for lhs in ("bhmk", "bmhk") for rhs in ("bhkn", "bnhk")],
    *[("k", "k", ""), ("k", "kn", ""), ("mk", "k", "")],
]
SIZES = [
    {"b": 2, "h": 3, "m": 4, "n": 6, "k": 8, "l": 5},
    {"b": 1, "h": 1, "m": 1, "n": 6, "k": 8, "l": 5},
    {"b": 2, "h": 3, "m": 4, "n": 1, "k": 1, "l": 1},
    {"b": 2, "h": 0, "m": 4, "n": 6, "k": 0, "l": 1},
]


def layout_cases():
    for dtype, devices in [(jnp.bfloat16, 1), (jnp.bfloat16, 2), (jnp.float16, 2)]:
        for i, size in enumerate(SIZES):
            slow = [pytest.mark.slow] if i else []
            name = f"{np.dtype(dtype).name}-{devices} devices-sizes {i}"
            yield pytest.param(size, True, dtype, devices, id=f"{name}-transposed", marks=slow)
        yield pytest.param(SIZES[0], False, dtype, devices, id=f"{np.dtype(dtype).name}-{devices} devices")


@pytest.mark.parametrize(("size", "transposed", "dtype", "devices"), [*layout_cases()])
def test_every_layout_runs(monkeypatch, size, transposed, dtype, devices):
    """XLA folds transpositions of operands and results into matmuls that it then cannot run."""
    monkeypatch.setattr(cpu_lowering, "has_native_bfloat16", lambda: True)
    rng = np.random.default_rng(0)
    mesh = jax.make_mesh((devices,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])

    def matmul(case, a, b):
        lhs, rhs, batch = case
        if transposed:
            a, b = a.T, b.T
        summed = [d for d in lhs if d in rhs and d not in batch]
        dims = [[tuple(map(names.index, ds)) for names in (lhs, rhs)] for ds in (summed, batch)]
        decided = PolicyPrecision(None, np.dtype(dtype))
        # On several devices what is widened is what has a float32 result.
        result = dtype if devices == 1 else jnp.float32
        out = lax.dot_general(a, b, dims, precision=decided, preferred_element_type=result)
        return out.T if transposed else out

    def exact(case, a, b):
        lhs, rhs, batch = case
        if transposed:
            a, b = a.T, b.T
        summed = [d for d in lhs if d in rhs and d not in batch]
        free = [[d for d in names if d not in summed and d not in batch] for names in (lhs, rhs)]
        rhs = "".join(d.upper() if d in free[1] else d for d in rhs)
        out = "".join([*batch, *free[0], *(d.upper() for d in free[1])])
        y = np.einsum(f"{lhs},{rhs}->{out}", a, b)
        return y.T if transposed else y

    def operand(dims):
        x = jnp.asarray(rng.standard_normal([size[d] for d in dims]), dtype)
        x = jax.device_put(x, NamedSharding(mesh, P()))
        return x.T if transposed else x

    operands = [(operand(lhs), operand(rhs)) for lhs, rhs, _ in LAYOUTS]
    outs = jax.jit(lambda xs: [matmul(c, *x) for c, x in zip(LAYOUTS, xs, strict=True)])(operands)
    for case, x, out in zip(LAYOUTS, operands, outs, strict=True):
        wanted = exact(case, *(np.asarray(a, np.float64) for a in x))
        np.testing.assert_allclose(
            np.asarray(out, np.float64), wanted, rtol=1e-2, atol=1e-6, err_msg=str(case)
        )


def close(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(np.asarray(x, np.float64), np.asarray(y, np.float64), rtol=0.05, atol=5e-3)


def test_transformations_compose(native):
    w, x = weights_and_inputs((3, 2, 8))
    exact = jax.grad(dense)(w, x)
    loss = mpjax.autocast(dense, BF16)
    close(jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(w, x), jax.vmap(jax.grad(dense), (None, 0))(w, x))
    close(jax.jit(jax.grad(jax.checkpoint(loss)))(w, x), exact)
    close(jax.jit(lambda w, x: jax.jvp(loss, (w, x), (w, x)))(w, x), jax.jvp(dense, (w, x), (w, x)))
    scanned = lambda fn: jax.grad(lambda w: lax.scan(lambda c, x: (c + fn(w, x), None), 0.0, x)[0])
    close(jax.jit(scanned(loss))(w), scanned(dense)(w))


def test_a_checkpoint_policy_finds_the_matmuls(native):
    w, x = weights_and_inputs()
    loss = jax.checkpoint(mpjax.autocast(dense, BF16), policy=jax.checkpoint_policies.dots_saveable)
    assert len(matmuls(jax.jit(jax.grad(loss)).lower(w, x).as_text())) == 2
    close(jax.jit(jax.grad(loss))(w, x), jax.grad(dense)(w, x))


@pytest.mark.parametrize("axis_type", list(jax.sharding.AxisType)[:2], ids=str)
def test_sharded_matmuls_run(native, axis_type):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(axis_type,) * 2)
    w, x = weights_and_inputs((4, 8))
    with jax.set_mesh(mesh):
        sharded = (
            jax.device_put(w, NamedSharding(mesh, P(None, "model"))),
            jax.device_put(x, NamedSharding(mesh, P("data"))),
        )
        grads = jax.jit(jax.grad(mpjax.autocast(dense, BF16)))(*sharded)
    close(grads, jax.grad(dense)(w, x))


def test_matmuls_under_shard_map_run(native):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    w, x = weights_and_inputs((4, 8))

    def local(w, x):
        return lax.pmean(jax.grad(mpjax.autocast(dense, BF16))(lax.pcast(w, "data", to="varying"), x), "data")

    grads = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()))(w, x)
    close(grads, jax.grad(dense)(w, x))


def test_a_batch_of_any_size_is_exported(native):
    (b,) = jax.export.symbolic_shape("b")
    w, x = weights_and_inputs()
    shape = jax.ShapeDtypeStruct((b, *x.shape[1:]), x.dtype)
    out = jax.export.export(jax.jit(gradients()))(w, shape).call(w, x)
    close(out, jax.grad(dense, (0, 1))(w, x))
