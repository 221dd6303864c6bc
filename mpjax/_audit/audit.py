"""`audit`: which precision a function really runs in, module by module, and what is wrong with it."""

from collections.abc import Callable
from typing import Any

import chex
import jax

from mpjax._audit import residuals
from mpjax._audit.checks import CHECKS
from mpjax._audit.findings import Findings, Silenced, silence
from mpjax._audit.flops import flops
from mpjax._audit.governed import check_governs
from mpjax._audit.program import Op, Program
from mpjax._audit.read_jaxpr import read, traced_anew
from mpjax._audit.records import summed
from mpjax._audit.result import Audit, Casts, Matmuls, Saved
from mpjax._audit.stablehlo import check_platform, lower
from mpjax._frameworks.protocol import Framework, imported
from mpjax._precision.policy_map import PolicyMapLike, as_policy_map


def audit(
    fn: Callable[..., Any],
    *args: Any,
    policies: PolicyMapLike | None = None,
    platform: str | None = None,
    ignore: Silenced | None = None,
) -> Audit:
    """Returns in which precision each module of a function runs, and what is wrong with it.

    >>> found = audit(lambda x, w: x @ w, jnp.ones((8, 16), jnp.bfloat16), jnp.ones((16, 4)))
    >>> found.flops, [finding.kind for finding in found.findings]
    ({'bfloat16 × float32': 1024}, ['mixed-operands'])

    The function is traced, not run. Everything in it counts: the loss, its gradient, the optimizer, inner jits,
    loops (times their number of steps), rematerialised and sharded code.

    Args:
      fn: any JAX function, jitted or not: a loss, a gradient, a whole train step.
      *args: its arguments: arrays, `jax.ShapeDtypeStruct`s, pytrees of them, or models of a framework.
      policies: what to compare the program with; it is not traced under them. Left out, matmuls are compared with
        the policy that the program itself was traced under, such as that of its `TrainState`.
      platform: also lower for "tpu", "cuda", "rocm" or "cpu", none of which has to be present, and check that the
        matmuls in StableHLO are those of the traced program.
      ignore: findings that are intended: from a regular expression for whole module paths to a kind of finding or
        several, such as `{".*norm": "half-range", ".*": ["cast-roundtrip"]}`.

    Raises:
      TypeError: if an argument holds something that is no array.
      ValueError: if the platform or a kind is unknown, or a pattern of `policies` governs no module of `fn`.
    """
    if not callable(fn):
        raise TypeError(
            f"audit expects a function and its arguments, got {fn!r} of type {type(fn).__name__}."
        )
    if platform is not None:
        check_platform(platform)
    silence((), ignore)
    policies = None if policies is None else as_policy_map(policies)
    name = _name_of(fn)
    fn, args = _without_models(fn, args)
    _check_arguments(args)
    with traced_anew():
        program = _read(fn, args, name)
        lowering = None if platform is None else lower(fn, args, program, platform)
    if policies is not None:
        check_governs(program, policies)
    found = Findings(program, policies, lowering)
    for check in CHECKS:
        check(found)
    return Audit(
        name,
        _matmuls(program),
        _casts(program),
        _saved(program),
        _operations(program),
        silence(found.sorted(), ignore),
        lowering,
    )


def _read(fn: Callable[..., Any], args: tuple[Any, ...], name: str) -> Program:
    try:
        return read(fn, args)
    except Exception as e:
        shapes = ", ".join(_abstract(x) for x in args)
        e.add_note(f"mpjax.audit: this is the error of '{name}' itself, traced with ({shapes}).")
        raise


def _matmuls(program: Program) -> tuple[Matmuls, ...]:
    def key(op: Op) -> tuple[str, str, str]:
        return op.path, op.phase, op.operands

    count = summed((key(op), op.count) for op in program.matmuls())
    total = summed((key(op), flops(op)) for op in program.matmuls())
    return tuple(Matmuls(*of, n, total[of]) for of, n in count.items())


