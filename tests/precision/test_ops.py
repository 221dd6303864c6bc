"""The table of operations: that JAX has what it names, that its rules are in force, and that the docs agree."""

import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import operations_page
import pytest
from jax import lax
from jax.extend.core import Primitive
from programs import trace

import mpjax
from mpjax._precision import jax_internals, ops, rules
from mpjax._precision.ops import Trait

BF16, F16 = "p=f32,c=bf16,o=f32", "p=f32,c=f16,o=f32"
ROOT = pathlib.Path(__file__).parent.parent.parent
# What the older versions of JAX that mpjax supports do not have.
NEWER = {"fma", "fmuladd", "polynomial"}


def primitives_of_jax() -> dict[str, Primitive]:
    """All of them, also those that only JAX's own modules hold."""
    modules = [module for name, module in sorted(sys.modules.items()) if name.startswith("jax")]
    found = (x for module in modules for x in list(vars(module).values()) if isinstance(x, Primitive))
    return {primitive.name: primitive for primitive in found}


# ------------------------------------------------------------------------------------------- the table


def test_each_operation_has_one_row_and_a_reason():
    names = [row.name for row in ops.TABLE]
    assert len(names) == len(set(names))
    assert all(row.why and row.why == row.why.strip(". ") for row in ops.TABLE)


@pytest.mark.parametrize("row", ops.TABLE, ids=lambda row: row.name)
def test_an_operation_of_the_table_is_a_primitive_of_jax_that_its_rule_is_around(row):
    known = primitives_of_jax()
    if row.name in NEWER - set(known):
        pytest.skip(f"jax {jax.__version__} has no {row.name}")
    primitive = known[row.name]
    assert getattr(primitive.bind, "rule", None) is row.rule
    if row.rule is not None:
        assert jax_internals.primitives()[row.name] is primitive


def test_every_matmul_and_multiplication_of_jax_has_a_row():
    names = primitives_of_jax()
    multiplies = {
        n for n in names if re.search(r"dot|matmul|conv_|product|^mul$|ormqr|^fma|^fmul|polynomial", n)
    }
    assert {"dot_general", "scaled_dot", "ragged_dot_general"} <= multiplies
    assert multiplies - {row.name for row in ops.TABLE} == set()


def test_traits_are_asked_for_one_or_several_at_a_time():
    assert ops.with_trait(Trait.MATMUL) == {"dot_general", "conv_general_dilated", "ragged_dot_general"}
    assert ops.with_trait(Trait.ADDITION) == {"add", "sub", "add_any"}
    assert ops.with_trait(Trait.ADDITION | Trait.SUM) == ops.with_trait(Trait.ADDITION) | ops.with_trait(
        Trait.SUM
    )
    assert ops.with_trait(Trait.NONE) == frozenset()


def test_an_operation_that_is_coarse_in_16_bits_runs_in_float32_under_a_policy():
    in_float32 = {rules.float32_rule, rules.float32_elementwise_rule, rules.scatter_add_rule}
    for row in ops.TABLE:
        if row.traits & (Trait.NARROW_RANGE | Trait.SUM):
            assert row.rule in in_float32


OF_THREE = {"clamp", "select_n", "concatenate", "fma", "fmuladd"}  # which have tests of their own
BINARY = [row.name for row in ops.TABLE if row.rule is rules.mixed_rule and row.name not in OF_THREE]


@pytest.mark.parametrize("name", BINARY)
def test_two_operands_of_different_dtypes_meet_in_float32(name):
    fn = mpjax.autocast(getattr(lax, name), BF16)
    half, full = jnp.ones(3, jnp.bfloat16), jnp.full(3, 2.0)
    for args in ((half, full), (full, half), (half, half.astype(jnp.float16))):
        (found,) = [e for e in trace(fn, *args) if e.primitive.name == name]
        assert {v.aval.dtype.name for v in found.invars} == {"float32"}
    (found,) = [e for e in trace(fn, half, half) if e.primitive.name == name]
    assert {v.aval.dtype.name for v in found.invars} == {"bfloat16"}


