"""`import mpjax as jmp` runs code written for jmp 0.0.4: both are called side by side."""

import inspect
import itertools
import pathlib
import types
import unittest
import warnings

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from programs import operand_dtypes
from promotion import standard_promotion
from trees import floating_arrays, same, trees

import mpjax

NAMES = ("bf16", "bfloat16", "f16", "float16", "full", "f32", "float32", "half")
BOTH = pytest.mark.parametrize("lib", [jmp, mpjax], ids=["jmp", "mpjax"])

# --------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize("name", jmp.__all__)
def test_every_public_name_of_jmp_exists(name):
    assert hasattr(mpjax, name)


@pytest.mark.parametrize("name", [n for n in jmp.__all__ if n != "LossScale"])
def test_every_public_callable_takes_the_arguments_of_jmps_in_the_same_order(name):
    theirs = inspect.signature(getattr(jmp, name)).parameters.values()
    ours = list(inspect.signature(getattr(mpjax, name)).parameters.values())
    for position, parameter in enumerate(theirs):
        mine = ours[position]
        assert mine.kind == parameter.kind
        assert (mine.default is inspect.Parameter.empty) <= (parameter.default is inspect.Parameter.empty)
        if isinstance(getattr(jmp, name), type):  # the names of dataclass fields are used as keywords
            assert mine.name == parameter.name
    for extra in ours[len(list(theirs)) :]:
        assert extra.default is not inspect.Parameter.empty


@pytest.mark.parametrize(
    ("cls", "method"),
    [
        *itertools.product(
            ["Policy"], ["cast_to_param", "cast_to_compute", "cast_to_output", "with_output_dtype"]
        ),
        *itertools.product(
            ["NoOpLossScale", "StaticLossScale", "DynamicLossScale"],
            ["scale", "unscale", "adjust", "loss_scale"],
        ),
    ],
)
def test_every_method_takes_the_arguments_of_jmps(cls, method):
    theirs, ours = (getattr(getattr(lib, cls), method, None) for lib in (jmp, mpjax))
    if callable(theirs):
        assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_loss_scale_is_an_instance_of_loss_scale(dynamic):
    assert isinstance(jmp.DynamicLossScale(2.0**15) if dynamic else jmp.NoOpLossScale(), jmp.LossScale)
    assert isinstance(mpjax.DynamicLossScale(2.0**15) if dynamic else mpjax.NoOpLossScale(), mpjax.LossScale)


# --------------------------------------------------------------------------------------------- jmp's tests

# What mpjax does otherwise on purpose, and where that is written.
DIFFERENT = {
    # A scale of zero is a ValueError (issue 2, "bad input").
    "test_static_empty_trees_StaticLossScale",
    # The table of names is not public.
    *(f"test_str{i}" for i in range(5)),
}


def _tests_of_jmp(name: str) -> types.ModuleType:
    """A test file of jmp's with `jmp` standing for mpjax."""
    source = (pathlib.Path(jmp.__file__).parent / "_src" / f"{name}_test.py").read_text()
    line = f"from jmp._src import {name} as jmp"
    assert line in source
    module = types.ModuleType(f"jmps_{name}_test")
    exec(source.replace(line, "import mpjax as jmp"), vars(module))
    return module


def _cases_of_jmp() -> list:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        suites = [
            unittest.defaultTestLoader.loadTestsFromModule(_tests_of_jmp(n)) for n in ("policy", "loss_scale")
        ]
    tests = [test for suite in suites for group in suite for test in group]
    return [pytest.param(t, id=t._testMethodName) for t in tests if t._testMethodName not in DIFFERENT]


# Tests of jmp's compare trees of two dtypes, and one computes what it expects in numpy, which overflows.
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("case", _cases_of_jmp())
def test_jmps_own_tests_pass_with_mpjax_in_its_place(case):
    result = unittest.TestResult()
    case.run(result)
    assert result.testsRun == 1
    assert not result.failures, result.failures[0][1]
    assert not result.errors, result.errors[0][1]


# --------------------------------------------------------------------------------------------- policies


def _same_policy(ours: mpjax.Policy, theirs: jmp.Policy) -> bool:
    return (ours.param_dtype, ours.compute_dtype, ours.output_dtype) == tuple(
        np.dtype(d) for d in (theirs.param_dtype, theirs.compute_dtype, theirs.output_dtype)
    )


