"""What an audit can find: kinds of findings, their severity, and how to silence them."""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from mpjax._audit.flops import flops
from mpjax._audit.program import Op, Program
from mpjax._audit.records import SEVERITIES, Finding, Lowering
from mpjax._audit.source_locations import Line
from mpjax._precision import dtypes
from mpjax._precision.policy_map import PolicyMap


@dataclasses.dataclass(frozen=True)
class Kind:
    """What findings of a kind have in common: why it matters, and what to do."""

    why: str
    fix: str


KINDS: dict[str, Kind] = {
    "silent-upcast": Kind(
        "A wider matmul takes 2 to 16 times as long on TPU and GPU, and its results widen what follows.",
        "Make the constant or parameter that widens it a Python number or cast it where it is used; or run the "
        "model under mpjax.autocast or a TrainState's policy. If it is intended, give the module its own policy.",
    ),
    "below-policy": Kind(
        "The matmul has fewer bits, or another format, than the policy says.",
        "Remove the dtype argument or the cast that decides it, or give the module a policy that says so.",
    ),
    "mixed-operands": Kind(
        "Accelerators have no unit for two formats: one operand is converted, or the matmul runs slowly.",
        "Cast both operands to one dtype.",
    ),
    "half-accumulation": Kind(
        "A sum in 16 bits stops growing: a bfloat16 counts to 256, a float16 to 2048.",
        "Sum in float32: jnp.sum(x, dtype=jnp.float32), a float32 carry, or run it under mpjax.autocast.",
    ),
    "half-range": Kind(
        "float16 ends at 65504 and has 11 bits: the result overflows, vanishes or is coarse.",
        "Compute it in float32 and cast the result, as mpjax.autocast does; or use bfloat16.",
    ),
    "mask-overflow": Kind(
        "The constant becomes infinite, and inf - inf in a row whose entries are all masked is NaN.",
        "Use jnp.finfo(x.dtype).min / 2 or jnp.where(mask, x, -jnp.inf) with an entry left in each row.",
    ),
    "vanishing-constant": Kind(
        "The constant rounds to zero, so it no longer guards a division or a logarithm.",
        "Add it in float32, or choose one above the format's smallest number.",
    ),
    "early-cast": Kind(
        "The cotangents of all uses are added in 16 bits before they become float32: small ones are lost.",
        "Store the parameter in float32 and cast it at each use, as mpjax.autocast does.",
    ),
    "cast-roundtrip": Kind(
        "Casting back and forth costs bytes, and what was rounded away does not come back.",
        "Remove both casts.",
    ),
    "half-collective": Kind(
        "The sum over devices is rounded at each of them, and float16 overflows above 65504.",
        "Cast to float32 before the collective; mpjax's axis_name= does.",
    ),
    "half-update": Kind(
        "An update below 1/256 of a bfloat16 parameter (1/2048 of a float16 one) changes nothing.",
        "Store the parameter in float32 ('p=f32') and cast it at each use.",
    ),
    "float64": Kind(
        "TPUs emulate float64 and GPUs run it at a fraction of the rate.",
        "Turn off jax_enable_x64, or name dtypes explicitly where numpy's default is float64.",
    ),
    "state-dtype": Kind(
        "The next call has other dtypes than this one: it is traced and compiled again, or a loop refuses it.",
        "Cast the new value to the dtype of the old one at the end of the step.",
    ),
    "integer-cast": Kind(
        "Integers above 256 (bfloat16) or 2048 (float16) are rounded: token ids and positions change.",
        "Cast only floating leaves: mpjax.cast_floating, or a policy's cast_to_compute.",
    ),
    "key-cast": Kind(
        "A PRNG key whose bits are rounded is another key, and many keys become the same.",
        "Cast only floating leaves, or use typed keys: jax.random.key.",
    ),
    "lowering": Kind(
        "The compiler for this platform is given other matmuls than the traced program has.",
        "Look at jax.export.export(jax.jit(fn), platforms=[…])(*args).mlir_module().",
    ),
}