def _casts(program: Program) -> tuple[Casts, ...]:
    def key(op: Op) -> tuple[str, str, str, str]:
        return op.path, op.phase, op.ins[0].dtype.name, op.out.dtype.name

    casts = [op for op in program.computing() if op.is_cast]
    count = summed((key(op), op.count) for op in casts)
    written = summed((key(op), op.result_bytes) for op in casts)
    return tuple(Casts(*of, n, written[of]) for of, n in count.items())


def _saved(program: Program) -> tuple[Saved, ...]:
    total = summed(((module, dtype), n) for module, dtype, n in residuals.saved(program))
    return tuple(Saved(module, dtype, n) for (module, dtype), n in total.items())


def _operations(program: Program) -> tuple[tuple[str, str, int], ...]:
    count = summed(((op.path, op.phase), 1) for op in program.computing())
    return tuple((module, phase, n) for (module, phase), n in count.items())


# -------------------------------------------------------------------------------------------- arguments


def _check_arguments(args: tuple[chex.ArrayTree, ...]) -> None:
    for number, arg in enumerate(args):
        for path, leaf in jax.tree_util.tree_flatten_with_path(arg)[0]:
            if isinstance(leaf, (int, float, complex)):
                continue
            # An array of another library says its shape and dtype, as JAX itself asks for.
            numbers = getattr(getattr(leaf, "dtype", None), "kind", "V") not in "OSUMm"
            if hasattr(leaf, "shape") and hasattr(leaf, "dtype") and numbers:
                continue
            where = jax.tree_util.keystr(path, simple=True, separator="/")
            raise TypeError(
                f"Argument {number} of the function to audit holds {leaf!r} of type {type(leaf).__name__}"
                + (f" at '{where}'" if where else "")
                + "; expected arrays or jax.ShapeDtypeStructs. Bind what is no array beforehand: "
                "functools.partial(fn, …)."
            )


def _without_models(
    fn: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[Callable[..., Any], tuple[chex.ArrayTree, ...]]:
    """A function of arrays instead of one of models, which returns the arrays of the models after it, too."""
    for framework in imported():
        positions = [i for i, arg in enumerate(args) if framework.is_model(arg)]
        if split := framework.split([args[i] for i in positions]) if positions else None:
            fn, args = _split(fn, framework, positions, split[1]), _replaced(args, positions, split[0])
    return fn, args


def _split(
    fn: Callable[..., Any],
    framework: Framework,
    positions: list[int],
    merge: Callable[[list[chex.ArrayTree]], list[Any]],
) -> Callable[..., Any]:
    def pure(*args: Any) -> Any:
        models = merge([args[i] for i in positions])
        out = fn(*_replaced(args, positions, models))
        return (*_arrays(framework, models), *_arrays(framework, [out]))

    return pure


def _arrays(framework: Framework, trees: list[Any]) -> list[chex.ArrayTree]:
    """Trees with the arrays of the models in them in the place of the models."""
    leaves, structure = jax.tree.flatten(trees, is_leaf=framework.is_model)
    positions = [i for i, x in enumerate(leaves) if framework.is_model(x)]
    split = framework.split([leaves[i] for i in positions]) if positions else None
    arrays = leaves if split is None else _replaced(tuple(leaves), positions, split[0])
    return jax.tree.unflatten(structure, arrays)


def _replaced(args: tuple[Any, ...], positions: list[int], values: list[Any]) -> tuple[Any, ...]:
    new = dict(zip(positions, values, strict=True))
    return tuple(new.get(i, arg) for i, arg in enumerate(args))


def _name_of(fn: Callable[..., Any]) -> str:
    inner = getattr(fn, "func", fn)
    return getattr(inner, "__name__", type(inner).__name__)


def _abstract(x: Any) -> str:
    leaves = jax.tree.leaves(x)
    if len(leaves) != 1 or leaves[0] is not x:
        return f"a {type(x).__name__} of {len(leaves)} arrays"
    aval = jax.typeof(x) if not isinstance(x, jax.ShapeDtypeStruct) else x
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]"