dtype_names = st.sampled_from((*NAMES, "f64", "float64"))
parts = st.tuples(
    *(
        st.none() | st.builds("{}={}".format, st.sampled_from(keys), dtype_names)
        for keys in (("p", "params"), ("c", "compute"), ("o", "output"))
    )
).map(lambda found: [part for part in found if part])


@given(parts.filter(bool).flatmap(st.permutations).map(",".join) | dtype_names)
def test_get_policy_reads_every_string_of_the_grammar_as_jmp_does(text):
    ours, theirs = mpjax.get_policy(text), jmp.get_policy(text)
    assert _same_policy(ours, theirs)
    assert str(ours) == str(theirs)


@pytest.mark.parametrize(
    "text", ["", "compute_float16", "x=f32", "p=", "p=f32,", "p=f32,,c=bf16", "p=f33", "f 32", "p=f32=f32"]
)
def test_what_jmp_refuses_is_refused_with_the_same_type(text):
    with pytest.raises(ValueError):
        jmp.get_policy(text)
    with pytest.raises(ValueError):
        mpjax.get_policy(text)


@BOTH
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("q=f32", "Unknown key 'q' in 'q=f32' should be 'params', 'compute' or 'output'"),
        ("f3", "Unknown dtype 'f3'"),
    ],
)
def test_the_messages_have_jmps_key_words(lib, text, words):
    with pytest.raises(ValueError) as e:
        lib.get_policy(text)
    assert words in str(e.value)


def test_a_policy_is_made_from_positions_and_from_keywords():
    ours = mpjax.Policy(jnp.float32, jnp.bfloat16, jnp.float16)
    assert _same_policy(ours, jmp.Policy(jnp.float32, jnp.bfloat16, jnp.float16))
    assert ours == mpjax.Policy(param_dtype=jnp.float32, compute_dtype=jnp.bfloat16, output_dtype=jnp.float16)


@pytest.mark.parametrize("method", ["cast_to_param", "cast_to_compute", "cast_to_output"])
@given(tree=trees())
def test_the_methods_of_a_policy_cast_as_jmps(method, tree):
    text = "p=f32,c=bf16,o=f16"
    assert same(getattr(mpjax.get_policy(text), method)(tree), getattr(jmp.get_policy(text), method)(tree))


@pytest.mark.parametrize("name", ["cast_to_half", "cast_to_full"])
@given(tree=trees())
def test_the_casting_functions_cast_as_jmps(name, tree):
    assert same(getattr(mpjax, name)(tree), getattr(jmp, name)(tree))


def test_an_unchanged_jax_leaf_is_the_same_object_as_with_jmp():
    x = jnp.ones(2)
    assert jmp.cast_to_full({"w": x})["w"] is x
    assert mpjax.cast_to_full({"w": x})["w"] is x


def test_half_dtype_is_jmps():
    assert mpjax.half_dtype() is jmp.half_dtype()


# --------------------------------------------------------------------------------------------- loss scales


def test_the_factories_take_the_same_positions():
    args = (jnp.float32(8.0), jnp.int32(1), 3, 4, jnp.float32(2.0))
    ours, theirs = mpjax.DynamicLossScale(*args), jmp.DynamicLossScale(*args)
    for field in ("loss_scale", "counter", "period", "factor", "min_loss_scale"):
        assert getattr(ours, field) == getattr(theirs, field)


@pytest.mark.parametrize(
    "make",
    [
        lambda lib: lib.NoOpLossScale(),
        lambda lib: lib.StaticLossScale(2.0**10),
        lambda lib: lib.DynamicLossScale(2.0**15),
        lambda lib: lib.DynamicLossScale(jnp.float32(4.0), jnp.int32(3), 10, 2),
    ],
)
def test_the_leaves_are_jmps(make):
    assert [np.asarray(x).item() for x in jax.tree.leaves(make(mpjax))] == [
        np.asarray(x).item() for x in jax.tree.leaves(make(jmp))
    ]


def test_a_dynamic_scale_has_exactly_the_leaves_loss_scale_and_counter():
    scale = mpjax.DynamicLossScale(jnp.float32(4.0), jnp.int32(3))
    leaves = jax.tree.leaves(scale)
    assert len(leaves) == 2
    assert leaves[0] is scale.loss_scale
    assert leaves[1] is scale.counter


