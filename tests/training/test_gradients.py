import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest
from flax.core import FrozenDict
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from programs import operand_dtypes
from trees import FLOATS, floating_arrays, other_leaves, same, trees

import mpjax
from mpjax._training.accumulation import accumulate as accumulate_microbatches
from mpjax._training.finite import to_float32
from mpjax._training.gradients import unscale
from mpjax._training.overwritten import merge, split
from mpjax._training.reduction import Reduction, average_state, combine_metrics

NONE = mpjax.NoOpLossScale()
F16_MIXED, BF16_MIXED = "p=f32,c=f16,o=f32", "p=f32,c=bf16,o=f32"
OVERWRITE = "_overwrite_with_gradient"


def static(factor):
    return mpjax.StaticLossScale(factor)


# --------------------------------------------------------------------------------------------- value_and_grad


@pytest.mark.parametrize(
    "make", [lambda: NONE, lambda: static(1024.0), lambda: mpjax.DynamicLossScale(1024.0)]
)
def test_value_and_gradients_are_unscaled(make):
    fn = mpjax.value_and_grad(lambda p: p**2, "float32")
    value, grads, finite = fn(make(), jnp.float32(3.0))
    assert (float(value), float(grads), bool(finite)) == (9.0, 6.0, True)


def test_what_is_logged_is_unscaled():
    fn = mpjax.value_and_grad(lambda p: (p**2, {"acc": jnp.float32(0.5)}), "float32", has_aux=True)
    (loss, aux), grads, _ = fn(static(1024.0), jnp.float32(3.0))
    assert (float(loss), float(aux["acc"]), float(grads)) == (9.0, 0.5, 6.0)


def test_gradients_with_respect_to_inputs_are_unscaled():
    fn = mpjax.value_and_grad(lambda x, y: x * y, "float32", argnums=(0, 1))
    value, (dx, dy), _ = fn(static(1024.0), jnp.float32(2.0), jnp.float32(3.0))
    assert (float(value), float(dx), float(dy)) == (6.0, 3.0, 2.0)


@pytest.mark.parametrize(
    ("argnums", "expected"), [(1, 2.0), (-1, 2.0), (0, 3.0), ((1,), (2.0,)), ([0, 1], (3.0, 2.0))]
)
def test_argnums_choose_the_arguments_as_in_jax(argnums, expected):
    fn = mpjax.value_and_grad(lambda x, y: x * y, "float32", argnums=argnums)
    _, grads, _ = fn(NONE, jnp.float32(2.0), jnp.float32(3.0))
    assert jax.tree.map(float, grads) == expected


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("policy", ["float32", F16_MIXED, BF16_MIXED])
def test_gradients_are_float32_whatever_the_parameters_are_stored_in(dtype, policy):
    def loss(w):
        return mpjax.cast_to_full(w["w"] * w["w"]).sum()

    _, grads, _ = mpjax.value_and_grad(loss, policy)(static(8.0), {"w": jnp.ones(3, dtype)})
    assert grads["w"].dtype == np.float32
    np.testing.assert_array_equal(grads["w"], [2.0, 2.0, 2.0])


def test_gradients_have_the_structure_of_what_was_differentiated():
    params = FrozenDict({"a": (jnp.ones(2), None), "b": {}})
    _, grads, _ = mpjax.value_and_grad(lambda p: p["a"][0].sum(), "float32")(NONE, params)
    assert jax.tree.structure(grads) == jax.tree.structure(params)
    assert type(grads) is FrozenDict


def test_matmuls_take_the_compute_dtype_forward_and_backward():
    fn = mpjax.value_and_grad(
        lambda w, x: ((x @ w) ** 2).astype(jnp.float32).mean(), BF16_MIXED, argnums=(0, 1)
    )
    pairs = operand_dtypes(lambda w, x: fn(NONE, w, x), jnp.ones((3, 4)), jnp.ones((2, 3)))
    assert pairs == [("bfloat16", "bfloat16")] * 3


