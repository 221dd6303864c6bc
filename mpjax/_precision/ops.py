"""The table of operations: what a policy does to each, why, and what an audit makes of it.

`TABLE` has one row for each primitive of JAX that a policy changes or that an audit has an opinion on. `install()`
wraps `bind` of those that have a rule, once, at import. Without a policy a wrapped primitive behaves exactly as
before. Under one, its rule applies; rules do not depend on the backend, see `rules.py`. The audit asks for the
operations with a trait:

>>> sorted(with_trait(Trait.MATMUL))
['conv_general_dilated', 'dot_general', 'ragged_dot_general']

A new operation is one row here and one test.
"""

import dataclasses
import enum
import functools
from collections.abc import Callable
from typing import Any

import jax.extend.core.primitives as jex
from jax._src.interpreters import mlir as _mlir  # for JAX's own lowerings,
from jax._src.interpreters import partial_eval as _partial_eval  # its folding of constants,
from jax._src.lax import lax as _lax  # for ragged_dot_general_p, which jax.extend lacks,
from jax._src.state import primitives as _state  # and for the writes to a jax.Ref
from jax.extend.linear_util import transformation2
from jax.interpreters import ad

from mpjax._precision import cpu_lowering, regions, rules
from mpjax._precision.regions import ambient

Bind = Callable[..., Any]


# ---------------------------------------------------------------------------------- differentiation rules


def custom_rule(bind: Bind, *args: Any, **params: Any) -> Any:
    """The user's own differentiation rules are Python that JAX runs when the region has been left."""
    region = regions.current()
    if region is not None and "subfuns" in params:
        function, *rules = params["subfuns"]
        params["subfuns"] = (function, *(_run_in(rule, region) for rule in rules))
    return bind(*args, **params)


@transformation2
def _run_in(rule: Callable[..., Any], region: regions.Region, *args: Any) -> Any:
    with ambient(region):
        return rule(*args)


# ------------------------------------------------------------------------------------------- the table


class Trait(enum.Flag):
    """What an audit has to know of an operation."""

    NONE = 0
    # A matmul or convolution: an audit counts its FLOPs and compares its operands with the policy.
    MATMUL = enum.auto()
    # Contracts dimensions too, but with dtypes of its own that a policy leaves alone.
    CONTRACTION = enum.auto()
    # Overflows, vanishes or is coarse in float16.
    NARROW_RANGE = enum.auto()
    # Adds up as many numbers as its shapes say.
    SUM = enum.auto()
    # Adds up over devices.
    COLLECTIVE_SUM = enum.auto()
    # Adds or subtracts two numbers.
    ADDITION = enum.auto()
    COMPARISON = enum.auto()
    # Only moves numbers: the first operand's come out, in another shape, order or selection.
    MOVES = enum.auto()
    # Returns its operands themselves, element for element.
    IDENTITY = enum.auto()
    # The next value of a state is made from the last one with it, like with additions and moves.
    UPDATE = enum.auto()
    # Takes scalar constants, which are cast when it is traced.
    TAKES_CONSTANT = enum.auto()


@dataclasses.dataclass(frozen=True)
class Operation:
    """A row of the table.

    Attributes:
      name: of the primitive, as `eqn.primitive.name` gives it; the audit compares it.
      rule: what a policy does, a function of `rules.py`; None where it changes nothing.
      why: in a short sentence.
      traits: what an audit has to know of it.
    """

    name: str
    rule: Callable[..., Any] | None
    why: str
    traits: Trait = Trait.NONE


def _rows(rule: Callable[..., Any] | None, *rows: tuple[Any, ...]) -> tuple[Operation, ...]:
    return tuple(Operation(row[0], rule, *row[1:]) for row in rows)


