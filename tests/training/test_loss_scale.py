import pickle
import warnings

import flax.jax_utils
import flax.serialization
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest
from flax.core import FrozenDict
from hypothesis import given, settings
from hypothesis import strategies as st
from trees import floating_arrays, is_floating_array, other_leaves, same, trees

import mpjax
from mpjax._training.loss_scale import DEFAULT_MAX_LOSS_SCALE, as_loss_scale

F16, BF16, F32 = np.dtype(np.float16), np.dtype(jnp.bfloat16), np.dtype(np.float32)
GOOD, BAD = jnp.bool_(True), jnp.bool_(False)
SCALES = pytest.mark.parametrize(
    "make",
    [
        lambda: mpjax.NoOpLossScale(),
        lambda: mpjax.StaticLossScale(2.0**15),
        lambda: mpjax.DynamicLossScale(2.0**15),
    ],
    ids=["none", "static", "dynamic"],
)
SCALING = pytest.mark.parametrize("cls", [mpjax.StaticLossScale, mpjax.DynamicLossScale])


def run(scale, flags):
    """The factor after each of the flags."""
    factors = []
    for finite in flags:
        scale = scale.adjust(jnp.bool_(finite))
        factors.append(float(scale.loss_scale))
    return factors


# --------------------------------------------------------------------------------------------- growth, backoff


@pytest.mark.parametrize("period", [1, 2, 3, 20])
def test_the_scale_grows_after_exactly_n_finite_steps(period):
    scale = mpjax.DynamicLossScale(10.0, period=period)
    assert run(scale, [True] * (2 * period)) == [10.0] * (period - 1) + [20.0] * period + [40.0]


def test_the_counter_counts_finite_steps_and_starts_again_after_a_growth():
    scale, counters = mpjax.DynamicLossScale(8.0, period=3), []
    for _ in range(4):
        scale = scale.adjust(GOOD)
        counters.append(int(scale.counter))
    assert counters == [1, 2, 0, 1]


def test_a_bad_step_halves_the_scale_and_starts_the_count_again():
    scale = mpjax.DynamicLossScale(8.0, period=2)
    assert run(scale, [True, False, True, True]) == [8.0, 4.0, 4.0, 8.0]


@pytest.mark.parametrize(
    ("factor", "grown", "backed_off"), [(2, 20.0, 5.0), (4, 40.0, 2.5), (1.25, 12.5, 8.0)]
)
def test_the_factor_is_the_same_both_ways(factor, grown, backed_off):
    scale = mpjax.DynamicLossScale(10.0, period=1, factor=factor)
    assert run(scale, [True]) == [grown]
    assert run(scale, [False]) == [backed_off]


def test_the_default_scale_is_two_to_the_15_growing_every_2000_steps():
    scale = mpjax.DynamicLossScale()
    assert (float(scale.loss_scale), int(scale.counter)) == (2.0**15, 0)
    assert (scale.period, scale.factor, scale.hysteresis) == (2000, 2, 1)
    assert (scale.min_loss_scale, scale.max_loss_scale) == (1.0, 2.0**126)


def test_the_default_scale_and_its_growth_are_powers_of_two_so_that_unscaling_is_exact():
    scale = mpjax.DynamicLossScale(period=1)
    grads = {"w": jnp.asarray([1.2345678, -3e-5])}
    for _ in range(20):
        assert np.frexp(float(scale.loss_scale))[0] == 0.5
        assert same(scale.unscale(scale.scale(grads)), grads)
        scale = scale.adjust(GOOD)


def test_always_finite_gradients_never_take_the_scale_to_infinity():
    scale = jax.lax.fori_loop(
        0,
        200,
        lambda _, s: s.adjust(GOOD),
        mpjax.DynamicLossScale(jnp.float32(2.0**16), jnp.int32(0), period=1),
    )
    assert float(scale.loss_scale) == 2.0**126
    assert float(scale.unscale(scale.scale(jnp.float32(1.5)))) == 1.5


def test_the_largest_default_scale_has_a_normal_inverse():
    assert np.finfo(np.float32).smallest_normal <= 1 / DEFAULT_MAX_LOSS_SCALE


