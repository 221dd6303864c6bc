"""Which policy is in force where: jit caches, threads, nesting, exceptions, and values at the boundary."""

import re
import threading
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from programs import operand_dtypes

import mpjax
from mpjax import autocast, full_precision
from mpjax._precision import module_scope, regions

BF16 = "p=f32,c=bf16,o=f32"
F16 = "p=f32,c=f16,o=f32"
NO_SCALE = mpjax.NoOpLossScale()


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


X = normal(4, 4)


def product(x: jax.Array) -> jax.Array:
    return x @ x


def product_dtypes(fn: Callable[..., Any], *args: Any) -> list[str]:
    """The operand dtype of each product, in the order of the program."""
    found = operand_dtypes(fn, *args)
    assert all(a == b for a, b in found)
    return [a for a, _ in found]


# ------------------------------------------------------------------------------- jit caches and threads


@pytest.mark.parametrize("first", ["outside", "inside"])
@pytest.mark.parametrize("wrap", [jax.jit, lambda f: jax.checkpoint(jax.jit(f))], ids=["jit", "remat of jit"])
def test_a_jitted_function_gives_the_policys_result_inside_and_its_own_outside(wrap: Any, first: str) -> None:
    jitted = wrap(product)
    plain, half = np.asarray(X) @ np.asarray(X), autocast(product, BF16)(X)
    assert not np.array_equal(plain, half)
    for _ in range(2):
        if first == "outside":
            np.testing.assert_allclose(jitted(X), plain, rtol=1e-5)
        np.testing.assert_array_equal(autocast(jitted, BF16)(X), half)
        np.testing.assert_allclose(jitted(X), plain, rtol=1e-5)
    assert product_dtypes(jitted, X) == ["float32"]
    assert product_dtypes(autocast(jitted, BF16), X) == ["bfloat16"]
    assert product_dtypes(autocast(jitted, F16), X) == ["float16"]
    assert product_dtypes(jitted, X) == ["float32"]


def test_a_jitted_gradient_gives_the_policys_result_inside_and_its_own_outside() -> None:
    jitted = jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(product(x)))))
    before = jitted(X)
    assert set(product_dtypes(autocast(jitted, BF16), X)) == {"bfloat16"}
    assert not np.array_equal(autocast(jitted, BF16)(X), before)
    np.testing.assert_array_equal(jitted(X), before)