def test_a_cotangent_of_1e_9_survives_float16_with_a_scale():
    def loss(x):
        return x.astype(jnp.float16).astype(jnp.float32) * 1e-9

    fn = mpjax.value_and_grad(loss, F16_MIXED)
    assert float(fn(static(2.0**15), jnp.float32(1.0))[1]) == np.float32(1.0004442e-9)
    assert float(fn(NONE, jnp.float32(1.0))[1]) == 0.0  # not jitted, so nothing keeps more precision


def test_a_tiny_gradient_through_a_float16_product_survives_with_a_scale():
    fn = mpjax.value_and_grad(lambda w, x: (x @ w).astype(jnp.float32).sum() * 1e-9, F16_MIXED)
    _, grads, _ = fn(static(2.0**15), jnp.ones((2, 1)), jnp.ones((1, 2)))
    np.testing.assert_allclose(grads, 1e-9, rtol=1e-3)


def test_the_scale_that_scaled_the_loss_unscales_the_gradients_on_a_growth_step_too():
    scale = mpjax.DynamicLossScale(8.0, period=1)
    fn = mpjax.value_and_grad(lambda p: p * 3.0, "float32")
    for _ in range(4):
        _, grads, finite = fn(scale, jnp.float32(1.0))
        assert float(grads) == 3.0
        scale = scale.adjust(finite)
    assert float(scale.loss_scale) == 128.0


@pytest.mark.parametrize(
    "scale", [NONE, static(2.0), mpjax.DynamicLossScale(2.0)], ids=["none", "static", "dynamic"]
)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_no_loss_scale_reports_a_gradient_that_is_not_finite_as_finite(scale, bad):
    fn = mpjax.value_and_grad(lambda w, x: (w * x).sum(), "float32")
    _, _, finite = fn(scale, jnp.ones(2), jnp.asarray([1.0, bad]))
    assert finite.shape == ()
    assert finite.dtype == jnp.bool_
    assert not finite


def test_a_float16_gradient_that_overflows_by_its_scale_is_reported():
    fn = mpjax.value_and_grad(lambda w, x: (x @ w).astype(jnp.float32).sum(), F16_MIXED)
    args = (jnp.ones((2, 1)), jnp.ones((3, 2)))
    assert bool(fn(static(2.0**10), *args)[2])
    assert not bool(fn(static(2.0**17), *args)[2])


@pytest.mark.parametrize("scale", [jmp.NoOpLossScale(), jmp.StaticLossScale(8.0), jmp.DynamicLossScale(8.0)])
def test_the_loss_scales_of_jmp_are_taken(scale):
    value, grads, finite = mpjax.value_and_grad(lambda p: p**2, F16_MIXED)(scale, jnp.float32(3.0))
    assert (float(value), float(grads), bool(finite)) == (9.0, 6.0, True)


def test_two_losses_with_their_own_scales_do_not_disturb_each_other():
    def loss(strength):
        return lambda w, x: (x @ w).astype(jnp.float32).sum() * strength

    large, small = (mpjax.value_and_grad(loss(strength), F16_MIXED) for strength in (10.0, 1e-12))

    @jax.jit
    def step(scales, w, x):
        results = [fn(scale, w, x) for fn, scale in zip((large, small), scales, strict=True)]
        return [s.adjust(finite) for s, (_, _, finite) in zip(scales, results, strict=True)], [
            finite for _, _, finite in results
        ]

    scales = [mpjax.DynamicLossScale(2.0**15, period=10) for _ in range(2)]
    args = (jnp.ones((2, 1)), jnp.ones((1, 2)))
    used = []
    for _ in range(60):
        before = float(scales[0].loss_scale)
        scales, finite = step(scales, *args)
        assert bool(finite[1])
        used += [before] if finite[0] else []
    assert max(used) == 2.0**12  # 10 · 2^13 is above 65504
    assert float(scales[1].loss_scale) == 2.0**21
    _, grads, _ = small(scales[1], *args)
    assert float(grads[0, 0]) > 0


