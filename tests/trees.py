"""Random pytrees, and what the tests say about them."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.core import FrozenDict
from hypothesis import strategies as st

HALVES = ("float16", "bfloat16")
FLOATS = (*HALVES, "float32")
SHAPES = ((), (1,), (3,), (2, 2), (0,))


class Pair(NamedTuple):
    first: Any
    second: Any


@functools.partial(jax.tree_util.register_dataclass, data_fields=["weight", "bias"], meta_fields=["name"])
@dataclasses.dataclass(frozen=True)
class Layer:
    weight: Any
    bias: Any
    name: str = "layer"


def _array(shape: tuple[int, ...], dtype: str, value: float) -> jax.Array:
    return jnp.full(shape, value, dtype)


_shapes = st.sampled_from(SHAPES)
# Small multiples of a quarter: exact in every format with a handful of bits.
_values = st.integers(-8, 8).map(lambda n: n / 4)

floating_jax_arrays = st.builds(_array, _shapes, st.sampled_from(FLOATS), _values)
floating_numpy_arrays = st.builds(
    lambda shape, dtype, value: np.full(shape, value, jnp.dtype(dtype)),
    _shapes,
    st.sampled_from(FLOATS),
    _values,
)
floating_arrays = floating_jax_arrays | floating_numpy_arrays

other_leaves = st.one_of(
    st.builds(_array, _shapes, st.sampled_from(("int32", "uint8", "int8")), st.integers(0, 100)),
    st.builds(lambda shape: jnp.ones(shape, bool), _shapes),
    st.builds(lambda shape: np.arange(np.prod(shape, dtype=int)).reshape(shape), _shapes),
    st.integers(0, 9).map(jax.random.key),
    st.integers(0, 9).map(jax.random.PRNGKey),
    st.just(np.zeros((2,), jax.dtypes.float0)),
    st.integers(-5, 5),
    st.booleans(),
    st.none(),
)


def _containers(children: st.SearchStrategy) -> st.SearchStrategy:
    names = st.sampled_from(("a", "b", "kernel"))
    return st.one_of(
        st.dictionaries(names, children, max_size=3),
        st.dictionaries(names, children, max_size=3).map(FrozenDict),
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        st.builds(Pair, children, children),
        st.builds(Layer, children, children),
    )


def trees(leaves: st.SearchStrategy = floating_arrays | other_leaves) -> st.SearchStrategy:
    """Nested dicts, FrozenDicts, lists, tuples, named tuples and dataclasses, empty ones included."""
    return st.recursive(leaves, _containers, max_leaves=6)


def is_floating_array(x: Any) -> bool:
    """What mpjax may cast; spelled out here so that the tests do not ask mpjax."""
    return isinstance(x, (np.ndarray, jax.Array)) and str(x.dtype) in (*FLOATS, "float64")


def same(a: Any, b: Any) -> bool:
    """Whether two trees agree in structure, dtypes, kinds of leaves and in every bit."""
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        map(_same_leaf, jax.tree.leaves(a), jax.tree.leaves(b))
    )


def _same_leaf(a: Any, b: Any) -> bool:
    if not hasattr(a, "dtype"):
        return type(a) is type(b) and a == b
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return bits(a) == bits(b)


def bits(x: Any) -> bytes:
    """The very bits of an array, so that NaN equals itself and -0 differs from 0."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x).tobytes()