DECOMPOSITIONS = {
    "cholesky": lax.linalg.cholesky,
    "eig": lax.linalg.eig,
    "eigh": lax.linalg.eigh,
    "fft": jnp.fft.rfft,
    "householder_product": lambda a: lax.linalg.householder_product(a, a[0]),
    "lu": lax.linalg.lu,
    "qr": lax.linalg.qr,
    "schur": lax.linalg.schur,
    "svd": lax.linalg.svd,
    "triangular_solve": lambda a: lax.linalg.triangular_solve(a, a),
}


@pytest.mark.parametrize("name", [row.name for row in ops.TABLE if row.rule is rules.decomposition_rule])
def test_a_decomposition_of_a_16_bit_matrix_runs_in_float32_and_returns_16_bits(name):
    fn = mpjax.autocast(DECOMPOSITIONS[name], "bf16")
    matrix = jnp.asarray(np.eye(4), jnp.bfloat16)
    (found,) = [e for e in trace(fn, matrix) if e.primitive.name == name]
    assert {v.aval.dtype.name for v in found.invars} == {"float32"}
    results = jax.tree.leaves(jax.eval_shape(fn, matrix))
    assert not {"float32", "float64"} & {r.dtype.name for r in results}


# ------------------------------------------------------------------------------------ the documentation


def rows_of_the_readme() -> dict[str, list[str]]:
    """From each rule of the README's table to the operations that it names."""
    text = (ROOT / "README.md").read_text().partition("## What it does, exactly")[2]
    table = re.search(r"\| rule \| operations \|\n\|---\|---\|\n((?:\|.*\|\n)+)", text)
    assert table is not None
    cells = [line.strip("|\n ").split(" | ") for line in table[1].splitlines()]
    return {rule: re.findall(r"`([a-z][\w-]*)`", operations) for rule, operations in cells}


def test_the_readme_names_each_rule_and_under_it_operations_that_have_it():
    documented = rows_of_the_readme()
    assert list(documented) == list(dict.fromkeys(ops.DESCRIPTIONS.values()))
    rule_of = {row.name: ops.DESCRIPTIONS[row.rule] for row in ops.TABLE}
    for rule, names in documented.items():
        assert names
        assert {name: rule_of.get(name) for name in names} == dict.fromkeys(names, rule)


def test_the_readme_leaves_out_only_what_says_such_as_or_else():
    documented = rows_of_the_readme()
    open_ended = {ops.DESCRIPTIONS[rules.mixed_rule], ops.DESCRIPTIONS[None]}
    for row in ops.TABLE:
        rule = ops.DESCRIPTIONS[row.rule]
        assert rule in open_ended or row.name in documented[rule]


def test_the_page_of_operations_is_what_the_table_says():
    assert operations_page.PAGE.read_text() == operations_page.page(), (
        "docs/operations.md differs from the table in mpjax/_precision/ops.py; "
        "write it anew: python tests/operations_page.py"
    )


# --------------------------------------------------------------------------- operations that multiply


def unchanged(fn, *args, policy=BF16):
    """Whether the operations of a function are the same under a policy as without, dtypes included."""
    plain, under = (
        [(e.primitive.name, [v.aval.str_short() for v in (*e.invars, *e.outvars)]) for e in trace(f, *args)]
        for f in (fn, mpjax.autocast(fn, policy))
    )
    return plain == under


WAYS = pytest.mark.parametrize(
    "run",
    [
        lambda f, p: mpjax.autocast(f, p),
        lambda f, p: mpjax.autocast(jax.jit(f), p),
        lambda f, p: jax.jit(mpjax.autocast(f, p)),
    ],
    ids=["eager", "jit inside", "jit outside"],
)


def scaled_operands():
    values = np.random.default_rng(0).normal(size=(2, 8, 64))
    lhs, rhs = (jnp.asarray(100 * v, jnp.float8_e4m3fn) for v in values)
    lhs_scale, rhs_scale = (jnp.full((8, 2), s, jnp.float8_e8m0fnu) for s in (2.0**8, 2.0**3))
    return lhs, rhs, lhs_scale, rhs_scale


def scaled_dot(lhs, rhs, lhs_scale, rhs_scale):
    return lax.scaled_dot(
        lhs, rhs.T, lhs_scale=lhs_scale, rhs_scale=rhs_scale.T, preferred_element_type=jnp.float32
    )