TABLE: tuple[Operation, ...] = (
    *_rows(
        rules.compute_rule,
        ("dot_general", "takes most of the time, and accelerators run it fastest in 16 bits", Trait.MATMUL),
        ("conv_general_dilated", "the same for convolutions", Trait.MATMUL),
        ("ragged_dot_general", "the same for groups of rows, as in mixtures of experts", Trait.MATMUL),
    ),
    *_rows(
        rules.float32_elementwise_rule,
        ("exp", "passes float16's largest number from 11.1 on", Trait.NARROW_RANGE),
        ("exp2", "passes float16's largest number from 16 on", Trait.NARROW_RANGE),
        ("expm1", "loses the digits near 0 that it exists for", Trait.NARROW_RANGE),
        ("log", "small relative errors of what it takes become absolute ones", Trait.NARROW_RANGE),
        ("log1p", "loses the digits near 0 that it exists for", Trait.NARROW_RANGE),
        ("pow", "leaves float16's range for moderate powers", Trait.NARROW_RANGE | Trait.TAKES_CONSTANT),
        ("rsqrt", "takes variances, which are small, with an epsilon that vanishes", Trait.NARROW_RANGE),
        ("erf_inv", "is steep near -1 and 1, where 16 bits are coarse", Trait.NARROW_RANGE),
        ("lgamma", "leaves float16's range for moderate arguments", Trait.NARROW_RANGE),
        ("digamma", "is steep near its poles, where 16 bits are coarse", Trait.NARROW_RANGE),
    ),
    *_rows(
        rules.float32_rule,
        ("reduce_sum", "a sum of ones stops at 256 in bfloat16 and at 2048 in float16", Trait.SUM),
        ("reduce_prod", "each factor adds its rounding, and the range ends soon"),
        ("cumsum", "a running sum is rounded at each step", Trait.SUM),
        ("cumprod", "a running product is rounded at each step"),
        ("cumlogsumexp", "a running sum of exponentials", Trait.NARROW_RANGE),
        ("reduce_window_sum", "a sum over each window, as in average pooling", Trait.SUM),
    ),
    *_rows(
        rules.scatter_add_rule,
        ("scatter-add", "adds up the gradient of an embedding's row, once for each use", Trait.SUM | Trait.UPDATE),
    ),
    *_rows(
        rules.decomposition_rule,
        ("cholesky", "has no 16-bit implementation"),
        ("eig", "has no 16-bit implementation"),
        ("eigh", "has no 16-bit implementation"),
        ("fft", "has no 16-bit implementation"),
        ("householder_product", "has no 16-bit implementation"),
        ("lu", "has no 16-bit implementation"),
        ("qr", "has no 16-bit implementation"),
        ("schur", "has no 16-bit implementation"),
        ("svd", "has no 16-bit implementation"),
        ("triangular_solve", "has no 16-bit implementation"),
    ),
    *_rows(
        rules.stored_rule,
        ("dynamic_update_slice", "a cache keeps its dtype, whatever is written into it", Trait.UPDATE),
        ("pad", "what is padded keeps its dtype"),
        ("swap", "a `jax.Ref` keeps its dtype, whatever is written into it"),
        ("addupdate", "a `jax.Ref` keeps its dtype, whatever is added to it"),
    ),
    *_rows(
        rules.mixed_rule,
        ("add", "a float32 bias meets a narrower matmul", Trait.ADDITION | Trait.TAKES_CONSTANT),
        ("sub", "like add", Trait.ADDITION | Trait.TAKES_CONSTANT),
        ("mul", "like add", Trait.UPDATE | Trait.TAKES_CONSTANT),
        ("div", "like add", Trait.UPDATE | Trait.TAKES_CONSTANT),
        ("rem", "like add"),
        ("max", "like add", Trait.UPDATE | Trait.TAKES_CONSTANT),
        ("min", "like add", Trait.UPDATE | Trait.TAKES_CONSTANT),
        ("atan2", "like add"),
        ("nextafter", "like add"),
        ("clamp", "like add", Trait.TAKES_CONSTANT),
        ("eq", "like add", Trait.COMPARISON),
        ("ne", "like add", Trait.COMPARISON),
        ("lt", "like add", Trait.COMPARISON),
        ("le", "like add", Trait.COMPARISON),
        ("gt", "like add", Trait.COMPARISON),
        ("ge", "like add", Trait.COMPARISON),
        ("select_n", "a mask chooses between a matmul's result and float32", Trait.UPDATE | Trait.TAKES_CONSTANT),
        ("concatenate", "a matmul's result is joined with float32"),
    ),
    *_rows(
        rules.convert_rule,
        ("convert_element_type", "a constant that the format cannot hold stays finite", Trait.UPDATE),
    ),
    *_rows(
        custom_rule,
        ("custom_jvp_call", "the user's rule runs under the policy of the function that it differentiates"),
        ("custom_vjp_call", "the user's rules run under the policy of the function that they differentiate"),
    ),
    *_rows(
        None,
        ("scaled_dot", "its operands have scales of their own in 8 or 4 bits", Trait.CONTRACTION),
        ("scaled_matmul", "its operands have scales of their own in 8 or 4 bits", Trait.CONTRACTION),
        ("scaled_matmul_wrapper", "its operands have scales of their own in 8 or 4 bits", Trait.CONTRACTION),
        ("add_any", "adds cotangents, which have one dtype", Trait.ADDITION),
        ("psum", "adds up in the dtype that it is communicated in", Trait.COLLECTIVE_SUM),
        ("psum_invariant", "adds up in the dtype that it is communicated in", Trait.COLLECTIVE_SUM),
        ("reduce_scatter", "adds up in the dtype that it is communicated in", Trait.COLLECTIVE_SUM),
        ("reshape", "only moves numbers", Trait.MOVES),
        ("transpose", "only moves numbers", Trait.MOVES),
        ("squeeze", "only moves numbers", Trait.MOVES),
        ("broadcast_in_dim", "only moves numbers", Trait.MOVES | Trait.TAKES_CONSTANT),
        ("slice", "only moves numbers", Trait.MOVES),
        ("dynamic_slice", "only moves numbers", Trait.MOVES),
        ("rev", "only moves numbers", Trait.MOVES),
        ("copy", "only moves numbers", Trait.MOVES | Trait.IDENTITY),
        ("stop_gradient", "only moves numbers", Trait.MOVES),
        ("optimization_barrier", "only moves numbers", Trait.MOVES | Trait.IDENTITY),
        ("sharding_constraint", "only moves numbers", Trait.MOVES | Trait.IDENTITY),
        ("pvary", "only says how devices' values may differ", Trait.MOVES | Trait.IDENTITY),
        ("name", "only names a value", Trait.IDENTITY),
        ("reduce_precision", "rounds, by request, within the dtype", Trait.MOVES),
    ),
)  # fmt: skip