def test_a_base_model_in_an_argument_of_its_own_gets_no_gradients():
    def loss(adapter, base, x):
        return ((x @ base["w"]) + (x @ adapter["a"]) @ adapter["b"]).astype(jnp.float32).sum()

    base = {"w": jnp.ones((3, 2), jnp.bfloat16)}
    adapter = {"a": jnp.ones((3, 2)), "b": jnp.ones((2, 2))}
    _, grads, _ = mpjax.value_and_grad(loss, BF16_MIXED)(NONE, adapter, base, jnp.ones((4, 3)))
    assert jax.tree.map(lambda g: (g.dtype.name, g.shape), grads) == {
        "a": ("float32", (3, 2)),
        "b": ("float32", (2, 2)),
    }


def test_batches_with_keys_ints_and_bools_reach_the_loss_unchanged():
    seen = []

    def loss(w, batch):
        seen.append(jax.tree.map(lambda x: str(x.dtype), batch))
        return (w * batch["mask"].astype(jnp.float32)).sum()

    batch = {
        "mask": jnp.ones(2, bool),
        "ids": jnp.arange(3),
        "key": jax.random.key(0),
        "raw": jax.random.PRNGKey(0),
    }
    mpjax.value_and_grad(loss, F16_MIXED)(NONE, jnp.ones(2), batch)
    assert seen == [{"mask": "bool", "ids": "int32", "key": "key<fry>", "raw": "uint32"}]


def test_any_number_of_calls_takes_one_trace_and_compiles_ahead_of_time():
    traces = []

    def loss(w, x):
        traces.append(None)
        return (x @ w).astype(jnp.float32).sum()

    fn = mpjax.value_and_grad(loss, F16_MIXED)

    @jax.jit
    def step(scale, w, x):
        _, grads, finite = fn(scale, w, x)
        return scale.adjust(finite), w - grads

    state = (mpjax.DynamicLossScale(2.0**10, period=2), jnp.ones((2, 1)))
    for _ in range(4):
        state = step(*state, jnp.ones((1, 2)))
    assert len(traces) == 1
    assert float(state[0].loss_scale) == 2.0**12
    step.lower(*state, jnp.ones((1, 2))).compile()


def test_it_keeps_the_name_of_the_loss_function():
    def my_loss(w):
        """My loss."""
        return w

    fn = mpjax.value_and_grad(my_loss, "float32")
    assert (fn.__name__, fn.__doc__) == ("my_loss", "My loss.")


# --------------------------------------------------------------------------------------------- bad losses


@pytest.mark.parametrize(
    ("loss", "quoted"),
    [
        (lambda w: w.astype(jnp.float16).sum(), "got dtype float16 and shape []"),
        (lambda w: w.astype(jnp.bfloat16).sum(), "got dtype bfloat16 and shape []"),
        (lambda w: w, "got dtype float32 and shape [2]"),
        (lambda w: w[:1], "got dtype float32 and shape [1]"),
        (lambda w: jnp.int32(1), "got dtype int32 and shape []"),
        (lambda w: w.sum() > 0, "got dtype bool and shape []"),
        (lambda w: w.sum().astype(jnp.complex64), "got dtype complex64 and shape []"),
    ],
)
def test_a_loss_that_is_no_float32_scalar_is_refused_with_its_dtype_and_shape(loss, quoted):
    with pytest.raises(ValueError) as e:
        mpjax.value_and_grad(loss, "float32")(NONE, jnp.ones(2))
    assert f"The loss must be a float32 scalar, {quoted}" in str(e.value)
    assert "decorate the loss with mpjax.full_precision" in str(e.value)


@pytest.mark.parametrize(
    ("loss", "quoted"),
    [
        (lambda w: (w.sum(), 1), "got a tuple of 2"),
        (lambda w: None, "got NoneType"),
        (lambda w: {"loss": w.sum()}, "got dict"),
        (lambda w: "loss", "got str 'loss'"),
    ],
)
def test_a_result_that_is_no_loss_is_refused_with_the_way_out(loss, quoted):
    with pytest.raises(ValueError) as e:
        mpjax.value_and_grad(loss, "float32")(NONE, jnp.ones(2))
    assert f"loss_fn must return the loss, a float32 scalar, {quoted}" in str(e.value)
    assert "If it returns (loss, aux), say has_aux=True." in str(e.value)


