import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import FrozenDict
from hypothesis import given
from hypothesis import strategies as st
from trees import FLOATS, Layer, Pair, is_floating_array, same, trees

import mpjax
from mpjax._precision import casting

dtype_names = st.sampled_from(FLOATS)


@given(trees(), dtype_names)
def test_only_floating_arrays_are_cast_and_all_else_is_the_same_object(tree, dtype):
    out = mpjax.cast_floating(tree, dtype)
    assert jax.tree.structure(out) == jax.tree.structure(tree)
    for before, after in zip(jax.tree.leaves(tree), jax.tree.leaves(out), strict=True):
        if is_floating_array(before) and before.dtype != dtype:
            assert after.dtype == dtype
            assert same(after, before.astype(dtype))
        else:
            assert after is before


@given(trees(), dtype_names)
def test_numpy_stays_numpy_and_jax_stays_jax(tree, dtype):
    out = mpjax.cast_floating(tree, dtype)
    for before, after in zip(jax.tree.leaves(tree), jax.tree.leaves(out), strict=True):
        assert isinstance(before, np.ndarray) == isinstance(after, np.ndarray)
        assert isinstance(before, jax.Array) == isinstance(after, jax.Array)


@given(trees(), dtype_names)
def test_casting_twice_changes_nothing_more(tree, dtype):
    once = mpjax.cast_floating(tree, dtype)
    again = mpjax.cast_floating(once, dtype)
    for a, b in zip(jax.tree.leaves(once), jax.tree.leaves(again), strict=True):
        assert a is b


@given(trees(), st.sampled_from(("float16", "bfloat16")))
def test_widening_and_narrowing_again_gives_every_bit_back(tree, dtype):
    narrow = mpjax.cast_floating(tree, dtype)
    assert same(mpjax.cast_floating(mpjax.cast_to_full(narrow), dtype), narrow)


@pytest.mark.parametrize(
    "container",
    [
        lambda x: {"a": x},
        lambda x: FrozenDict({"a": x}),
        lambda x: (x,),
        lambda x: [x],
        lambda x: Pair(x, None),
        lambda x: Layer(x, None),
    ],
)
def test_a_container_comes_back_as_it_went_in(container):
    tree = container(jnp.ones(2))
    out = mpjax.cast_to_half(tree)
    assert type(out) is type(tree)
    assert same(out, container(jnp.ones(2, jnp.float16)))


@pytest.mark.parametrize("empty", [{}, (), [], None, FrozenDict({}), {"a": {}, "b": ()}])
def test_empty_containers_come_back_as_they_are(empty):
    assert mpjax.cast_to_half(empty) == empty
    assert type(mpjax.cast_to_half(empty)) is type(empty)


@pytest.mark.parametrize("value", [1.5, 2, True, "text", np.float32(1.5), np.float64(0.1), object()])
def test_python_numbers_and_numpy_scalars_are_left_alone(value):
    assert mpjax.cast_to_half({"a": value})["a"] is value


@pytest.mark.parametrize("dtype", [np.int8, np.uint32, np.bool_, np.complex64, jax.dtypes.float0])
def test_numpy_arrays_of_other_kinds_are_left_alone(dtype):
    x = np.zeros(2, dtype)
    assert mpjax.cast_to_half(x) is x


@pytest.mark.parametrize("key", [jax.random.key, jax.random.PRNGKey])
def test_typed_and_raw_keys_are_left_alone(key):
    key = key(0)
    assert mpjax.cast_to_half({"rng": key})["rng"] is key


@pytest.mark.parametrize("token", [2909, 32001, 50257])
def test_token_ids_stay_exact(token):
    assert int(mpjax.cast_to_half(jnp.asarray([token]))[0]) == token


def test_narrow_formats_and_float64_are_cast_when_asked_for():
    tree = (jnp.ones(2, jnp.float8_e4m3fn), np.ones(2))
    assert [x.dtype.name for x in mpjax.cast_to_full(tree)] == ["float32", "float32"]
    assert mpjax.cast_floating(jnp.ones(2), jnp.float8_e5m2).dtype == jnp.float8_e5m2


def test_cast_to_half_follows_the_backend(monkeypatch):
    assert mpjax.cast_to_half(np.ones(2)).dtype == np.float16

    class Tpu:
        platform = "tpu"

    monkeypatch.setattr(jax, "local_devices", lambda: [Tpu()])
    assert mpjax.cast_to_half(np.ones(2)).dtype == jnp.bfloat16


def test_casting_runs_inside_jit():
    out = jax.jit(mpjax.cast_to_half)({"w": jnp.ones(2), "n": jnp.arange(2), "key": jax.random.key(0)})
    assert (out["w"].dtype, out["n"].dtype) == (jnp.float16, jnp.int32)
    assert jnp.issubdtype(out["key"].dtype, jax.dtypes.prng_key)


def test_the_gradient_of_a_cast_comes_back_in_the_dtype_of_what_was_cast():
    grad = jax.grad(lambda x: mpjax.cast_to_full(mpjax.cast_to_half(x)).sum())(jnp.ones(2))
    assert grad.dtype == jnp.float32
    np.testing.assert_array_equal(grad, [1.0, 1.0])


@given(trees())
def test_a_tree_that_is_cast_back_to_its_recorded_dtypes_has_them_again(tree):
    recorded = casting.dtypes_of(tree)
    back = casting.cast_to_dtypes(mpjax.cast_to_full(tree), recorded)
    assert casting.dtypes_of(back) == recorded


@given(trees())
def test_a_map_that_changes_no_leaf_returns_the_very_same_tree(tree):
    assert casting.map_changed(lambda x: x, tree) is tree


def test_recorded_dtypes_of_another_tree_are_not_applied():
    tree = (jnp.ones(2), jnp.ones(2))
    assert casting.cast_to_dtypes(tree, (np.dtype(np.float16),)) is tree