@functools.cache
def with_trait(traits: Trait) -> frozenset[str]:
    """The names of the primitives that have one of `traits`, such as `Trait.MOVES | Trait.ADDITION`."""
    return frozenset(row.name for row in TABLE if row.traits & traits)


def hooked(bind: Bind, rule: Callable[..., Any]) -> Bind:
    """A primitive's `bind` with a rule around it.

    Where no rule applies, which is in every program without a policy, it costs a look at the region and one call.
    """
    if rule is rules.compute_rule:  # which keeps to marks outside of regions, too

        def hooked_bind(*args: Any, **params: Any) -> Any:
            if type(params["precision"]) is not rules.Decided and ambient.value is None:
                return bind(*args, **params)
            return rule(bind, *args, **params)
    else:

        def hooked_bind(*args: Any, **params: Any) -> Any:
            return bind(*args, **params) if ambient.value is None else rule(bind, *args, **params)

    hooked_bind.rule = rule  # type: ignore[attr-defined]
    return hooked_bind


def _primitives() -> dict[str, Any]:
    """The primitives of JAX by name."""
    found = (x for module in (_state, _lax, jex) for name, x in vars(module).items() if name.endswith("_p"))
    return {primitive.name: primitive for primitive in found if hasattr(primitive, "bind")}


def install() -> None:
    """Hooks the rules of the table into JAX; a second call does nothing."""
    known = _primitives()
    for row in TABLE:
        # Some names came or went between versions of JAX. A module that is loaded twice must not wrap twice.
        primitive = known.get(row.name)
        if row.rule is None or primitive is None or hasattr(primitive.bind, "rule"):
            continue
        primitive.bind = hooked(primitive.bind, row.rule)
    for primitive in (jex.dot_general_p, jex.conv_general_dilated_p):
        lhs_rule, rhs_rule = ad.primitive_transposes[primitive].args  # type: ignore[attr-defined]
        if getattr(lhs_rule, "func", None) is None:
            ad.defbilinear(
                primitive,
                functools.partial(rules.transpose_rule, lhs_rule, 0),
                functools.partial(rules.transpose_rule, rhs_rule, 1),
            )
    _partial_eval.const_fold_rules[rules.saturate_p] = rules.fold_saturate
    previous = _mlir._platform_specific_lowerings["cpu"][jex.dot_general_p].rule
    if not hasattr(previous, "wraps"):
        rule = cpu_lowering.dot_general_rule(previous)
        rule.wraps = previous  # type: ignore[attr-defined]
        _mlir.register_lowering(jex.dot_general_p, rule, platform="cpu")