def test_a_static_scale_has_no_leaves():
    assert jax.tree.leaves(mpjax.StaticLossScale(8.0)) == []


@given(
    st.lists(st.booleans(), max_size=20),
    st.sampled_from((1, 2, 3, 5)),
    st.sampled_from((2, 4)),
    st.sampled_from((1.0, 0.25, 2.0**10)),
)
def test_a_dynamic_scale_follows_jmps_over_any_sequence(finite, period, factor, minimum):
    args = (jnp.float32(2.0**12), jnp.int32(0), period, factor, jnp.float32(minimum))
    ours, theirs = mpjax.DynamicLossScale(*args), jmp.DynamicLossScale(*args)
    for flag in finite:
        ours = ours.adjust(jnp.bool_(flag))
        with standard_promotion():  # jmp multiplies an int by a bool
            theirs = theirs.adjust(jnp.bool_(flag))
        assert float(ours.loss_scale) == float(theirs.loss_scale)
        assert int(ours.counter) == int(theirs.counter)


@pytest.mark.parametrize("cls", ["StaticLossScale", "DynamicLossScale"])
@pytest.mark.parametrize("method", ["scale", "unscale"])
@pytest.mark.parametrize("factor", [2.0**10, 3.0])
def test_float32_trees_are_scaled_and_unscaled_as_by_jmp(cls, method, factor):
    tree = {"w": jnp.asarray([1.0, -2.5, 1e-3]), "b": (jnp.float32(7.0), None)}
    ours, theirs = (getattr(getattr(lib, cls)(jnp.float32(factor)), method)(tree) for lib in (mpjax, jmp))
    assert same(ours, theirs)


@pytest.mark.parametrize("method", ["scale", "unscale"])
def test_no_scaling_returns_the_tree_itself(method):
    tree = {"w": jnp.ones(2)}
    assert getattr(mpjax.NoOpLossScale(), method)(tree) is tree
    assert mpjax.NoOpLossScale().loss_scale == jmp.NoOpLossScale().loss_scale == 1


@pytest.mark.parametrize("cls", ["NoOpLossScale", "StaticLossScale"])
def test_fixed_scales_adjust_to_themselves(cls):
    scale = getattr(mpjax, cls)(*([4.0] if cls == "StaticLossScale" else []))
    assert scale.adjust(jnp.bool_(False)) is scale


@BOTH
def test_a_python_float_is_taken_in_silence(lib):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lib.DynamicLossScale(2.0**15)
        lib.StaticLossScale(2.0**15)


@BOTH
@pytest.mark.parametrize("value", [2**15, jnp.int32(4), np.int64(4)], ids=["python", "jax", "numpy"])
def test_an_int_scale_warns(lib, value):
    with pytest.warns(UserWarning, match="Expected floating type for loss_scale, got int"):
        lib.DynamicLossScale(value)


@BOTH
def test_an_int_minimum_warns(lib):
    with pytest.warns(UserWarning, match="Expected floating type for min_loss_scale, got int32"):
        lib.DynamicLossScale(4.0, min_loss_scale=jnp.int32(1))


@BOTH
def test_a_static_int_scale_is_taken_in_silence(lib):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scale = lib.StaticLossScale(4)
    assert float(scale.scale(jnp.float32(1.5))) == 6.0


@BOTH
def test_a_finite_flag_that_is_no_scalar_is_an_assertion_error(lib):
    with pytest.raises(AssertionError, match="Expected boolean scalar"):
        lib.DynamicLossScale(4.0).adjust(jnp.ones(1, bool))


@BOTH
@pytest.mark.parametrize("pred", [jnp.ones(1, bool), jnp.ones([]), jnp.int32(1)])
def test_selecting_by_what_is_no_boolean_scalar_is_an_assertion_error(lib, pred):
    with pytest.raises(AssertionError, match="expected boolean scalar"):
        lib.select_tree(pred, {"a": jnp.ones(2)}, {"a": jnp.ones(2)})


