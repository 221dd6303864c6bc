"""The table of operations: what a policy does to each, why, and what an audit has to know of it.

`TABLE` has one row for each primitive of JAX that a policy changes or that an audit has an opinion on. `install()`
wraps `bind` of those that have a rule, once, at import. Without a policy a wrapped primitive behaves exactly as
before. Under one its rule, a function of `rules.py`, applies; rules do not depend on the backend. CPUs lower the
matmuls of policies in a way of their own, see `cpu_lowering.py`. The audit asks for the operations with a trait:

>>> sorted(with_trait(Trait.MATMUL))
['conv_general_dilated', 'dot_general', 'ragged_dot_general']

A new operation is one row here and one test.
"""

import dataclasses
import enum
import functools
from collections.abc import Callable
from typing import Any, TypeAlias

from mpjax._precision import cpu_lowering, jax_internals, rules
from mpjax._precision.jax_internals import Bind, Transpose
from mpjax._precision.regions import ambient

Rule: TypeAlias = Callable[..., rules.Result]


class Trait(enum.Flag):
    """What an audit has to know of an operation."""

    NONE = 0
    # A matmul or convolution: an audit counts its FLOPs and compares its operands with the policy.
    MATMUL = enum.auto()
    # A matmul whose operands carry scales of their own: a policy leaves it alone.
    SCALED_MATMUL = enum.auto()
    # Overflows, vanishes or is coarse in float16.
    NARROW_RANGE = enum.auto()
    # Adds up many numbers.
    SUM = enum.auto()
    # Adds up over devices.
    COLLECTIVE_SUM = enum.auto()
    # Adds two numbers, or subtracts one from the other.
    ADDITION = enum.auto()
    COMPARISON = enum.auto()
    # Only moves numbers: the first operand's come out, in another shape, order or selection.
    MOVES = enum.auto()
    # Returns its operands themselves, number for number.
    IDENTITY = enum.auto()
    # Makes the next value of a state from the last one, as additions and moves do, too.
    UPDATE = enum.auto()
    # Often takes a scalar constant, which JAX casts when it traces the operation.
    TAKES_CONSTANT = enum.auto()


@dataclasses.dataclass(frozen=True)
class Operation:
    """A row of the table.

    Attributes:
      name: of the primitive, as `eqn.primitive.name` gives it, by which an audit knows it.
      rule: what a policy does to it, a function of `rules.py`; None where that is nothing.
      why: the reason for the rule, in a short sentence.
      traits: what an audit has to know of it.
    """

    name: str
    rule: Rule | None
    why: str
    traits: Trait = Trait.NONE


def _rows(rule: Rule | None, *rows: tuple[Any, ...]) -> tuple[Operation, ...]:
    """Rows with the same rule, each given as name, why and traits."""
    return tuple(Operation(name, rule, *rest) for name, *rest in rows)


_T = Trait
_16_BIT_KERNEL = "JAX has no 16-bit implementation of it"
_BIAS = "one operand is often a matmul's result, the other a float32 bias or statistic"
_SCALED = "its operands have 8 or 4 bits and scales that were chosen for these formats"
_CUDNN = "cuDNN's attention takes 16-bit operands only, and adds up in float32"
_DEVICES = "what is communicated has the dtype that the program gives it"
_MOVES = "only moves numbers"