def test_a_scan_body_traced_outside_is_traced_again_inside() -> None:
    def scanned(x: jax.Array) -> jax.Array:
        return lax.scan(body, x, None, length=2)[0]

    def body(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jnp.tanh(carry @ carry).astype(carry.dtype), None

    assert product_dtypes(scanned, X) == ["float32"]
    assert product_dtypes(autocast(scanned, BF16), X) == ["bfloat16"]
    assert product_dtypes(scanned, X) == ["float32"]


def test_two_threads_at_once_each_keep_their_own_policy() -> None:
    jitted = jax.jit(lambda x: (x @ x).astype(jnp.float32))
    runs = {"plain": jitted, "bf16": autocast(jitted, BF16), "f16": autocast(jitted, F16)}
    expected = {name: np.asarray(run(X)).tobytes() for name, run in runs.items()}
    assert len(set(expected.values())) == 3
    jax.clear_caches()
    found: dict[str, set[bytes]] = {name: set() for name in runs}
    barrier = threading.Barrier(len(runs))

    def work(name: str) -> None:
        barrier.wait()
        for _ in range(20):
            found[name].add(np.asarray(runs[name](X)).tobytes())

    threads = [threading.Thread(target=work, args=(name,)) for name in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {name: {value} for name, value in expected.items()}


def test_a_thread_started_inside_a_policy_starts_without_one() -> None:
    seen = []

    def start(x: jax.Array) -> jax.Array:
        thread = threading.Thread(target=lambda: seen.append(regions.current()))
        thread.start()
        thread.join()
        return x

    autocast(start, BF16)(X)
    assert seen == [None]


def test_a_jitted_autocast_function_is_traced_once() -> None:
    traces = []

    @jax.jit
    def step(x: jax.Array) -> jax.Array:
        return autocast(lambda x: traces.append(1) or x @ x, BF16)(x)

    for _ in range(3):
        step(X)
    assert len(traces) == 1


def test_a_function_jitted_inside_is_traced_once_per_policy() -> None:
    traces = []
    jitted = jax.jit(lambda x: traces.append(1) or x @ x)
    for _ in range(3):
        autocast(jitted, BF16)(X)
        autocast(jitted, F16)(X)
    assert len(traces) == 2


def test_a_half_dtype_is_resolved_once_and_no_policy_disturbs_another() -> None:
    as_float16 = mpjax.get_policy("half", half=jnp.float16)
    as_bfloat16 = mpjax.get_policy("half", half=jnp.bfloat16)
    for _ in range(2):
        assert autocast(product, as_float16)(X).dtype == jnp.float16
        assert autocast(product, as_bfloat16)(X).dtype == jnp.bfloat16


# ------------------------------------------------------------------------------------------ nesting


def test_the_innermost_policy_holds_and_the_outer_one_returns_after_it() -> None:
    def fn(x: jax.Array) -> Any:
        return product(x), autocast(product, F16)(x), full_precision(product)(x), product(x)

    assert product_dtypes(autocast(fn, BF16), X) == ["bfloat16", "float16", "float32", "bfloat16"]


def test_the_innermost_policy_holds_in_the_backward_pass_too() -> None:
    def loss(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(autocast(jax.checkpoint(lambda x: jnp.sin(x @ x)), F16)(x)))

    grad_fn = mpjax.value_and_grad(loss, BF16)
    assert set(product_dtypes(grad_fn, NO_SCALE, X)) == {"float16"}


def test_a_policy_inside_full_precision_holds() -> None:
    assert product_dtypes(full_precision(autocast(product, BF16)), X) == ["bfloat16"]


def test_full_precision_outside_of_any_policy_changes_nothing() -> None:
    np.testing.assert_array_equal(full_precision(product)(X), product(X))
    assert full_precision(product)(X.astype(jnp.bfloat16)).dtype == jnp.float32


def test_full_precision_widens_its_arguments_and_hands_back_what_the_function_makes() -> None:
    seen = []

    @full_precision
    def fn(x: jax.Array, *, y: jax.Array, ids: jax.Array) -> Any:
        seen.append((x.dtype, y.dtype, ids.dtype))
        return x, y.astype(jnp.float16)

    half = X.astype(jnp.bfloat16)
    out = autocast(lambda x: [o.dtype for o in fn(x, y=x, ids=jnp.arange(3))], "bf16")(half)
    assert seen == [(jnp.float32, jnp.float32, jnp.int32)]
    assert out == [jnp.float32, jnp.float16]


def test_wrappers_keep_the_name_and_docstring_of_the_function() -> None:
    def documented() -> None:
        """What it does."""

    for wrapped in (autocast(documented, BF16), full_precision(documented)):
        assert (wrapped.__name__, wrapped.__doc__) == ("documented", "What it does.")


# ---------------------------------------------------------------------------------------- exceptions


def fail(x: jax.Array) -> jax.Array:
    raise RuntimeError("inside")


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint, jax.grad, full_precision])
def test_an_exception_inside_leaves_no_policy_behind(wrap: Any) -> None:
    with pytest.raises(RuntimeError, match="inside"):
        autocast(wrap(fail), BF16)(jnp.float32(1))
    assert regions.current() is None
    assert module_scope.running() is None
    assert product_dtypes(product, X) == ["float32"]