@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize("finite", [GOOD, BAD])
def test_a_scale_that_became_non_finite_recovers_to_its_default(value, finite):
    scale = mpjax.DynamicLossScale(jnp.float32(value)).adjust(finite)
    assert float(scale.loss_scale) == 2.0**15


@pytest.mark.parametrize(("low", "high", "recovered"), [(2.0**16, 2.0**20, 2.0**16), (1.0, 256.0, 256.0)])
def test_a_recovered_scale_lies_within_its_limits(low, high, recovered):
    scale = mpjax.DynamicLossScale(jnp.float32(np.nan), min_loss_scale=low, max_loss_scale=high)
    assert run(scale, [True]) == [recovered]


def test_the_scale_stops_at_its_maximum():
    scale = mpjax.DynamicLossScale(4.0, period=1, max_loss_scale=16.0)
    assert run(scale, [True] * 4) == [8.0, 16.0, 16.0, 16.0]


def test_the_scale_stops_at_its_minimum_of_one():
    assert run(mpjax.DynamicLossScale(4.0), [False] * 4) == [2.0, 1.0, 1.0, 1.0]


def test_a_custom_minimum_survives_six_bad_jitted_steps():
    step = jax.jit(lambda scale: scale.adjust(BAD))
    scale = mpjax.DynamicLossScale(4.0, min_loss_scale=2.0**-10)
    for _ in range(6):
        scale = step(scale)
    assert float(scale.loss_scale) == 0.0625


def test_hysteresis_lets_that_many_bad_steps_less_one_pass():
    scale = mpjax.DynamicLossScale(16.0, hysteresis=3)
    assert run(scale, [False, False, False, False]) == [16.0, 16.0, 8.0, 4.0]


def test_a_finite_step_in_between_gives_hysteresis_all_its_patience_back():
    scale = mpjax.DynamicLossScale(16.0, hysteresis=2)
    assert run(scale, [False, True, False, True, False, False]) == [16.0, 16.0, 16.0, 16.0, 16.0, 8.0]


def test_a_bad_step_that_hysteresis_lets_pass_still_ends_the_streak_of_finite_ones():
    scale = mpjax.DynamicLossScale(16.0, period=2, hysteresis=2)
    assert run(scale, [True, False, True, True]) == [16.0, 16.0, 16.0, 32.0]


@st.composite
def scale_settings(draw):
    low, high = sorted(draw(st.lists(st.integers(-10, 40), min_size=2, max_size=2)))
    return {
        "start": 2.0 ** draw(st.integers(low, high)),
        "period": draw(st.integers(1, 4)),
        "factor": draw(st.sampled_from((2, 4, 8))),
        "min_loss_scale": 2.0**low,
        "max_loss_scale": 2.0**high,
        "hysteresis": draw(st.integers(1, 3)),
    }


def reference(flags, start, period, factor, min_loss_scale, max_loss_scale, hysteresis):
    """The rule in plain Python: the factor after each finite."""
    factor_now, good, bad, factors = start, 0, 0, []
    for finite in flags:
        if finite:
            good, bad = good + 1, 0
            if good == period:
                factor_now, good = min(factor_now * factor, max_loss_scale), 0
        else:
            good, bad = 0, bad + 1
            if bad >= hysteresis:
                factor_now = max(factor_now / factor, min_loss_scale)
        factors.append(factor_now)
    return factors


@settings(max_examples=15)  # each example compiles a step of its own
@given(scale_settings(), st.lists(st.booleans(), min_size=1, max_size=60))
def test_any_sequence_of_flags_moves_the_scale_as_the_rule_says(given_settings, flags):
    start = given_settings.pop("start")
    scale = mpjax.DynamicLossScale(start, **given_settings)
    traces = []

    @jax.jit
    def step(scale, finite):
        traces.append(None)
        return scale.adjust(finite)

    factors = []
    for finite in flags:
        scale = step(scale, finite)
        assert scale.loss_scale.dtype == np.float32
        assert scale.loss_scale.shape == ()
        assert scale.counter.dtype == np.int32
        assert given_settings["min_loss_scale"] <= float(scale.loss_scale) <= given_settings["max_loss_scale"]
        factors.append(float(scale.loss_scale))
    assert factors == reference(flags, start, **given_settings)
    assert len(traces) == 1