TABLE: tuple[Operation, ...] = (
    *_rows(
        rules.compute_rule,
        (
            "dot_general",
            "matmuls take most of the time, and accelerators run them fastest in 16 bits",
            _T.MATMUL,
        ),
        ("conv_general_dilated", "as for matmuls", _T.MATMUL),
        (
            "ragged_dot_general",
            "as for matmuls; mixtures of experts multiply groups of rows with it",
            _T.MATMUL,
        ),
    ),
    *_rows(
        rules.float32_elementwise_rule,
        ("exp", "exceeds float16's largest number from 11.1 on", _T.NARROW_RANGE),
        ("exp2", "exceeds float16's largest number from 16 on", _T.NARROW_RANGE),
        ("expm1", "is there for small numbers, of which 16 bits lose the digits", _T.NARROW_RANGE),
        ("log", "near 1, 16 bits hold few digits of the result", _T.NARROW_RANGE),
        ("log1p", "is there for small numbers, of which 16 bits lose the digits", _T.NARROW_RANGE),
        ("pow", "leaves float16's range at moderate exponents", _T.NARROW_RANGE | _T.TAKES_CONSTANT),
        ("rsqrt", "norms take it of a small variance plus an epsilon that 16 bits lose", _T.NARROW_RANGE),
        ("erf_inv", "is steep near -1 and 1, where 16 bits are coarse", _T.NARROW_RANGE),
        ("lgamma", "leaves float16's range at moderate arguments", _T.NARROW_RANGE),
        ("digamma", "is steep near its poles, where 16 bits are coarse", _T.NARROW_RANGE),
    ),
    *_rows(
        rules.float32_rule,
        ("reduce_sum", "a sum of ones stops at 256 in bfloat16 and at 2048 in float16", _T.SUM),
        ("reduce_prod", "every factor adds a rounding, and the range is soon left"),
        ("cumsum", "a running sum is rounded at each step", _T.SUM),
        ("cumprod", "a running product is rounded at each step"),
        ("cumlogsumexp", "a running sum of exponentials leaves float16's range", _T.NARROW_RANGE),
        ("reduce_window_sum", "a sum over each window, as average pooling takes it", _T.SUM),
    ),
    *_rows(
        rules.scatter_add_rule,
        ("scatter-add", "adds up the gradient of an embedding's row, once for each use", _T.SUM | _T.UPDATE),
    ),
    *_rows(
        rules.decomposition_rule,
        ("cholesky", _16_BIT_KERNEL),
        ("eig", _16_BIT_KERNEL),
        ("eigh", _16_BIT_KERNEL),
        ("fft", _16_BIT_KERNEL),
        ("householder_product", _16_BIT_KERNEL),
        ("lu", _16_BIT_KERNEL),
        ("qr", _16_BIT_KERNEL),
        ("schur", _16_BIT_KERNEL),
        ("svd", _16_BIT_KERNEL),
        ("triangular_solve", _16_BIT_KERNEL),
    ),
    *_rows(
        rules.stored_rule,
        ("dynamic_update_slice", "a cache keeps its dtype, whatever is written into it", _T.UPDATE),
        ("pad", "an array keeps its dtype, whatever it is padded with"),
        ("swap", "a `jax.Ref` keeps its dtype, whatever is written into it"),
        ("addupdate", "a `jax.Ref` keeps its dtype, whatever is added to it"),
    ),
    *_rows(
        rules.mixed_rule,
        ("add", _BIAS, _T.ADDITION | _T.TAKES_CONSTANT),
        ("sub", _BIAS, _T.ADDITION | _T.TAKES_CONSTANT),
        ("mul", _BIAS, _T.UPDATE | _T.TAKES_CONSTANT),
        ("div", _BIAS, _T.UPDATE | _T.TAKES_CONSTANT),
        ("rem", _BIAS),
        ("max", _BIAS, _T.UPDATE | _T.TAKES_CONSTANT),
        ("min", _BIAS, _T.UPDATE | _T.TAKES_CONSTANT),
        ("atan2", _BIAS),
        ("nextafter", _BIAS),
        ("clamp", _BIAS, _T.TAKES_CONSTANT),
        ("eq", _BIAS, _T.COMPARISON),
        ("ne", _BIAS, _T.COMPARISON),
        ("lt", _BIAS, _T.COMPARISON),
        ("le", _BIAS, _T.COMPARISON),
        ("gt", _BIAS, _T.COMPARISON),
        ("ge", _BIAS, _T.COMPARISON),
        ("select_n", _BIAS, _T.UPDATE | _T.TAKES_CONSTANT),
        ("concatenate", _BIAS),
        ("fma", _BIAS),
        ("fmuladd", _BIAS),
    ),
    *_rows(
        rules.convert_rule,
        (
            "convert_element_type",
            "a mask of -1e9 would be -inf in float16, and -inf - -inf is NaN",
            _T.UPDATE,
        ),
    ),
    *_rows(
        rules.custom_rule,
        ("custom_jvp_call", "JAX calls the derivative later, when the policy is no longer in force"),
        ("custom_vjp_call", "JAX calls the derivative later, when the policy is no longer in force"),
    ),
    *_rows(
        None,
        ("scaled_dot", _SCALED, _T.SCALED_MATMUL),
        ("scaled_matmul", _SCALED, _T.SCALED_MATMUL),
        ("scaled_matmul_wrapper", _SCALED, _T.SCALED_MATMUL),
        ("dot_product_attention_fwd", _CUDNN),
        ("dot_product_attention_fwd_wrapper", _CUDNN),
        ("dot_product_attention_bwd", _CUDNN),
        ("dot_product_attention_bwd_wrapper", _CUDNN),
        ("dot_product_attention_fp8_fwd", _SCALED),
        ("dot_product_attention_fp8_fwd_wrapper", _SCALED),
        ("dot_product_attention_fp8_bwd", _SCALED),
        ("dot_product_attention_fp8_bwd_wrapper", _SCALED),
        ("symmetric_product", "serves decompositions, which need all digits of their operands"),
        ("ormqr", "serves decompositions, which need all digits of their operands"),
        ("polynomial", "JAX casts the coefficients to the dtype of what it is evaluated at"),
        ("add_any", "adds cotangents, which have one dtype", _T.ADDITION),
        ("psum", _DEVICES, _T.COLLECTIVE_SUM),
        ("psum_invariant", _DEVICES, _T.COLLECTIVE_SUM),
        ("reduce_scatter", _DEVICES, _T.COLLECTIVE_SUM),
        ("reshape", _MOVES, _T.MOVES),
        ("transpose", _MOVES, _T.MOVES),
        ("squeeze", _MOVES, _T.MOVES),
        ("broadcast_in_dim", _MOVES, _T.MOVES | _T.TAKES_CONSTANT),
        ("slice", _MOVES, _T.MOVES),
        ("dynamic_slice", _MOVES, _T.MOVES),
        ("rev", _MOVES, _T.MOVES),
        ("copy", _MOVES, _T.MOVES | _T.IDENTITY),
        ("stop_gradient", _MOVES, _T.MOVES),
        ("optimization_barrier", _MOVES, _T.MOVES | _T.IDENTITY),
        ("sharding_constraint", _MOVES, _T.MOVES | _T.IDENTITY),
        ("pvary", "only says that a value may differ between devices", _T.MOVES | _T.IDENTITY),
        ("name", "only names a value, for checkpoint policies", _T.IDENTITY),
        ("reduce_precision", "rounds because the program asks for it, and keeps the dtype", _T.MOVES),
    ),
)

