"""JAX's private parts: the one file of mpjax that uses them, each with why and since when.

A policy reaches into operations that a program has already chosen, and JAX has no public way to do that. What is
used for it is listed in `USES`; where this JAX lacks one of them, importing mpjax says so, and which versions serve.
The functions below are all that the rest of mpjax knows of it. `tests/precision/test_jax_internals.py` has a test
for each use.
"""

import contextlib
import dataclasses
import functools
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.extend.core import JaxprEqn, Primitive
from jax.extend.core import primitives as public

# The versions that the tests ran with; what the project's metadata asks for is the lower one.
SUPPORTED = ("0.10", "0.12.1")

Bind = Callable[..., Any]
# From the context of a lowering, the operands and the parameters to the results.
Lowering = Callable[..., Sequence[Any]]
# From a cotangent, the operands and the parameters to the cotangent of one operand.
Transpose = Callable[..., Any]
Region = TypeVar("Region")


# -------------------------------------------------------------------------------------------- the uses


@dataclasses.dataclass(frozen=True)
class Use:
    """A private part of JAX that mpjax uses.

    Attributes:
      name: its module and its name in it.
      why: what for.
      instead: why nothing public serves.
      since: the first version of JAX that it is known to work with.
      required: whether mpjax cannot be imported without it.
    """

    name: str
    why: str
    instead: str
    since: str = "0.10"
    required: bool = True

    def load(self) -> Any:
        """The part itself; None if this JAX lacks it and it is not required."""
        try:
            return pkgutil.resolve_name(self.name)
        except (ImportError, AttributeError) as error:
            if self.required:
                raise self.missing() from error
            return None

    def missing(self) -> ImportError:
        """The error for a JAX that lacks it or has changed it."""
        oldest, newest = SUPPORTED
        return ImportError(
            f"This mpjax supports jax {oldest} to {newest}, and jax {jax.__version__} is installed, which lacks "
            f"'{self.name}' or has changed it; mpjax uses it {self.why}. Install a version that is supported, "
            f"'pip install \"jax>={oldest},<={newest}\"', or a newer mpjax, 'pip install --upgrade mpjax'."
        )


_NOT_IN_EXTEND = "jax.extend.core.primitives leaves it out"
_USES = (
    Use(
        "jax.extend.core.Primitive.bind",
        "to apply the rules of a policy to operations",
        "JAX offers no hook around single operations; each primitive's `bind` is replaced on the instance",
    ),
    Use(
        "jax._src.lax.lax.ragged_dot_general_p",
        "to let a policy decide what ragged matmuls run in",
        _NOT_IN_EXTEND,
    ),
    Use(
        "jax._src.state.primitives.addupdate_p",
        "to keep the dtype of a jax.Ref that is added to",
        _NOT_IN_EXTEND,
    ),
    Use(
        "jax._src.lax.scaled_dot.scaled_dot_p",
        "to leave scaled matmuls alone, also in how JAX lowers them",
        _NOT_IN_EXTEND,
        required=False,
    ),
    Use(
        "jax._src.cudnn.scaled_matmul_stablehlo._scaled_matmul_p",
        "to leave scaled matmuls alone, also in how JAX lowers them",
        _NOT_IN_EXTEND,
        required=False,
    ),
    Use(
        "jax.extend.linear_util.transformation2",
        "to run the user's differentiation rules under the policy of the function that they belong to",
        "JAX binds custom_jvp_call and custom_vjp_call to wrapped functions, which only this can wrap once more",
    ),
    Use(
        "jax.interpreters.ad.primitive_transposes",
        "to find JAX's own rules for the gradients of matmuls",
        "a primitive's transpose rule is looked up here; no public function returns it",
    ),
    Use(
        "jax.interpreters.ad.defbilinear",
        "to let the gradient of a weight leave its matmul in float32",
        "custom_vjp would have to be put around every matmul, which hides them from checkpoint policies",
    ),
    Use(
        "jax.interpreters.ad.UndefinedPrimal",
        "to ask JAX's rule for the gradient of a float32 operand",
        "transpose rules take it in place of the operand whose gradient is asked for",
    ),
    Use(
        "jax.interpreters.ad.deflinear2",
        "to let constants that were made finite be differentiated as if they had not been touched",
        "a primitive's derivative has no public registration",
    ),
    Use(
        "jax.interpreters.batching.defvectorized",
        "to let constants that were made finite be batched",
        "a primitive's batching rule has no public registration",
    ),
    Use(
        "jax.interpreters.mlir.register_lowering",
        "to lower matmuls for CPUs, and constants that were made finite",
        "jax.extend has no registration of lowerings",
    ),
    Use(
        "jax.interpreters.mlir.lower_fun",
        "to lower the operation that makes constants finite from a JAX function",
        "jax.extend has no registration of lowerings",
    ),
    Use(
        "jax._src.interpreters.mlir._lowerings",
        "to lower scaled matmuls without the policy",
        "a lowering that is registered can only be found here",
    ),
    Use(
        "jax._src.interpreters.mlir._platform_specific_lowerings",
        "to lower matmuls for CPUs on top of JAX's own lowering",
        "a lowering that is registered can only be found here",
    ),
    Use(
        "jax.interpreters.mlir.aval_to_ir_type",
        "to convert operands while a matmul is lowered",
        "jax.extend has no counterpart",
    ),
    Use(
        "jax.interpreters.mlir.dense_int_array",
        "to transpose the gradient of a weight while it is lowered",
        "jax.extend has no counterpart",
    ),
    Use(
        "jax.extend.mlir.ir",
        "to name the types of operands while a matmul is lowered",
        "it is in jax.extend, but follows MLIR and promises nothing",
    ),
    Use(
        "jax.extend.mlir.dialects.stablehlo",
        "to convert, transpose and fence operands while a matmul is lowered",
        "it is in jax.extend, but follows StableHLO and promises nothing",
    ),
    Use(
        "jax._src.interpreters.partial_eval.const_fold_rules",
        "to leave constants alone that fit the format",
        "JAX folds constants while it traces, by rules that only this table holds",
    ),
    Use(
        "jax.extend.core.JaxprEqn.source_info",
        "to say which line and which module an operation comes from",
        "jax.extend.source_info_util.summarize gives one line, as text, and not the frames around it",
    ),
)
USES = {use.name: use for use in _USES}