@given(scale_settings(), st.lists(st.booleans(), max_size=10))
def test_settings_survive_flattening_at_every_step(given_settings, flags):
    start = given_settings.pop("start")
    scale = mpjax.DynamicLossScale(start, **given_settings)
    for finite in flags:
        scale = jax.tree.unflatten(jax.tree.structure(scale), jax.tree.leaves(scale)).adjust(
            jnp.bool_(finite)
        )
    assert {name: getattr(scale, name) for name in given_settings} == given_settings


# --------------------------------------------------------------------------------------------- float32


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(65536.0, id="python"),
        pytest.param(np.float64(65536), id="float64"),
        pytest.param(jnp.bfloat16(65536), id="bfloat16"),
        pytest.param(np.asarray(65536.0), id="numpy"),
        pytest.param(jnp.float32(65536), id="float32"),
    ],
)
@SCALING
def test_the_scale_is_float32_whatever_it_was_made_from(cls, value):
    scale = cls(value)
    assert jnp.asarray(scale.loss_scale).dtype == np.float32
    assert scale.loss_scale.dtype == np.float32
    assert float(scale.loss_scale) == 65536.0


@SCALING
def test_a_half_precision_loss_is_scaled_in_float32_where_65536_is_finite(cls):
    scaled = cls(65536.0).scale(jnp.float16(1.0))
    assert scaled.dtype == np.float32
    assert float(scaled) == 65536.0


@SCALING
def test_unscaling_casts_up_first(cls):
    unscaled = cls(32768.0).unscale(jnp.float16(1e-3))
    assert unscaled.dtype == np.float32
    assert float(unscaled) == np.float32(3.0529918e-8)


@SCALING
def test_a_gradient_that_float16_cannot_hold_unscaled_is_kept(cls):
    assert float(cls(2.0**15).unscale(jnp.float16(2.0**-10))) == 2.0**-25


@SCALING
def test_float64_leaves_keep_their_width(cls):
    with jax.enable_x64(True):
        scale = cls(8.0)
        for method in (scale.scale, scale.unscale):
            assert method(jnp.ones(2, jnp.float64)).dtype == np.float64


@SCALING
def test_complex_leaves_are_scaled(cls):
    np.testing.assert_array_equal(cls(4.0).unscale(jnp.asarray([4 + 8j], jnp.complex64)), [1 + 2j])


@SCALING
@given(tree=trees(other_leaves | floating_arrays))
def test_leaves_that_are_not_floating_pass_through_scale_and_unscale(cls, tree):
    scale = cls(4.0)
    for method, factor in ((scale.scale, 4.0), (scale.unscale, 0.25)):
        out = method(tree)
        assert jax.tree.structure(out) == jax.tree.structure(tree)
        for before, after in zip(jax.tree.leaves(tree), jax.tree.leaves(out), strict=True):
            if is_floating_array(before):
                assert after.dtype == np.float32
                np.testing.assert_array_equal(np.asarray(after), np.asarray(before, np.float32) * factor)
            else:
                assert after is before


@given(trees(floating_arrays), st.integers(-10, 30))
def test_unscaling_what_was_scaled_by_a_power_of_two_gives_the_float32_values_back(tree, exponent):
    scale = mpjax.DynamicLossScale(2.0**exponent, min_loss_scale=2.0**-20)
    for before, after in zip(
        jax.tree.leaves(tree), jax.tree.leaves(scale.unscale(scale.scale(tree))), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(after), np.asarray(before, np.float32))


@SCALING
@pytest.mark.parametrize("kind", [dict, FrozenDict])
def test_dicts_and_frozen_dicts_come_back_as_they_went_in(cls, kind):
    tree = kind({"w": jnp.ones(2, jnp.float16)})
    assert type(cls(4.0).unscale(cls(4.0).scale(tree))) is kind


@SCALING
def test_a_python_float_is_scaled(cls):
    assert cls(4.0).scale(1.5) == 6.0
    assert cls(4.0).unscale(6.0) == 1.5


@SCALING
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_infinity_and_nan_stay_visible(cls, value):
    out = cls(4.0).unscale(jnp.asarray([value, 4.0], jnp.float16))
    np.testing.assert_array_equal(out, np.asarray([value, 1.0], np.float32))