arrays_of_numbers = st.builds(
    lambda dtype, value: jnp.asarray([1.0, value], dtype),
    st.sampled_from(("float32", "float16", "bfloat16")),
    st.sampled_from((0.0, 1.0, np.inf, -np.inf, np.nan)),
)


@given(trees(arrays_of_numbers))
def test_all_finite_decides_as_jmp_does(tree):
    ours = mpjax.all_finite(tree)
    assert same(ours, jmp.all_finite(tree))


@given(trees(floating_arrays), st.booleans())
def test_select_tree_selects_as_jmp_does(tree, pred):
    other = jax.tree.map(lambda x: x * 0, tree)
    args = (jnp.bool_(pred), tree, other)
    ours = mpjax.select_tree(*args)
    assert same(ours, jmp.select_tree(*args))
    assert same(jax.tree.map(jnp.asarray, ours), jax.tree.map(jnp.asarray, tree if pred else other))


@pytest.mark.usefixtures("standard_promotion")  # jmp multiplies an int by a bool
def test_jmps_training_loop_runs_unchanged():
    def train(lib):
        policy = lib.get_policy("params=float32,compute=float16,output=float32")
        loss_scale = lib.DynamicLossScale(jnp.asarray(2.0**15), period=2)

        @jax.jit
        def step(params, loss_scale, x):
            def loss_fn(params):
                params, inputs = policy.cast_to_compute((params, x))
                return loss_scale.scale(policy.cast_to_output(jnp.sum(inputs * params["w"])))

            grads = policy.cast_to_param(loss_scale.unscale(jax.grad(loss_fn)(params)))
            finite = lib.all_finite(grads)
            new = jax.tree.map(lambda p, g: p - 0.5 * g, params, grads)
            return lib.select_tree(finite, new, params), loss_scale.adjust(finite)

        params, scales = {"w": jnp.asarray([1.0, 2.0])}, []
        for x in ([1.0, 1.0], [1.0, 0.5], [np.inf, 1.0], [0.25, 0.25]):
            params, loss_scale = step(params, loss_scale, jnp.asarray(x))
            scales.append(float(loss_scale.loss_scale))
        return params, scales

    (ours, our_scales), (theirs, their_scales) = train(mpjax), train(jmp)
    assert our_scales == their_scales
    assert same(ours, theirs)
    np.testing.assert_array_equal(ours["w"], [-0.125, 1.125])


# --------------------------------------------------------------------------------------------- frameworks


@pytest.mark.parametrize("text", ["p=f32,c=bf16,o=f32", "p=bf16,c=f16,o=f32"])
def test_a_policy_works_in_haiku(text):
    policy = mpjax.get_policy(text)

    class Net(hk.Module):
        def __call__(self, x):
            seen.append(x.dtype)
            hidden = hk.Linear(4)(x)
            seen.append(hidden.dtype)
            return jax.nn.relu(hidden)

    seen: list = []
    net = hk.without_apply_rng(hk.transform(lambda x: Net()(x)))
    hk.mixed_precision.set_policy(Net, policy)
    try:
        params = net.init(jax.random.PRNGKey(0), jnp.ones((2, 3)))
        seen.clear()
        out = net.apply(params, jnp.ones((2, 3)))
    finally:
        hk.mixed_precision.clear_policy(Net)
    assert {x.dtype for x in jax.tree.leaves(params)} == {policy.param_dtype}
    assert seen == [policy.compute_dtype, policy.compute_dtype]
    assert out.dtype == policy.output_dtype


def test_an_equinox_model_follows_a_policy_through_autocast():
    model = eqx.nn.MLP(3, 2, width_size=4, depth=1, key=jax.random.key(0))
    run = mpjax.autocast(lambda model, x: jax.vmap(model)(x), "p=f32,c=bf16,o=f32")
    x = jnp.ones((5, 3))
    params, static = eqx.partition(model, eqx.is_array)

    def apply(params, x):
        return run(eqx.combine(params, static), x)

    assert operand_dtypes(apply, params, x) == [("bfloat16", "bfloat16")] * 2
    assert apply(params, x).dtype == jnp.float32
    np.testing.assert_allclose(apply(params, x), jax.vmap(model)(x), atol=0.02)
    grads = jax.grad(lambda params: apply(params, x).sum())(params)
    assert {g.dtype for g in jax.tree.leaves(grads)} == {np.dtype(np.float32)}