class Failing(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        nn.Dense(3)(x)
        raise RuntimeError("inside")


class FailingNnx(nnx.Module):
    def __init__(self) -> None:
        self.linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.linear(x)
        raise RuntimeError("inside")


@pytest.mark.parametrize("framework", ["linen", "nnx"])
def test_an_exception_in_a_module_leaves_no_module_running(framework: str) -> None:
    if framework == "linen":
        run = autocast(lambda x: Failing().init(jax.random.key(0), x), BF16)
    else:
        run = mpjax.nnx.apply_policy(FailingNnx(), BF16)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="inside"):
            run(X)
        assert regions.current() is None
        assert module_scope.running() is None


def test_an_exception_caught_inside_restores_the_region_around_it() -> None:
    def fn(x: jax.Array) -> jax.Array:
        with pytest.raises(RuntimeError, match="inside"):
            full_precision(fail)(x)
        return product(x)

    assert product_dtypes(autocast(fn, BF16), X) == ["bfloat16"]


# ------------------------------------------------------------------------------ the note on loop carries


class Recurrence(nn.Module):
    """Multiplies its carry by a float32 constant."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dense = nn.Dense(4)
        dense(x)
        scale = jnp.linspace(0.5, 1, 4)
        kernel = self.variables["params"]["Dense_0"]["kernel"]
        return lax.scan(lambda c, _: (lax.dot(c, kernel) * 1.0, scale), x, None, length=2)[0]


class Stack(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return Recurrence(name="loop")(x)


def test_a_changing_loop_carry_is_explained_with_module_dtypes_and_ways_out() -> None:
    model = Stack()
    variables = model.init(jax.random.key(0), X)
    with pytest.raises(TypeError, match="carry") as error:
        autocast(model.apply, BF16)(variables, X)
    (note,) = [n for n in error.value.__notes__ if n.startswith("mpjax:")]
    assert "module 'loop' (Recurrence)" in note
    assert "policy 'p=full,c=bf16,o=full'" in note
    assert "one side is float32, the other bfloat16" in note
    assert "start the loop's carry in bfloat16, the dtype that the body makes of it" in note
    assert "PolicyMap" in note


def test_the_note_names_the_dtype_that_the_body_makes_also_where_it_is_the_wide_one() -> None:
    def fn(x: jax.Array) -> jax.Array:
        start = jnp.zeros((4, 4), jnp.bfloat16)
        return lax.scan(lambda c, _: (jnp.tanh(c @ x), None), start, None, length=2)[0]

    with pytest.raises(TypeError) as error:
        autocast(fn, BF16)(X)
    (note,) = [n for n in error.value.__notes__ if n.startswith("mpjax:")]
    assert "start the loop's carry in float32, the dtype that the body makes of it" in note


def test_branches_that_differ_are_explained_in_their_own_words() -> None:
    with pytest.raises(TypeError) as error:
        autocast(lambda x: lax.cond(x[0, 0] > 0, lambda: lax.dot(x, x), lambda: x), BF16)(X)
    (note,) = [n for n in error.value.__notes__ if n.startswith("mpjax:")]
    assert "cast what the branches return to one dtype with `.astype`" in note


def test_the_ways_out_that_the_note_names_work() -> None:
    model = Stack()
    variables = model.init(jax.random.key(0), X)
    out = autocast(model.apply, {"loop": "float32", "*": BF16})(variables, X)
    np.testing.assert_allclose(out, model.apply(variables, X), rtol=1e-5)
    narrow = autocast(lambda v, x: model.apply(v, x.astype(jnp.bfloat16)), BF16)(variables, X)
    np.testing.assert_allclose(narrow, model.apply(variables, X), atol=0.1)


@pytest.mark.parametrize(
    "loop",
    [
        lambda x: lax.scan(lambda c, _: (lax.dot(c, c), None), x, None, length=2)[0],
        lambda x: lax.fori_loop(0, 2, lambda i, c: lax.dot(c, c), x),
        lambda x: lax.while_loop(lambda c: c[0, 0] < 1, lambda c: lax.dot(c, c), x),
        lambda x: lax.cond(x[0, 0] > 0, lambda: lax.dot(x, x), lambda: x * 1.0),
        lambda x: lax.switch(0, [lambda: lax.dot(x, x), lambda: x * 1.0]),
    ],
    ids=["scan", "fori_loop", "while_loop", "cond", "switch"],
)
def test_every_kind_of_loop_and_branch_runs_or_is_explained(loop: Callable[[Any], Any]) -> None:
    try:
        out = autocast(loop, BF16)(0.1 * X)
    except TypeError as error:
        (note,) = [n for n in error.__notes__ if n.startswith("mpjax:")]
        assert "function '<lambda>'" in note
        (sides,) = re.findall(r"one side is (\w+), the other (\w+)", note)
        assert set(sides) == {"float32", "bfloat16"}
    else:
        assert out.dtype == jnp.float32


def test_errors_that_are_not_about_precision_carry_no_note() -> None:
    def fn(x: jax.Array) -> Any:
        return lax.scan(lambda c, _: (c[:2], None), x, None, length=2)

    with pytest.raises(TypeError) as error:
        autocast(fn, BF16)(X)
    assert not any(n.startswith("mpjax:") for n in getattr(error.value, "__notes__", ()))


def test_a_scan_that_multiplies_its_carry_by_a_float32_constant_runs() -> None:
    scale = jnp.linspace(0.5, 1, 4)

    def fn(x: jax.Array) -> jax.Array:
        return lax.scan(lambda c, _: (c * scale + jnp.tanh(c @ c), None), x, None, length=3)[0]

    np.testing.assert_allclose(jax.jit(autocast(fn, BF16))(0.1 * X), fn(0.1 * X), atol=0.02)


# ------------------------------------------------------------------------------------ values of Region


def test_regions_compare_by_value_as_jax_cache_keys_must() -> None:
    policies = mpjax.PolicyMap({"a": BF16}, default=F16)
    again = mpjax.PolicyMap({"a": BF16}, default=F16)
    assert regions.Region(policies, 0, path="a") == regions.Region(again, 0, path="a")
    assert hash(regions.Region(policies, 0, path="a")) == hash(regions.Region(again, 0, path="a"))
    assert regions.Region(policies, 0, path="a") != regions.Region(policies, 0, path="a/b")
    assert regions.Region(policies, 0, path="a") != regions.Region(policies, path="a")


def test_modules_share_their_traces_under_a_policy_without_patterns() -> None:
    policies = mpjax.PolicyMap(default=BF16)
    assert regions.Region(policies, path="a") == regions.Region(policies, path="b")


def test_a_gemm_recipe_that_cannot_run_yet_is_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match=r"gemm=fp8.*leave it out: 'p=full,c=bf16,o=full'"):
        autocast(product, BF16 + ",gemm=fp8")


@pytest.mark.parametrize(("dtype", "wide"), [("bfloat16", "float32"), ("float16", "bfloat16")])
def test_widening_never_narrows_and_keeps_what_it_need_not_change(dtype: str, wide: str) -> None:
    tree = {"x": jnp.ones(2, dtype), "w": jnp.ones(2), "n": None, "i": np.arange(2)}
    out = module_scope.widen(tree, np.dtype(wide))
    assert out["w"] is tree["w"]
    assert out["i"] is tree["i"]
    assert out["x"].dtype == (jnp.float32 if wide == "float32" else dtype)


def test_handing_over_casts_arrays_both_ways_and_never_narrows_a_scalar() -> None:
    tree = [jnp.ones(2), jnp.ones(2, jnp.float16), jnp.float32(1), jnp.float16(1)]
    narrow = module_scope.cast_output(tree, np.dtype(jnp.float16))
    assert [x.dtype for x in narrow] == ["float16", "float16", "float32", "float16"]
    assert [x.dtype for x in module_scope.cast_output(tree, np.dtype(np.float32))] == ["float32"] * 4