@pytest.mark.parametrize(
    ("loss", "quoted"),
    [
        (lambda w: w.sum(), "got JitTracer"),
        (lambda w: (w.sum(), 1, 2), "got a tuple of 3"),
        (lambda w: {"loss": w.sum()}, "got dict"),
    ],
)
def test_a_loss_without_aux_is_refused_where_has_aux_says_so(loss, quoted):
    with pytest.raises(ValueError) as e:
        mpjax.value_and_grad(loss, "float32", has_aux=True)(NONE, jnp.ones(2))
    assert "With has_aux=True loss_fn must return (loss, aux)" in str(e.value)
    if quoted != "got JitTracer":
        assert quoted in str(e.value)


def test_a_loss_that_is_a_list_of_loss_and_aux_is_taken():
    (value, aux), _, _ = mpjax.value_and_grad(lambda w: [w.sum(), {"n": 1}], "float32", has_aux=True)(
        NONE, jnp.ones(2)
    )
    assert float(value) == 2.0
    assert aux == {"n": 1}


@pytest.mark.parametrize(
    ("leaf", "named"),
    [
        (jnp.arange(3), "int32"),
        (jnp.ones(2, bool), "bool"),
        (jax.random.key(0), "key<fry>"),
        (3, "int"),
        ("w", "str"),
    ],
)
def test_a_leaf_that_has_no_gradient_is_refused_with_its_path(leaf, named):
    with pytest.raises(TypeError) as e:
        mpjax.value_and_grad(lambda p: p["w"].sum(), "float32")(
            NONE, {"w": jnp.ones(2), "head": {"bins": leaf}}
        )
    assert "argument 0 of the loss function" in str(e.value)
    assert "'head/bins'" in str(e.value)
    assert named in str(e.value)
    assert "keep counters and keys in the model state, or in an argument that is not differentiated" in str(
        e.value
    )


@pytest.mark.parametrize("argnums", [1, -2, (0, 3)])
def test_argnums_beyond_the_arguments_are_refused(argnums):
    with pytest.raises(ValueError) as e:
        mpjax.value_and_grad(lambda w: w, "float32", argnums=argnums)(NONE, jnp.float32(1.0))
    assert f"argnums={argnums} asks for argument" in str(e.value)
    assert "the function got 1 arguments besides the loss scale" in str(e.value)


@pytest.mark.parametrize("scale", [1024.0, None, "dynamic"])
def test_a_number_in_the_place_of_the_loss_scale_is_refused(scale):
    with pytest.raises(TypeError) as e:
        mpjax.value_and_grad(lambda w: w, "float32")(scale, jnp.float32(1.0))
    assert f"Expected a loss scale such as mpjax.DynamicLossScale(2.0**15), got {scale!r}" in str(e.value)


# --------------------------------------------------------------------------------------------- all_finite, select_tree


@given(trees(floating_arrays | other_leaves))
def test_finite_trees_are_finite_whatever_else_they_hold(tree):
    finite = mpjax.all_finite(tree)
    assert (finite.shape, finite.dtype) == ((), jnp.bool_)
    assert bool(finite)


@given(
    trees(floating_arrays | other_leaves), st.sampled_from((np.inf, -np.inf, np.nan)), st.sampled_from(FLOATS)
)
def test_one_bad_number_anywhere_makes_a_tree_non_finite(tree, bad, dtype):
    assert not mpjax.all_finite({"tree": tree, "bad": jnp.asarray([1.0, bad], dtype)})
    assert not mpjax.all_finite([np.asarray([bad, 1.0], jnp.dtype(dtype)), tree])