# What each rule does, in the words of the documentation.
DESCRIPTIONS: dict[Rule | None, str] = {
    rules.compute_rule: "operands in the compute dtype",
    rules.float32_elementwise_rule: "float32 inside, result in the dtype of the operands",
    rules.float32_rule: "float32 inside, result in the dtype of the operands",
    rules.scatter_add_rule: "float32 inside, result in the dtype of the operands",
    rules.decomposition_rule: "float32 inside, with JAX's own rules left alone",
    rules.stored_rule: "the dtype of the buffer",
    rules.mixed_rule: "float32 where the operands' dtypes differ",
    rules.convert_rule: "constants stay finite",
    rules.custom_rule: "derivatives under the function's policy",
    None: "unchanged",
}


@functools.cache
def with_trait(traits: Trait) -> frozenset[str]:
    """The names of the operations that have one of `traits`, such as `Trait.MOVES | Trait.ADDITION`."""
    return frozenset(row.name for row in TABLE if row.traits & traits)


def hooked(bind: Bind, rule: Rule) -> Bind:
    """A primitive's `bind` with a rule around it.

    Where no rule applies, which is in every program without a policy, it costs a look at the region and one call.
    """
    if rule is rules.compute_rule:  # which keeps to decisions that were made before, outside of regions too

        def hooked_bind(*args: Any, **params: Any) -> rules.Result:
            if type(params["precision"]) is not rules.PolicyPrecision and ambient.value is None:
                return bind(*args, **params)
            return rule(bind, *args, **params)
    else:

        def hooked_bind(*args: Any, **params: Any) -> rules.Result:
            return bind(*args, **params) if ambient.value is None else rule(bind, *args, **params)

    hooked_bind.rule = rule  # type: ignore[attr-defined]
    return hooked_bind


def install() -> None:
    """Hooks the rules of the table into JAX, in place of those of an earlier call.

    Operations that this version of JAX does not have are passed over.
    """
    known = jax_internals.primitives()
    for row in TABLE:
        primitive = known.get(row.name)
        if primitive is None:
            continue
        if row.rule is not None:
            jax_internals.wrap_bind(primitive, functools.partial(hooked, rule=row.rule))
        if row.traits & Trait.SCALED_MATMUL:
            jax_internals.lower_within(primitive, ambient, None)
    for name in ("dot_general", "conv_general_dilated"):
        jax_internals.wrap_transposes(known[name], _transpose)
    jax_internals.wrap_cpu_lowering(known["dot_general"], cpu_lowering.dot_general_rule)


def _transpose(rule: Transpose, i: int) -> Transpose:
    return functools.partial(rules.transpose_rule, rule, i)