# --------------------------------------------------------------------------------------------- tracing


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(8, id="int"),
        pytest.param(8.0, id="float"),
        pytest.param(np.float64(8), id="numpy"),
        pytest.param(np.float32(8), id="numpy32"),
        pytest.param(jnp.float32(8), id="jax"),
    ],
)
def test_four_steps_take_one_trace_whatever_the_scale_was_built_from(value):
    traces = []

    @jax.jit
    def step(scale, x):
        traces.append(None)
        return scale.adjust(jnp.isfinite(scale.scale(x)))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that an int is taken as float32
        scale = mpjax.DynamicLossScale(value, period=2)
    for _ in range(4):
        scale = step(scale, jnp.float32(1.0))
    assert float(scale.loss_scale) == 32.0
    assert len(traces) == 1


@SCALES
def test_every_loss_scale_can_be_lowered_and_compiled_ahead_of_time(make):
    step = jax.jit(lambda scale, x: (scale.unscale(scale.scale(x)), scale.adjust(jnp.isfinite(x))))
    scale = make()
    value, adjusted = step.lower(scale, jnp.float32(3.0)).compile()(scale, jnp.float32(3.0))
    assert float(value) == 3.0
    assert jax.tree.structure(adjusted) == jax.tree.structure(scale)


@SCALES
def test_every_loss_scale_passes_through_eval_shape(make):
    scale = make()
    assert jax.tree.structure(jax.eval_shape(lambda s: s.adjust(GOOD), scale)) == jax.tree.structure(scale)


def test_scales_that_are_stacked_run_under_vmap():
    stacked = jax.tree.map(lambda x: jnp.stack([jnp.asarray(x)] * 2), mpjax.DynamicLossScale(8.0))
    out = jax.vmap(lambda scale, finite: scale.adjust(finite))(stacked, jnp.asarray([True, False]))
    np.testing.assert_array_equal(out.loss_scale, [8.0, 4.0])
    np.testing.assert_array_equal(out.counter, [1, 0])


def test_a_scale_can_be_replicated_for_pmap():
    replicated = flax.jax_utils.replicate(mpjax.DynamicLossScale(8.0))
    out = jax.pmap(lambda scale: scale.adjust(BAD))(replicated)
    assert float(flax.jax_utils.unreplicate(out).loss_scale) == 4.0


@SCALES
def test_placeholders_in_the_place_of_leaves_are_taken(make):
    scale = make()
    for placeholder in (None, object(), "spec", jax.sharding.PartitionSpec()):
        mapped = jax.tree.map(lambda _: placeholder, scale)
        assert type(mapped) is type(scale)


def test_a_dynamic_scale_has_named_key_paths():
    paths = [
        jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(mpjax.DynamicLossScale())
    ]
    assert paths == [".loss_scale", ".counter"]


def test_limits_that_are_traced_are_refused_with_the_way_out():
    with pytest.raises(TypeError, match="min_loss_scale is part of the compiled program") as e:
        jax.jit(lambda low: mpjax.DynamicLossScale(4.0, min_loss_scale=low))(1.0)
    assert "Make the loss scale outside of jit and pass it in." in str(e.value)


@SCALES
def test_every_loss_scale_is_hashable_or_equal_by_structure_and_pickles(make):
    scale = make()
    copy = pickle.loads(pickle.dumps(scale))
    assert jax.tree.structure(copy) == jax.tree.structure(scale)
    assert float(copy.loss_scale) == float(scale.loss_scale)


@SCALING
def test_equal_static_settings_share_a_trace_and_others_do_not(cls):
    traces = []

    @jax.jit
    def f(scale):
        traces.append(None)
        return scale.scale(jnp.float32(1.0))

    if cls is mpjax.StaticLossScale:
        values = [f(cls(2.0)), f(cls(jnp.float32(2.0))), f(cls(4.0))]
        assert [float(v) for v in values] == [2.0, 2.0, 4.0]
    else:
        values = [f(cls(2.0)), f(cls(4.0)), f(cls(4.0, period=7))]
        assert [float(v) for v in values] == [2.0, 4.0, 4.0]
    assert len(traces) == 2