@pytest.mark.parametrize("bad", [np.inf, complex(0, np.nan), np.float32(np.nan), np.asarray([1j * np.inf])])
def test_bad_python_numpy_and_complex_numbers_are_seen(bad):
    assert not mpjax.all_finite({"a": 1.0, "b": bad})


@pytest.mark.parametrize("empty", [None, {}, (), {"a": None}, jax.random.key(0), jnp.zeros((0,))])
def test_what_has_no_numbers_is_finite(empty):
    assert bool(mpjax.all_finite(empty))


def test_a_product_of_zero_and_nan_is_no_mask_that_hides_it():
    assert not mpjax.all_finite(0.0 * jnp.asarray([np.nan]))


array_leaves = st.one_of(
    floating_arrays,
    st.integers(0, 9).map(jax.random.key),
    st.builds(lambda n: jnp.arange(n), st.integers(0, 3)),
)


@given(trees(array_leaves), st.booleans())
def test_select_tree_gives_every_bit_of_the_chosen_tree(tree, pred):
    other = jax.tree.map(
        lambda x: jax.random.key(99) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else jnp.full_like(x, 7),
        tree,
    )
    out = mpjax.select_tree(jnp.bool_(pred), tree, other)
    assert jax.tree.structure(out) == jax.tree.structure(tree)
    for a, b in zip(jax.tree.leaves(out), jax.tree.leaves(tree if pred else other), strict=True):
        assert same(a, jnp.asarray(b))


def test_nan_in_the_tree_that_was_not_chosen_does_not_leak():
    out = mpjax.select_tree(jnp.bool_(False), {"w": jnp.full(2, np.nan)}, {"w": jnp.ones(2)})
    np.testing.assert_array_equal(out["w"], [1.0, 1.0])


@pytest.mark.parametrize(
    ("pred", "quoted"),
    [(jnp.ones(2, bool), "shape (2,) and dtype bool"), (jnp.float32(1.0), "shape () and dtype float32")],
)
def test_a_predicate_that_is_no_boolean_scalar_is_quoted(pred, quoted):
    with pytest.raises(AssertionError) as e:
        mpjax.select_tree(pred, {}, {})
    assert f"expected boolean scalar, got pred of {quoted}" in str(e.value)
    assert "reduce it with mpjax.all_finite or jnp.all" in str(e.value)


# --------------------------------------------------------------------------------------------- replicas

REPLICAS = 4


def replicated(fn, kind, n_mapped=1):
    """`fn(w, *mapped)` over four replicas; `w` is the same on all, results are stacked."""
    in_axes = (None, *[0] * n_mapped)
    if kind == "pmap":
        return jax.pmap(fn, axis_name="i", in_axes=in_axes)
    if kind == "vmap":
        return jax.vmap(fn, axis_name="i", in_axes=in_axes)
    mesh = Mesh(np.asarray(jax.devices()[:REPLICAS]), ("i",))

    def block(w, *mapped):
        out = fn(w, *(x[0] for x in mapped))
        return jax.tree.map(lambda x: x[None], out)

    return jax.jit(
        jax.shard_map(
            block,
            mesh=mesh,
            in_specs=(P(), *[P("i")] * n_mapped),
            out_specs=P("i"),
            check_vma=kind == "shard_map",
        )
    )


KINDS = pytest.mark.parametrize("kind", ["vmap", "pmap", "shard_map", "shard_map without checks"])


@KINDS
def test_loss_and_gradients_are_averaged_over_replicas(kind):
    fn = mpjax.value_and_grad(lambda w, x: (w * x).sum(), "float32", axis_name="i")
    value, grads, finite = replicated(lambda w, x: fn(static(16.0), w, x), kind)(
        jnp.ones(2), jnp.asarray([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]])
    )
    np.testing.assert_array_equal(value, [9.0] * 4)
    np.testing.assert_array_equal(grads, [[4.0, 5.0]] * 4)
    assert finite.tolist() == [True] * 4