_PARTS = {name: use.load() for name, use in USES.items()}


@contextlib.contextmanager
def _as_known(name: str) -> Iterator[Any]:
    """A part; what fails on it with an error of Python's own is because JAX has changed it."""
    try:
        yield _PARTS[name]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise USES[name].missing() from error


# ------------------------------------------------------------------------------------------ primitives


@functools.cache
def primitives() -> dict[str, Primitive]:
    """The primitives of `jax.extend.core.primitives`, and what it leaves out of those in `USES`, by their names.

    The name of a primitive, as `eqn.primitive.name` gives it, is not always that of its attribute: "scatter-add" is
    `scatter_add_p`.
    """
    found = [x for x in (*vars(public).values(), *_PARTS.values()) if isinstance(x, Primitive)]
    return {primitive.name: primitive for primitive in found}


def wrap_bind(primitive: Primitive, wrap: Callable[[Bind], Bind]) -> None:
    """Puts `wrap` around a primitive's `bind`, in place of a wrapper that an earlier import of mpjax left there."""
    primitive.bind = _wrapped(primitive.bind, wrap)  # type: ignore[method-assign]


def unwrapped_bind(name: str) -> Bind:
    """The `bind` of the primitive of this name as JAX has it, without a rule."""
    bind = primitives()[name].bind
    return getattr(bind, "mpjax_wraps", bind)


def _wrapped(original: Callable[..., Any], wrap: Callable[..., Any]) -> Any:
    """`wrap(original)`; if that was wrapped before, what it was before is wrapped."""
    original = getattr(original, "mpjax_wraps", original)
    wrapped = wrap(original)
    wrapped.mpjax_wraps = original
    return wrapped


def run_within(function: Any, context: Callable[[Region], Any], region: Region) -> Any:
    """A function that JAX has wrapped for `custom_jvp_call` or `custom_vjp_call`, run within `context(region)`."""
    return _run_within(function, context, region)


@_PARTS["jax.extend.linear_util.transformation2"]
def _run_within(
    function: Callable[..., Any], context: Callable[[Region], Any], region: Region, *args: Any
) -> Any:
    with context(region):
        return function(*args)


# ---------------------------------------------------------------------------------- differentiation


def wrap_transposes(primitive: Primitive, wrap: Callable[[Transpose, int], Transpose]) -> None:
    """Puts `wrap` around the rules by which JAX finds the gradients of both operands of a matmul."""
    with _as_known("jax.interpreters.ad.primitive_transposes") as transposes:
        lhs_rule, rhs_rule = transposes[primitive].args
    with _as_known("jax.interpreters.ad.defbilinear") as defbilinear:
        rules = (_wrapped(rule, lambda r, i=i: wrap(r, i)) for i, rule in enumerate((lhs_rule, rhs_rule)))
        defbilinear(primitive, *rules)