# --------------------------------------------------------------------------------------------- saving


CUSTOM = {"period": 40, "factor": 4, "min_loss_scale": 0.5, "max_loss_scale": 2.0**20, "hysteresis": 2}


def custom_scale():
    return mpjax.DynamicLossScale(jnp.float32(256.0), jnp.int32(17), **CUSTOM)


@pytest.mark.parametrize(
    "save_and_restore",
    [
        lambda s: flax.serialization.from_state_dict(
            mpjax.DynamicLossScale(), flax.serialization.to_state_dict(s)
        ),
        lambda s: flax.serialization.from_bytes(mpjax.DynamicLossScale(), flax.serialization.to_bytes(s)),
        lambda s: pickle.loads(pickle.dumps(s)),
    ],
    ids=["state dict", "bytes", "pickle"],
)
def test_a_restored_scale_is_identical_and_goes_on_in_the_same_trace(save_and_restore):
    traces = []

    @jax.jit
    def step(scale, finite):
        traces.append(None)
        return scale.adjust(finite)

    scale = step(custom_scale(), True)
    restored = save_and_restore(scale)
    assert isinstance(restored.loss_scale, jax.Array)
    assert isinstance(restored.counter, jax.Array)
    assert same(restored, scale)
    assert (float(restored.loss_scale), int(restored.counter)) == (256.0, 18)
    for finite in [True] * 22 + [False] * 3:
        restored, scale = step(restored, finite), step(scale, finite)
        assert same(restored, scale)
    assert len(traces) == 1


@pytest.mark.parametrize("field", ["loss_scale", "counter"])
def test_a_state_without_a_scale_or_counter_is_refused(field):
    state = flax.serialization.to_state_dict(custom_scale())
    del state[field]
    with pytest.raises(ValueError) as e:
        flax.serialization.from_state_dict(custom_scale(), state)
    assert f"The restored loss scale has no '{field}'" in str(e.value)
    assert "state.replace(loss_scale=mpjax.DynamicLossScale())" in str(e.value)


@pytest.mark.parametrize("value", [np.nan, np.inf, 0.0, -4.0])
def test_a_restored_scale_that_is_of_no_use_is_refused(value):
    state = flax.serialization.to_state_dict(custom_scale()) | {"loss_scale": np.float32(value)}
    with pytest.raises(ValueError) as e:
        flax.serialization.from_state_dict(custom_scale(), state)
    assert f"The restored loss scale is {value}; it must be a positive finite number" in str(e.value)
    assert "Start with a new one" in str(e.value)


def test_fixed_scales_have_empty_state_dicts():
    for scale in (mpjax.NoOpLossScale(), mpjax.StaticLossScale(8.0)):
        state = flax.serialization.to_state_dict(scale)
        assert state == {}
        assert flax.serialization.from_state_dict(scale, state) == scale


def test_a_state_that_was_saved_without_a_scale_is_refused_by_a_dynamic_one():
    state = flax.serialization.to_state_dict(mpjax.NoOpLossScale())
    with pytest.raises(ValueError, match="has no 'loss_scale'"):
        flax.serialization.from_state_dict(mpjax.DynamicLossScale(), state)


# --------------------------------------------------------------------------------------------- choosing


@pytest.mark.parametrize(
    ("policies", "cls"),
    [
        ("p=f32,c=f16,o=f32", mpjax.DynamicLossScale),
        ("f16", mpjax.DynamicLossScale),
        ("p=f32,c=bf16,o=f32", mpjax.NoOpLossScale),
        ("f32", mpjax.NoOpLossScale),
        ("p=f16,c=f32,o=f16", mpjax.NoOpLossScale),
        ({".*attn": "c=f16", "*": "c=bf16"}, mpjax.DynamicLossScale),
        ({".*attn": "c=f32", "*": "c=bf16"}, mpjax.NoOpLossScale),
        (mpjax.PolicyMap({".*attn": "c=bf16"}, default="mixed_float16"), mpjax.DynamicLossScale),
        (jmp.get_policy("c=f16"), mpjax.DynamicLossScale),
    ],
)
def test_the_scale_is_dynamic_when_any_region_computes_in_float16(policies, cls):
    assert type(mpjax.loss_scale_for(policies)) is cls