@KINDS
@pytest.mark.parametrize("culprit", range(REPLICAS))
def test_one_bad_replica_makes_the_flag_of_all_replicas_false(kind, culprit):
    fn = mpjax.value_and_grad(lambda w, x: (w * x).sum(), "float32", axis_name="i")
    x = np.ones((REPLICAS, 2), np.float32)
    x[culprit, 0] = np.inf
    finite = replicated(lambda w, x: fn(NONE, w, x)[2], kind)(jnp.ones(2), x)
    assert finite.tolist() == [False] * REPLICAS


@KINDS
def test_float16_gradients_of_four_replicas_whose_sum_overflows_are_averaged_in_float32(kind):
    fn = mpjax.value_and_grad(lambda w, x: (w.astype(jnp.float32) * x).sum(), "f16", axis_name="i")
    _, grads, finite = replicated(lambda w, x: fn(NONE, w, x), kind)(
        jnp.ones(1, jnp.float16), jnp.full((REPLICAS, 1), 30000.0)
    )
    np.testing.assert_array_equal(grads, [[30000.0]] * REPLICAS)
    assert grads.dtype == np.float32
    assert finite.tolist() == [True] * REPLICAS


def test_float16_gradients_of_eight_replicas_of_10000_average_to_10000():
    fn = mpjax.value_and_grad(lambda w, x: (w.astype(jnp.float32) * x).sum(), "f16", axis_name="i")
    grads = jax.vmap(lambda x: fn(NONE, jnp.ones(1, jnp.float16), x)[1], axis_name="i")(
        jnp.full((8, 1), 10000.0)
    )
    np.testing.assert_array_equal(grads, [[10000.0]] * 8)


@KINDS
def test_auxiliary_results_stay_with_their_replica(kind):
    fn = mpjax.value_and_grad(lambda w, x: ((w * x).sum(), {"x": x}), "float32", has_aux=True, axis_name="i")
    x = jnp.arange(4.0)[:, None]
    (_, aux), _, _ = replicated(lambda w, x: fn(NONE, w, x), kind)(jnp.ones(1), x)
    np.testing.assert_array_equal(aux["x"], x)


@KINDS
def test_a_matmuls_gradient_is_averaged_over_replicas_under_a_half_policy(kind):
    fn = mpjax.value_and_grad(lambda w, x: (x @ w).astype(jnp.float32).sum(), BF16_MIXED, axis_name="i")
    x = jnp.ones((1, 1, 2)) * jnp.asarray([1.0, 2.0, 3.0, 6.0])[:, None, None]
    _, grads, _ = replicated(lambda w, x: fn(NONE, w, x), kind)(jnp.ones((2, 1)), x)
    assert grads.dtype == np.float32
    np.testing.assert_array_equal(grads, [[[3.0], [3.0]]] * 4)


def test_replicas_of_two_axes_are_averaged_over_both():
    average = jax.vmap(
        jax.vmap(lambda x: average_state({"w": x}, None, Reduction(("i", "j"))), axis_name="j"),
        axis_name="i",
    )
    np.testing.assert_array_equal(average(jnp.arange(6.0).reshape(2, 3))["w"], np.full((2, 3), 2.5))


@KINDS
def test_averaging_leaves_counters_bools_and_keys_alone(kind):
    def average(w, n, key):
        del w
        before = {"n": jnp.int32(6), "flag": jnp.asarray(True), "key": key}
        return average_state({"n": n, "flag": n > 1, "key": key}, before, Reduction("i"))

    keys = jax.random.split(jax.random.key(0), 4)
    out = replicated(average, kind, 2)(jnp.ones(1), jnp.full(4, 7), keys)
    assert out["n"].tolist() == [7] * 4
    assert out["n"].dtype == np.int32
    assert out["flag"].tolist() == [True] * 4
    assert same(out["key"], keys)


