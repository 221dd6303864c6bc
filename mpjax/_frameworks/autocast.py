"""How a policy reaches single operations: the only file that hooks into JAX.

`bind` of a fixed table of primitives is wrapped, once, at import. Outside of a region a wrapped primitive
behaves exactly as before. Inside, one of these rules applies:

* compute: products and convolutions take operands of the compute dtype;
* float32 inside: sums, exponentials and their kind run in float32 and hand back what came in;
* float32 outside: decompositions likewise, and JAX's own rules for them run as they come;
* stored: an update of a buffer takes the buffer's dtype;
* constant: a Python number that a 16-bit format cannot hold becomes a large finite one, not infinity;
* differentiation rules that the user wrote run in the region of the function that they belong to;
* mixed: an elementwise operation of `jax.lax`, which does not promote, gets operands of one dtype.

Everything else runs as it comes, by JAX's own promotion. The rules do not depend on the backend.

What a product was decided to run in travels with it, as a mark on its `precision` that accelerators' programs know
nothing of. JAX evaluates a traced program again to differentiate, batch or rematerialise it, by then often in
another region, and transposes it in none; the mark makes all of these keep to the decision. CPUs lower
marked products in a way of their own, see cpu_lowering.py.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import jax.extend.core.primitives as jex
import jmp
from jax._src.interpreters import mlir as _mlir  # for JAX's own lowerings,
from jax._src.interpreters import partial_eval as _partial_eval  # its folding of constants,
from jax._src.lax import lax as _lax  # for ragged_dot_general_p, which jax.extend lacks,
from jax._src.state import primitives as _state  # and for the writes to a jax.Ref
from jax.extend.linear_util import transformation2
from jax.interpreters import ad

from mpjax._precision import cpu_lowering, regions, rules
from mpjax._precision.policy_map import PolicyMap, as_policy_map
from mpjax._precision.regions import ambient

P = ParamSpec("P")
R = TypeVar("R")
Bind = Callable[..., Any]

# Frameworks whose modules announce themselves put a context manager here; it is opened around every
# function that runs under a policy (see linen.py).
module_hooks: list[Callable[["Watch"], contextlib.AbstractContextManager[None]]] = []


@dataclasses.dataclass
class Watch:
    """What the hooks saw while a function ran.

    Attributes:
      policies: the map that the function runs under.
      args: its arguments.
      governed: the entries of the map that matched a module.
      modules: class and entry of each module that was called, by path, in the order of the calls.
      paths: the paths of all modules, also of those that were not called.
    """

    policies: PolicyMap
    args: tuple[Any, ...]
    governed: set[int] = dataclasses.field(default_factory=set)
    modules: dict[str, tuple[type, int]] = dataclasses.field(default_factory=dict)
    paths: set[str] = dataclasses.field(default_factory=set)


def autocast(fn: Callable[P, R], policies: "str | dict | jmp.Policy | PolicyMap") -> Callable[P, R]:
    """Returns `fn` running under policies.

    Matrix products and convolutions in it take operands of the compute dtype, sums and exponentials run in
    float32. flax.linen modules that it calls follow the map; nnx modules do after
    `mpjax.nnx.apply_policy`. Modules hand over their results in the output dtype, and their parameters
    and state as they are stored. A function that calls no module is treated as one: floating arguments
    narrower than the compute dtype are widened, floating results (other than scalars) come back in the output dtype.

    Activations between plain operations have the dtypes that JAX's promotion gives them: a float32 bias makes
    float32 of a product, and `x @ w` hands back what `x` and `w` came in. Modules narrow what they hand over.

    It composes with grad, jit, vmap, scan, remat, custom_jvp, custom_vjp and shard_map, from inside and from
    outside. To train, prefer `mpjax.value_and_grad`, which keeps the policy in force during the backward
    pass too.

    Args:
      fn: any function.
      policies: a policy string, a policy, a dict from pattern to policy, or a `PolicyMap`.

    Raises:
      ValueError: when called, if a pattern of the map governs none of the modules that `fn` calls.

    >>> f = autocast(lambda x, w: x @ w, "p=f32,c=bf16,o=f32")
    >>> f(jnp.ones((2, 3)), jnp.ones((3, 4))).dtype
    dtype('float32')
    """
    run = under(fn, policies)
    output_dtype = run.region.policy.output_dtype

    @functools.wraps(fn)
    def autocast_fn(*args: P.args, **kwargs: P.kwargs) -> R:
        out = run(*args, **kwargs)
        return out if run.called_modules else regions.hand_over(out, output_dtype)

    return autocast_fn


class under:
    """`fn` as a function that runs in the region of `policies`.

    Unlike `autocast` it leaves the results alone: gradients and states must not be narrowed.
    """

    def __init__(self, fn: Callable[..., Any], policies: "str | dict | jmp.Policy | PolicyMap") -> None:
        self.fn = fn
        self.region = regions.Region(as_policy_map(policies))
        self._name = _name_of(fn)
        # Over all calls, as one that hits a trace cache sees fewer modules than the one that filled it.
        self._governed: set[int] = set()
        self.called_modules = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.watched(*args, **kwargs)[0]

    def watched(self, *args: Any, **kwargs: Any) -> tuple[Any, Watch]:
        """What `fn` returns, and what the hooks saw meanwhile."""
        policies = self.region.policies
        watch = Watch(policies, (*args, *kwargs.values()))
        with contextlib.ExitStack() as stack:
            for hook in module_hooks:
                stack.enter_context(hook(watch))
            out, called_modules = regions.call_function(self.fn, args, kwargs, self.region, self._name)
        self.called_modules |= called_modules
        self._governed |= watch.governed
        if policies.entries and watch.paths:
            policies.check_governs(self._governed, watch.paths)
        return out, watch


def full_precision(fn: Callable[P, R]) -> Callable[P, R]:
    """Decorator: runs a function in float32 inside any policy, its own modules included.

    Floating arguments of 16 bits are widened to float32; results come back as the function makes them.

    >>> loss = full_precision(lambda logits: jax.nn.logsumexp(logits))
    >>> loss(jnp.ones(8, jnp.bfloat16)).dtype
    dtype('float32')
    """
    name = _name_of(fn)

    @functools.wraps(fn)
    def full_precision_fn(*args: P.args, **kwargs: P.kwargs) -> R:
        with jax.named_scope("full_precision"):  # by which an audit knows that it is meant
            return regions.call_function(fn, args, kwargs, regions.FULL_PRECISION, name)[0]

    return full_precision_fn


def _name_of(fn: Callable[..., Any]) -> str:
    return f"function '{getattr(fn, '__name__', type(fn).__name__)}'"


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


def _install() -> None:
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


_install()