def wanted_operand(like: Any, dtype: np.dtype) -> Any:
    """What a transpose rule takes in place of the operand whose gradient is asked for, in another dtype."""
    return _PARTS["jax.interpreters.ad.UndefinedPrimal"](like.aval.update(dtype=dtype))


def identity_to_derivatives(
    name: str,
    function: Callable[..., jax.Array],
    fold: Callable[[Any, dict[str, Any]], bool],
) -> Primitive:
    """An elementwise operation of one operand that differentiation passes through as if it were not there.

    Args:
      name: its name in a jaxpr.
      function: what it computes, of an array and keyword parameters.
      fold: whether it does nothing to a constant, so that it may be left out.
    """
    primitive = Primitive(name)
    primitive.def_impl(function)
    primitive.def_abstract_eval(lambda x, **params: x)
    lower = _PARTS["jax.interpreters.mlir.lower_fun"](function, multiple_results=False)
    _PARTS["jax.interpreters.mlir.register_lowering"](primitive, lower)
    _PARTS["jax.interpreters.batching.defvectorized"](primitive)
    _PARTS["jax.interpreters.ad.deflinear2"](primitive, lambda cotangent, x, **params: [cotangent])

    def folded(constants: list[Any], params: dict[str, Any], avals: list[Any]) -> list[Any] | None:
        del avals
        return constants if fold(constants[0], params) else None

    _PARTS["jax._src.interpreters.partial_eval.const_fold_rules"][primitive] = folded
    return primitive


# ------------------------------------------------------------------------------------------ lowerings

ir = _PARTS["jax.extend.mlir.ir"]
stablehlo = _PARTS["jax.extend.mlir.dialects.stablehlo"]


def wrap_cpu_lowering(primitive: Primitive, wrap: Callable[[Lowering], Lowering]) -> None:
    """Puts `wrap` around the rule by which JAX lowers a primitive for CPUs."""
    with _as_known("jax._src.interpreters.mlir._platform_specific_lowerings") as lowerings:
        rule = lowerings["cpu"][primitive].rule
    with _as_known("jax.interpreters.mlir.register_lowering") as register:
        register(primitive, _wrapped(rule, wrap), platform="cpu")


def lower_within(primitive: Primitive, context: Callable[[Region], Any], region: Region) -> None:
    """Lets a primitive be lowered within `context(region)` on every platform.

    JAX lowers some primitives by tracing a function, in whatever context it happens to be in by then.
    """

    def wrap(rule: Lowering) -> Lowering:
        def lower(*args: Any, **params: Any) -> Sequence[Any]:
            with context(region):
                return rule(*args, **params)

        return lower

    common = _PARTS["jax._src.interpreters.mlir._lowerings"]
    specific = _PARTS["jax._src.interpreters.mlir._platform_specific_lowerings"]
    with _as_known("jax._src.interpreters.mlir._lowerings"):
        for rules in (common, *specific.values()):
            if primitive in rules:
                entry = rules[primitive]
                rules[primitive] = dataclasses.replace(entry, rule=_wrapped(entry.rule, wrap))


def device_count(ctx: Any) -> int:
    """For how many devices XLA is going to partition the program that is lowered; 1 where it does not."""
    return getattr(ctx.module_context.axis_context, "num_devices", 1)


def convert(ctx: Any, x: Any, aval: Any) -> Any:
    """`x` in the dtype of `aval`, whose shape it has."""
    return stablehlo.convert(_PARTS["jax.interpreters.mlir.aval_to_ir_type"](ctx.module_context, aval), x)


def transpose(x: Any, permutation: Iterable[int]) -> Any:
    """`x` with its dimensions in another order."""
    return stablehlo.transpose(x, _PARTS["jax.interpreters.mlir.dense_int_array"]([*permutation]))


# --------------------------------------------------------------------------------- reading a program


class Frame(NamedTuple):
    """A line of source that ran when an operation was traced."""

    file: str
    line: int
    function: str


def frames(eqn: JaxprEqn) -> Iterator[Frame]:
    """The lines that ran when an operation was traced, the innermost first; none if JAX has not recorded them."""
    traceback: Any = eqn.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        yield Frame(frame.file_name, frame.line_num, frame.function_name)


def name_stack(eqn: JaxprEqn) -> str:
    """The names of the scopes and transformations around an operation, such as `transpose(jvp(GPT))/block/attn`."""
    return str(eqn.source_info.name_stack)