@KINDS
def test_metrics_of_replicas_are_averaged_counted_and_combined(kind):
    def combine(w, loss, correct, ok):
        del w
        return combine_metrics({"loss": loss, "correct": correct, "ok": ok}, Reduction("i"))

    out = replicated(combine, kind, 3)(
        jnp.ones(1),
        jnp.asarray([1.0, 2.0, 3.0, 6.0]),
        jnp.asarray([1, 2, 3, 4]),
        jnp.asarray([True, True, False, True]),
    )
    np.testing.assert_array_equal(out["loss"], [3.0] * 4)
    assert out["correct"].tolist() == [10] * 4
    assert out["ok"].tolist() == [False] * 4


# --------------------------------------------------------------------------------------------- accumulation


def accumulate(grad, steps, batch, rng=None, carry=None):
    def grad_fn(carry, batch, rng):
        return (carry, {}), split(grad(batch))

    return merge(accumulate_microbatches(grad_fn, steps, carry, batch, rng)[2])


def test_half_gradients_of_1024_microbatches_are_averaged_in_float32():
    grads = accumulate(lambda x: to_float32(x.astype(jnp.bfloat16).sum()), 1024, jnp.ones(1024))
    assert grads.dtype == np.float32
    assert float(grads) == 1.0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("n", "value"), [(1000, 1e-3), (1024, 2.0**-10)])
def test_many_small_half_gradients_are_averaged_in_float32(dtype, n, value):
    grads = accumulate(lambda x: to_float32(x.sum()), n, jnp.full(n, value, dtype))
    np.testing.assert_allclose(float(grads), float(jnp.asarray(value, dtype)), rtol=1e-5)


def test_a_sum_of_a_thousand_small_halves_under_a_policy_is_right():
    total = mpjax.autocast(jnp.sum, F16_MIXED)
    assert float(total(jnp.full(1024, 2.0**-10, jnp.float16))) == 1.0
    assert abs(float(total(jnp.full(1000, 1e-3, jnp.float16))) - 1.0004) < 1e-3


def test_two_microbatches_of_gradient_one_average_to_one():
    assert float(accumulate(jnp.sum, 2, jnp.ones(2))) == 1.0


def test_microbatches_are_disjoint_and_cover_the_batch():
    seen = accumulate(lambda x: jnp.zeros(8).at[x].add(1.0), 4, jnp.arange(8))
    np.testing.assert_array_equal(seen * 4, np.ones(8))


def test_all_leaves_of_a_batch_are_cut_alike():
    batch = {"x": jnp.arange(6.0), "y": jnp.arange(6)}
    grads = accumulate(lambda b: jnp.abs(b["x"] - b["y"].astype(jnp.float32)).sum(), 3, batch)
    assert float(grads) == 0.0


def test_each_microbatch_gets_a_key_of_its_own():
    _, results, _ = accumulate_microbatches(
        lambda c, b, r: ((c, {"u": jax.random.uniform(r)}), split(b.sum())),
        3,
        None,
        jnp.ones(3),
        jax.random.key(0),
    )
    expected = jnp.mean(jax.vmap(jax.random.uniform)(jax.random.split(jax.random.key(0), 3)))
    np.testing.assert_allclose(results["u"], expected, rtol=1e-6)
    assert float(results["u"]) != float(jax.random.uniform(jax.random.key(0)))


def test_results_are_averaged_if_floating_added_up_if_counts_and_anded_if_bools():
    def grad_fn(carry, batch, rng):
        del rng
        return (
            carry,
            {"loss": batch.sum(), "n": batch.astype(jnp.int32).sum(), "ok": batch.sum() < 3},
        ), split(batch.sum())

    _, results, _ = accumulate_microbatches(grad_fn, 4, None, jnp.asarray([1.0, 2.0, 3.0, 4.0]), None)
    assert float(results["loss"]) == 2.5
    assert int(results["n"]) == 10
    assert bool(results["ok"]) is False


def test_a_hundred_microbatches_of_a_hundred_correct_are_ten_thousand():
    def grad_fn(carry, batch, rng):
        del rng
        results = {"correct": batch.astype(jnp.int32).sum(), "accuracy": batch.mean().astype(jnp.float16)}
        return (carry, results), split(jnp.float32(0.0))

    _, results, _ = accumulate_microbatches(grad_fn, 100, None, jnp.ones(10000), None)
    assert int(results["correct"]) == 10000
    assert float(results["accuracy"]) == 1.0