@WAYS
@pytest.mark.parametrize("policy", [BF16, F16])
def test_a_scaled_matmul_is_left_alone_however_it_is_run(run, policy):
    """Its scales of 2**8 make numbers that float16 cannot hold: narrowed, the result is infinite."""
    args = scaled_operands()
    expected = jax.jit(scaled_dot)(*args)
    jax.clear_caches()
    np.testing.assert_array_equal(run(scaled_dot, policy)(*args), expected)
    assert np.abs(expected).max() > mpjax.limits("f16").max
    assert unchanged(scaled_dot, *args, policy=policy)


def scaled_matmul_of_cudnn(*args):
    stablehlo = pytest.importorskip("jax._src.cudnn.scaled_matmul_stablehlo")
    a, b, a_scale, b_scale = (x[None] for x in args)
    return stablehlo.scaled_matmul_wrapper(a, b, a_scale, b_scale, preferred_element_type=jnp.float32)


def test_a_scaled_matmul_of_cudnn_is_traced_unchanged():
    assert unchanged(scaled_matmul_of_cudnn, *scaled_operands())


@WAYS
def test_a_scaled_matmul_of_cudnn_is_left_alone_however_it_is_run(run):
    args = scaled_operands()
    try:
        expected = jax.jit(scaled_matmul_of_cudnn)(*args)
    except NotImplementedError as error:
        pytest.skip(f"jax {jax.__version__} cannot run it on CPUs: {error}")
    jax.clear_caches()
    np.testing.assert_array_equal(run(scaled_matmul_of_cudnn, F16)(*args), expected)


def dims(lhs_contract, rhs_contract, ragged, group):
    return lax.RaggedDotDimensionNumbers(((lhs_contract, rhs_contract), ([], [])), ragged, group)


@pytest.mark.parametrize(
    ("numbers", "lhs", "rhs"),
    [
        (dims([1], [1], [0], [0]), (6, 4), (2, 4, 3)),
        (dims([1], [0], [1], []), (4, 6), (6, 3)),
    ],
    ids=["ragged rows", "ragged contraction"],
)
def test_ragged_matmuls_take_the_compute_dtype_in_each_of_their_forms(numbers, lhs, rhs):
    def fn(x, w):
        return lax.ragged_dot_general(x, w, jnp.array([2, 4]), numbers)

    x, w = jnp.ones(lhs), jnp.ones(rhs)
    (found,) = [e for e in trace(mpjax.autocast(fn, BF16), x, w) if e.primitive.name == "ragged_dot_general"]
    assert [v.aval.dtype.name for v in (*found.invars[:2], *found.outvars)] == ["bfloat16"] * 3
    np.testing.assert_array_equal(mpjax.autocast(fn, BF16)(x, w), fn(x, w))


def test_the_product_of_a_matrix_with_itself_is_left_alone():
    assert unchanged(lambda x: lax.linalg.symmetric_product(x, jnp.zeros((4, 4))), jnp.ones((4, 6)))


def test_multiplying_by_the_orthogonal_factor_is_left_alone():
    if not hasattr(lax.linalg, "ormqr"):
        pytest.skip(f"jax {jax.__version__} has no public ormqr")
    assert unchanged(lambda x: lax.linalg.ormqr(x, x[0], x), jnp.eye(4))


@pytest.mark.parametrize("name", ["fma", "fmuladd"])
def test_a_fused_multiplication_takes_float32_where_its_operands_differ(name):
    fn = getattr(lax, name, None)
    if fn is None:
        pytest.skip(f"jax {jax.__version__} has no public {name}")
    half, full = jnp.ones(3, jnp.bfloat16), jnp.full(3, 2.0)
    (found,) = [e for e in trace(mpjax.autocast(fn, BF16), half, full, full) if e.primitive.name == name]
    assert {v.aval.dtype.name for v in found.invars} == {"float32"}
    assert unchanged(fn, full, full, full)


def test_a_polynomial_is_left_alone_and_its_coefficients_are_cast_by_jax():
    if not hasattr(lax, "polynomial"):
        pytest.skip(f"jax {jax.__version__} has no public polynomial")
    half, full = jnp.ones(3, jnp.bfloat16), jnp.asarray(np.ones(3, np.float32))
    assert unchanged(lambda x, c: lax.polynomial(x, [c, c]), half, full, policy="bf16")