@dataclasses.dataclass
class Findings:
    """Collects findings; those at one line of one module and phase that say the same become one.

    Attributes:
      program: what is checked.
      policies: what to compare it with, if there is such.
      lowering: its matmuls for another platform, if it was lowered for one.
    """

    program: Program
    policies: PolicyMap | None = None
    lowering: Lowering | None = None
    _found: dict[tuple[str | int, ...], tuple[Finding, int]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.total_flops = sum(flops(op) for op in self.program.matmuls())
        self.total_bytes = sum(op.result_bytes for op in self.program.computing())

    def add(
        self,
        kind: str,
        severity: str,
        op: Op | None,
        message: str,
        shapes: str = "",
        *,
        cost: int | None = None,
        of: str = "bytes",
    ) -> None:
        """Adds a finding about an operation; None if it is about an argument.

        Args:
          kind: one of `KINDS`.
          severity: one of `SEVERITIES`.
          op: where it is.
          message: what was found.
          shapes: by default those of the operation.
          cost: FLOPs or bytes; by default the bytes of the operation's results.
          of: which of them.
        """
        line, module, phase = (op.line, op.path, op.phase) if op is not None else (Line(), "", "forward")
        key = (kind, severity, module, phase, line.file, line.line, message)
        if cost is None:
            cost = op.result_bytes if op is not None else 0
        if key in self._found:
            first, before = self._found[key]
            first = dataclasses.replace(first, count=first.count + 1)
        else:
            before = 0
            first = Finding(
                kind,
                severity,
                module,
                phase,
                line.file,
                line.line,
                message,
                shapes or shapes_of(op),
                0.0,
                of,
                1,
                KINDS[kind].why,
                KINDS[kind].fix,
            )
        total = max(1, self.total_flops if of == "FLOPs" else self.total_bytes)
        self._found[key] = (
            dataclasses.replace(first, share=min(1.0, (before + cost) / total)),
            before + cost,
        )

    def sorted(self) -> tuple[Finding, ...]:
        """All findings, the most severe and largest first."""
        found = (finding for finding, _ in self._found.values())
        return tuple(sorted(found, key=lambda f: (SEVERITIES.index(f.severity), -f.share)))


def shapes_of(op: Op | None) -> str:
    """Operands and result of an operation, as far as they are floating."""
    if op is None:
        return ""
    operands = [str(v) for v in op.ins if v.is_floating] or [str(v) for v in op.ins]
    return f"{' , '.join(operands[:3])} → {op.out}" if op.outs else ", ".join(operands[:3])


Silenced: TypeAlias = Mapping[str, str | Sequence[str]]


def silence(found: Iterable[Finding], silenced: Silenced | None) -> tuple[Finding, ...]:
    """Leaves out findings that are intended.

    Args:
      found: all of them.
      silenced: from a regular expression for whole module paths (".*" for all) to a kind or several, "*" for all.

    Raises:
      TypeError: if it is no such mapping.
      ValueError: if a pattern does not compile or a kind does not exist.
    """
    if silenced is not None and not isinstance(silenced, Mapping):
        raise TypeError(
            f"Findings to ignore are a dict from a pattern of module paths to kinds, as in {{'.*': 'half-range'}}, "
            f"got {silenced!r}."
        )
    rules = []
    for pattern, kinds in (silenced or {}).items():
        try:
            matcher = re.compile(pattern)
        except re.error as e:
            raise ValueError(
                f"The pattern '{pattern}' of findings to ignore does not compile: {e}. Patterns are regular "
                "expressions for whole module paths, as in '.*norm'; '.*' matches all."
            ) from None
        names = [kinds] if isinstance(kinds, str) else list(kinds)
        for name in names:
            if name != "*" and name not in KINDS:
                raise ValueError(
                    f"Unknown kind of finding '{name}'{dtypes.did_you_mean(name, list(KINDS))} It must be * or "
                    f"one of {', '.join(KINDS)}."
                )
        rules.append((matcher, names))
    return tuple(
        f
        for f in found
        if not any(m.fullmatch(f.module) and ("*" in names or f.kind in names) for m, names in rules)
    )