def test_jmps_scales_are_taken_over_with_their_numbers():
    assert as_loss_scale(jmp.NoOpLossScale()) == mpjax.NoOpLossScale()
    assert as_loss_scale(jmp.StaticLossScale(8.0)) == mpjax.StaticLossScale(8.0)
    ours = as_loss_scale(jmp.DynamicLossScale(jnp.float32(8.0), jnp.int32(3), 7, 4, jnp.float32(0.5)))
    assert isinstance(ours, mpjax.DynamicLossScale)
    assert (float(ours.loss_scale), int(ours.counter)) == (8.0, 3)
    assert (ours.period, ours.factor, ours.min_loss_scale) == (7, 4, 0.5)


@SCALES
def test_our_scales_are_taken_as_they_are(make):
    scale = make()
    assert as_loss_scale(scale) is scale


def test_a_scale_of_ones_own_is_taken():
    class Mine:
        loss_scale = 2.0

        def scale(self, tree):
            return tree

        def unscale(self, tree):
            return tree

        def adjust(self, grads_finite):
            return self

    scale = Mine()
    assert as_loss_scale(scale) is scale


@pytest.mark.parametrize("value", [1024.0, "dynamic", None, mpjax.DynamicLossScale])
def test_what_is_no_loss_scale_is_refused(value):
    with pytest.raises(TypeError) as e:
        as_loss_scale(value)
    assert repr(value) in str(e.value)
    assert "mpjax.StaticLossScale(factor)" in str(e.value)


# --------------------------------------------------------------------------------------------- bad input


@SCALING
@pytest.mark.parametrize("value", [0.0, -1.0, np.inf, np.nan])
def test_a_scale_that_is_not_positive_and_finite_is_refused(cls, value):
    with pytest.raises(ValueError, match="loss_scale must be a positive finite number, got ") as e:
        cls(value)
    assert "Use 2.0**15, say, or mpjax.NoOpLossScale() for no scaling." in str(e.value)
    assert f"got {value}" in str(e.value)


@SCALING
def test_a_scale_beyond_float32_is_refused(cls):
    with pytest.raises(ValueError, match="loss_scale must be a positive finite number, got inf"):
        cls(1e39)


@SCALING
@pytest.mark.parametrize("value", [np.ones(3), [1.0, 2.0], jnp.ones((1,))])
def test_a_scale_that_is_no_scalar_is_refused_with_its_shape(cls, value):
    with pytest.raises(ValueError, match=r"loss_scale must be a scalar of shape \[\], got shape \["):
        cls(value)


@SCALING
@pytest.mark.parametrize("value", ["2", None])
def test_a_scale_that_is_no_number_is_refused(cls, value):
    with pytest.raises(TypeError, match="loss_scale must be a positive finite number, got "):
        cls(value)


@pytest.mark.parametrize(
    ("settings", "quoted"),
    [
        ({"min_loss_scale": 8.0, "max_loss_scale": 4.0}, "min_loss_scale=8.0 and max_loss_scale=4.0"),
        ({"min_loss_scale": -1.0}, "min_loss_scale=-1.0"),
        ({"max_loss_scale": np.inf}, "max_loss_scale=inf"),
        ({"min_loss_scale": np.nan}, "min_loss_scale=nan"),
    ],
)
def test_limits_that_cannot_be_are_refused(settings, quoted):
    with pytest.raises(ValueError) as e:
        mpjax.DynamicLossScale(4.0, **settings)
    assert "Expected 0 <= min_loss_scale <= max_loss_scale < inf, got" in str(e.value)
    assert quoted in str(e.value)


@pytest.mark.parametrize(
    ("settings", "quoted"),
    [({"period": 0}, "period=0"), ({"factor": 1}, "factor=1"), ({"hysteresis": 0}, "hysteresis=0")],
)
def test_settings_that_cannot_be_are_refused(settings, quoted):
    with pytest.raises(ValueError) as e:
        mpjax.DynamicLossScale(4.0, **settings)
    assert "Expected period >= 1, factor > 1 and hysteresis >= 1" in str(e.value)
    assert quoted in str(e.value)
