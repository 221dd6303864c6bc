"""`audit`: which precision a function really runs in, module by module, and what is wrong with it."""

import dataclasses
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jmp
from flax import nnx

from mpjax._audit import flops as costs
from mpjax._audit import report, residuals
from mpjax._audit.checks import casts as check_casts
from mpjax._audit.checks import matmuls as check_products
from mpjax._audit.checks import numbers as check_numbers
from mpjax._audit.checks import state as check_state
from mpjax._audit.checks import sums as check_sums
from mpjax._audit.findings import ERROR, NOTE, SEVERITIES, Finding, Findings, Silenced, silence
from mpjax._audit.program import Op, Program
from mpjax._audit.read_jaxpr import read, traced_anew
from mpjax._audit.stablehlo import Lowering, check_platform, lower
from mpjax._precision.policy_map import PolicyMap, as_policy_map


@dataclasses.dataclass(frozen=True)
class Products:
    """Products and convolutions of one module in one phase whose operands have the same dtypes.

    Attributes:
      module: `/`-joined path; empty for the model itself and for plain functions.
      phase: "forward", "backward" or "optimizer".
      operands: their dtype; of two dtypes both, as in "bfloat16 × float32".
      count: how often such a product runs, each step of a loop counted.
      flops: multiplications and additions of all of them.
    """

    module: str
    phase: str
    operands: str
    count: int
    flops: int


@dataclasses.dataclass(frozen=True)
class Casts:
    """Casts of one module in one phase from one floating format to another.

    Attributes:
      module: `/`-joined path.
      phase: "forward", "backward" or "optimizer".
      before: the dtype that is cast.
      after: the dtype it is cast to.
      count: how often such a cast runs.
      bytes: what all of them write, unless the compiler fuses them into what follows.
    """

    module: str
    phase: str
    before: str
    after: str
    count: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Saved:
    """What the forward pass of one module makes and the backward pass takes, in bytes on all devices."""

    module: str
    dtype: str
    bytes: int


