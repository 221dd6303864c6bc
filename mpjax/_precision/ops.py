"""The operations that a policy changes: one table, and the hooks that it installs into JAX.

`bind` of each primitive in the table is wrapped, once, at import. Outside of a region a wrapped primitive
behaves exactly as before. Inside, one of the rules of `rules.py` applies; the rules do not depend on the backend.

What a matmul was decided to run in travels with it, as a mark on its `precision` that accelerators' programs know
nothing of. JAX evaluates a traced program again to differentiate, batch or rematerialise it, by then often in
another region, and transposes it in none; the mark makes all of these keep to the decision. CPUs lower
marked matmuls in a way of their own, see `cpu_lowering.py`.
"""

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


def _custom_rule(bind: Bind, *args: Any, **params: Any) -> Any:
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

_TABLE: dict[Callable[..., Any], tuple[str, ...]] = {
    rules.compute_rule: ("dot_general", "conv_general_dilated", "ragged_dot_general"),
    rules.float32_elementwise_rule: (
        *("exp", "exp2", "expm1", "log", "log1p", "pow", "rsqrt", "erf_inv", "lgamma", "digamma"),
    ),
    rules.float32_rule: (
        *("reduce_sum", "reduce_prod", "cumsum", "cumprod", "cumlogsumexp", "reduce_window_sum"),
    ),
    rules.scatter_add_rule: ("scatter_add",),
    rules.decomposition_rule: (
        *("cholesky", "eig", "eigh", "householder_product", "lu", "qr", "schur", "svd"),
        *("triangular_solve", "fft"),
    ),
    rules.stored_rule: ("dynamic_update_slice", "pad", "swap", "addupdate"),
    rules.mixed_rule: (
        *("add", "sub", "mul", "div", "rem", "max", "min", "atan2", "nextafter", "clamp"),
        *("eq", "ne", "lt", "le", "gt", "ge", "select_n", "concatenate"),
    ),
    rules.convert_rule: ("convert_element_type",),
    _custom_rule: ("custom_jvp_call", "custom_vjp_call"),
}


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


def install() -> None:
    """Hooks the rules of the table into JAX; a second call does nothing."""
    for rule, names in _TABLE.items():
        for name in names:
            found = (getattr(module, f"{name}_p", None) for module in (jex, _lax, _state))
            primitive = next((p for p in found if p is not None), None)
            # Some names came or went between versions of JAX. A module that is loaded twice must not wrap twice.
            if primitive is None or hasattr(primitive.bind, "rule"):
                continue
            primitive.bind = hooked(primitive.bind, rule)
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