def test_a_thousand_half_losses_are_averaged_in_float32():
    def grad_fn(carry, batch, rng):
        del rng
        return (carry, {"loss": batch.sum()}), split(jnp.float32(0.0))

    _, results, _ = accumulate_microbatches(grad_fn, 1000, None, jnp.full(1000, 2.3, jnp.float16), None)
    assert results["loss"].dtype == np.float32
    np.testing.assert_allclose(float(results["loss"]) * 1000, 1000 * float(jnp.float16(2.3)), rtol=1e-6)


def test_the_carry_goes_from_one_microbatch_to_the_next():
    def grad_fn(carry, batch, rng):
        del rng
        return (carry * 2 + batch.sum(), {}), split(batch.sum())

    carry, _, _ = accumulate_microbatches(grad_fn, 3, jnp.float32(0.0), jnp.asarray([1.0, 10.0, 100.0]), None)
    assert float(carry) == (1 * 2 + 10) * 2 + 100


@pytest.mark.parametrize(("shape", "steps"), [((6, 2), 4), ((3,), 2), ((), 2), ((1,), 3)])
def test_a_batch_that_cannot_be_cut_is_refused_with_leaf_and_shape(shape, steps):
    with pytest.raises(ValueError) as e:
        accumulate(lambda b: b["images"]["x"].sum(), steps, {"images": {"x": jnp.ones(shape)}})
    assert f"The batch cannot be cut into accumulate_steps={steps} equal parts" in str(e.value)
    assert f"leaf 'images/x' has shape {list(shape)}" in str(e.value)
    assert f"Its first axis must be a multiple of {steps}." in str(e.value)


# --------------------------------------------------------------------------------------------- fp8


def test_the_next_state_of_fp8_layers_is_not_unscaled():
    grads = {"params": {"w": jnp.float16(1024.0)}, OVERWRITE: {"dense": {"scale": jnp.float32(7.0)}}}
    out = unscale(static(1024.0), grads)
    assert float(out["params"]["w"]) == 1.0
    assert float(out[OVERWRITE]["dense"]["scale"]) == 7.0


def test_the_next_state_of_fp8_layers_is_the_largest_of_all_replicas_not_their_mean():
    average = jax.vmap(
        lambda x: average_state({"params": x, OVERWRITE: x}, None, Reduction("i")), axis_name="i"
    )
    out = average(jnp.asarray([1.0, 2.0, 6.0]))
    np.testing.assert_array_equal(out["params"], [3.0] * 3)
    np.testing.assert_array_equal(out[OVERWRITE], [6.0] * 3)


def test_the_next_state_of_fp8_layers_is_the_largest_of_all_microbatches_not_their_mean():
    grads = accumulate(
        lambda x: {"params": x.sum(), OVERWRITE: {"scale": x.max()}}, 3, jnp.asarray([1.0, 2.0, 6.0])
    )
    assert float(grads["params"]) == 3.0
    assert float(grads[OVERWRITE]["scale"]) == 6.0


# --------------------------------------------------------------------------------------------- x64


@pytest.mark.parametrize("policy", ["float32", F16_MIXED, BF16_MIXED])
def test_no_float64_appears_when_x64_is_enabled(policy):
    with jax.enable_x64(True):
        fn = mpjax.value_and_grad(lambda w, x: ((x @ w) ** 2).astype(jnp.float32).mean(), policy)
        scale = mpjax.DynamicLossScale(2.0**10, period=1)
        value, grads, finite = fn(scale, jnp.ones((2, 2), jnp.float32), jnp.ones((3, 2), jnp.float32))
        scale = scale.adjust(finite)
        dtypes = {x.dtype.name for x in jax.tree.leaves((value, grads, scale))}
    assert dtypes == {"float32", "int32"}