@dataclasses.dataclass(frozen=True)
class Audit:
    """What a function runs in; it prints as a table in a terminal and in a notebook.

    Attributes:
      name: of the function.
      products: products and convolutions by module, phase and operand dtypes.
      casts: casts by module, phase and dtypes.
      saved: bytes kept for the backward pass by module and dtype.
      operations: how many operations of any kind the program has, by module and phase.
      findings: what is wrong, the gravest first.
      lowering: the products for another platform, if one was asked for.
    """

    name: str
    products: tuple[Products, ...]
    casts: tuple[Casts, ...]
    saved: tuple[Saved, ...]
    operations: tuple[tuple[str, str, int], ...]
    findings: tuple[Finding, ...]
    lowering: Lowering | None = None

    @property
    def flops(self) -> dict[str, int]:
        """FLOPs of products and convolutions by operand dtypes."""
        return _sum((p.operands, p.flops) for p in self.products)

    @property
    def total_flops(self) -> int:
        """FLOPs of all products and convolutions."""
        return sum(p.flops for p in self.products)

    @property
    def cast_bytes(self) -> int:
        """Bytes that casts write."""
        return sum(c.bytes for c in self.casts)

    @property
    def saved_bytes(self) -> dict[str, int]:
        """Bytes kept for the backward pass by dtype."""
        return _sum((s.dtype, s.bytes) for s in self.saved)

    @property
    def modules(self) -> tuple[str, ...]:
        """The paths of all modules that have operations, in the order in which they first run."""
        return tuple(dict.fromkeys(module for module, _, _ in self.operations))

    def of(self, kind: str) -> tuple[Finding, ...]:
        """The findings of one kind."""
        return tuple(f for f in self.findings if f.kind == kind)

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings that are errors."""
        return tuple(f for f in self.findings if f.severity == ERROR)

    def at_least(self, severity: str) -> tuple[Finding, ...]:
        """The findings of this severity and graver ones.

        Args:
          severity: "error", "warning" or "note".

        Raises:
          ValueError: if it is none of these.
        """
        if severity not in SEVERITIES:
            raise ValueError(f"Unknown severity '{severity}'; it must be one of {', '.join(SEVERITIES)}.")
        wanted = SEVERITIES[: SEVERITIES.index(severity) + 1]
        return tuple(f for f in self.findings if f.severity in wanted)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain numbers, strings, lists and dicts."""
        fields = dataclasses.asdict(self)
        fields["operations"] = [
            {"module": module, "phase": phase, "count": count} for module, phase, count in self.operations
        ]
        fields |= {name: list(fields[name]) for name in ("products", "casts", "saved", "findings")}
        return fields

    def to_json(self, indent: int | None = 2) -> str:
        """`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=indent)

    def diff(self, other: "Audit") -> "report.Diff":
        """What differs in `other`, module by module: what a changed policy changed.

        Args:
          other: the audit to compare with, as of the same function under another policy.

        Raises:
          TypeError: if it is none.
        """
        if not isinstance(other, Audit):
            raise TypeError(
                f"An audit differs from another audit, got {other!r} of type {type(other).__name__}."
            )
        return report.diff(self, other)

    def __str__(self) -> str:
        return report.text(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return report.html(self)


def audit(
    fn: Callable[..., Any],
    *args: Any,
    policies: "str | Mapping[Any, Any] | jmp.Policy | PolicyMap | None" = None,
    platform: str | None = None,
    ignore: Silenced | None = None,
) -> Audit:
    """Returns what precision each module of a function runs in, and what is wrong with it.

    The function is traced, not run. Everything in it counts: the loss, its gradient, the optimizer, inner jits,
    loops (times their number of steps), rematerialised and sharded code.

    Args:
      fn: any JAX function, jitted or not: a loss, a gradient, a whole train step.
      *args: its arguments: arrays, `jax.ShapeDtypeStruct`s, or pytrees and nnx modules of them.
      policies: what to compare the program with; it is not traced under them. Left out, products are compared with
        the policy that the program itself was traced under, such as that of its `TrainState`.
      platform: also lower for "tpu", "cuda", "rocm" or "cpu", none of which has to be present, and check that the
        products in StableHLO are those of the traced program.
      ignore: findings that are meant: from a regular expression for whole module paths to a kind of finding or
        several, such as `{".*norm": "half-range", ".*": ["cast-roundtrip"]}`.

    Raises:
      TypeError: if an argument holds something that is no array.
      ValueError: if the platform or a kind is unknown, or a pattern of `policies` governs no module of `fn`.

    >>> found = audit(lambda x, w: x @ w, jnp.ones((8, 16), jnp.bfloat16), jnp.ones((16, 4)))
    >>> found.flops, [finding.kind for finding in found.findings]
    ({'bfloat16 × float32': 1024}, ['mixed-operands'])
    """
    if not callable(fn):
        raise TypeError(
            f"audit expects a function and its arguments, got {fn!r} of type {type(fn).__name__}."
        )
    if platform is not None:
        check_platform(platform)
    silence((), ignore)
    policies = None if policies is None else as_policy_map(policies)
    _check_arguments(args)
    name = _name_of(fn)
    fn, args = _without_nnx(fn, args)
    with traced_anew():
        program = _read(fn, args, name)
        lowering = None if platform is None else lower(fn, args, program, platform)
    if policies is not None:
        check_products.check_governs(program, policies)
    found = Findings(program, policies)
    check_products.check(found)
    check_sums.check(found)
    check_numbers.check(found)
    check_casts.check(found)
    check_state.check(found)
    if lowering is not None:
        _compare(found, lowering)
    return Audit(
        name,
        _products(program),
        _casts(program),
        _saved(program),
        tuple(
            (m, p, n) for (m, p), n in _sum(((op.path, op.phase), 1) for op in program.computing()).items()
        ),
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


def _products(program: Program) -> tuple[Products, ...]:
    def key(op: Op) -> tuple[str, str, str]:
        return op.path, op.phase, costs.operands(op)

    count = _sum((key(op), op.count) for op in program.products())
    flops = _sum((key(op), costs.flops(op)) for op in program.products())
    return tuple(
        Products(m, phase, operands, n, flops[m, phase, operands])
        for (m, phase, operands), n in count.items()
    )


def _casts(program: Program) -> tuple[Casts, ...]:
    def key(op: Op) -> Any:
        return op.path, op.phase, op.ins[0].dtype.name, op.out.dtype.name

    casts = [op for op in program.computing() if costs.is_cast(op)]
    count = _sum((key(op), op.count) for op in casts)
    written = _sum((key(op), costs.result_bytes(op)) for op in casts)
    return tuple(
        Casts(module, phase, before, after, n, written[module, phase, before, after])
        for (module, phase, before, after), n in count.items()
    )


def _saved(program: Program) -> tuple[Saved, ...]:
    total = _sum(((module, dtype), n) for module, dtype, n in residuals.saved(program))
    return tuple(Saved(module, dtype, n) for (module, dtype), n in total.items())


def _compare(found: Findings, lowering: Lowering) -> None:
    missing = any(after < before for before, after in lowering.differences.values())
    # JAX lowers some operations, such as decompositions and unrolled loops, to more products than were traced;
    # and of code that depends on the platform it lowers what this one needs.
    chosen = any(op.name == "platform_index" for op in found.program.ops)
    # On CPUs mpjax itself widens 16-bit products where the machine has none, see cpu.py.
    chosen |= lowering.platform == "cpu"
    for operands, (before, after) in lowering.differences.items():
        found.add(
            "lowering",
            ERROR if missing and not chosen else NOTE,
            None,
            f"For {lowering.platform} {after} products take {operands}; the traced program has {before}.",
            operands,
        )


def _sum(pairs: Iterable[tuple[Any, int]]) -> dict[Any, int]:
    total: dict[Any, int] = defaultdict(int)
    for key, n in pairs:
        total[key] += n
    return dict(total)


# -------------------------------------------------------------------------------------------- arguments


def _check_arguments(args: tuple[Any, ...]) -> None:
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


def _without_nnx(fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A function of pure state in the place of one that changes nnx modules, and returns what became of them."""
    stateful = [i for i, arg in enumerate(args) if isinstance(arg, nnx.Module)]
    if not stateful:
        return fn, args
    graphdef, state = nnx.split([args[i] for i in stateful])

    def pure(*args: Any) -> Any:
        states = {n: args[i] for n, i in enumerate(stateful) if n in state}
        models = nnx.merge(graphdef, nnx.State(states))
        out = fn(*(models[stateful.index(i)] if i in stateful else arg for i, arg in enumerate(args)))
        new = nnx.split(models)[1]
        return (*(new[n] for n in states), out)

    # What modules share is in the state of the first of them only.
    return pure, tuple(state.get(stateful.index(i)) if i in stateful else arg for i, arg in enumerate(args))


def _name_of(fn: Callable[..., Any]) -> str:
    inner = getattr(fn, "func", fn)
    return getattr(inner, "__name__", type(inner).__name__)


def _abstract(x: Any) -> str:
    leaves = jax.tree.leaves(x)
    if len(leaves) != 1 or leaves[0] is not x:
        return f"a {type(x).__name__} of {len(leaves)} arrays"
    aval = jax.typeof(x) if not isinstance(x, jax.ShapeDtypeStruct) else x
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]"
