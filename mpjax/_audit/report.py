"""How an audit prints: in a terminal, in colours where rich is installed, and in a notebook."""

import dataclasses
import html as htmllib
import io
import re
import shutil
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from mpjax import _tables as tables
from mpjax._audit.records import SEVERITIES, Finding, Records, percentage, summed

HEADER = ("module", "matmuls", "FLOPs", "share", "operands", "casts write", "saved for backward")
TOTAL = "total"
_RIGHT = {"matmuls", "FLOPs", "share", "casts write"}
# Where cells may be broken in a narrow terminal.
_BREAKS = dict.fromkeys(("operands", "saved for backward"), ", ")
_FINDINGS = ("severity", "kind", "module", "line", "what", "shapes", "share", "why it matters", "what to do")
_COLOURS = {"error": "bold red", "warning": "yellow", "note": "dim"}
_SHORT = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64"}

# Locations of one kind of finding that are printed.
_SHOWN = 6


@dataclasses.dataclass
class Totals:
    """The numbers of one module, or of several together.

    Attributes:
      count: of matmuls.
      flops: of matmuls, by their operand dtypes.
      cast_bytes: what casts write.
      saved: bytes saved for the backward pass, by dtype.
    """

    count: int = 0
    flops: dict[str, int] = dataclasses.field(default_factory=dict)
    cast_bytes: int = 0
    saved: dict[str, int] = dataclasses.field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.flops or self.cast_bytes or self.saved)

    @property
    def total_flops(self) -> int:
        return sum(self.flops.values())


def by_module(audit: Records) -> dict[str, Totals]:
    """The numbers of each module, in the order in which they first run."""
    totals = {module: Totals() for module in audit.modules}
    for m in audit.matmuls:
        own = totals.setdefault(m.module, Totals())
        own.count += m.count
        own.flops[m.operands] = own.flops.get(m.operands, 0) + m.flops
    for c in audit.casts:
        totals.setdefault(c.module, Totals()).cast_bytes += c.bytes
    for s in audit.saved:
        totals.setdefault(s.module, Totals()).saved[s.dtype] = s.bytes
    return totals


def whole(audit: Records) -> Totals:
    """The numbers of all modules together."""
    return Totals(sum(m.count for m in audit.matmuls), audit.flops, audit.cast_bytes, audit.saved_bytes)


def _together(parts: Sequence[Totals]) -> Totals:
    return Totals(
        sum(p.count for p in parts),
        summed(item for p in parts for item in p.flops.items()),
        sum(p.cast_bytes for p in parts),
        summed(item for p in parts for item in p.saved.items()),
    )


def rows(audit: Records) -> list[tables.Row]:
    """A row for each module, those that differ in a number of their path and nothing else together."""
    groups: dict[Any, dict[str, Totals]] = {}
    for module, own in by_module(audit).items():
        if own:
            dtypes = frozenset(own.flops), frozenset(own.saved)
            groups.setdefault((re.sub(r"\d+", "*", module), dtypes), {})[module] = own
    table: list[tables.Row] = []
    for (pattern, _), members in groups.items():
        name = next(iter(members)) if len(members) == 1 else f"{pattern} (×{len(members)})"
        own = _together(list(members.values()))
        part = percentage(own.total_flops / audit.total_flops) if own.flops else ""
        table.append(_row(name or "(model)", own, part))
    return table


def total(audit: Records) -> tables.Row:
    """The last row."""
    name, _, *cells = _row(TOTAL, whole(audit), "")
    return (name, str(whole(audit).count), *cells)


def _row(name: str, own: Totals, part: str) -> tables.Row:
    return (
        name,
        str(own.count or ""),
        quantity(own.total_flops, "FLOP"),
        part,
        shares(own.flops),
        quantity(own.cast_bytes, "B"),
        amounts(own.saved),
    )


def phases(audit: Records) -> list[str]:
    """A line for each phase that has matmuls: how its FLOPs are divided among operand dtypes."""
    by_phase: dict[str, dict[str, int]] = {}
    for m in audit.matmuls:
        own = by_phase.setdefault(m.phase, {})
        own[m.operands] = own.get(m.operands, 0) + m.flops
    return [f"{phase}: {quantity(sum(f.values()), 'FLOP')}, {shares(f)}" for phase, f in by_phase.items()]


def summary(findings: Sequence[Finding]) -> str:
    """How many findings of each severity there are."""
    counts = [(sum(f.severity == s for f in findings), s) for s in SEVERITIES]
    return ", ".join(f"{n} {s}{'s' if n != 1 else ''}" for n, s in counts if n) or "no findings"


def text(audit: Records) -> str:
    """The audit as it prints in a terminal."""
    head = f"audit of {audit.name}: {summary(audit.findings)}"
    table = printed(HEADER, rows(audit), [total(audit)], right=_RIGHT, breaks=_BREAKS)
    after = [*phases(audit), *_lowering(audit), *_finding_blocks(audit.findings)]
    return "\n".join([_coloured(head), table, *map(_coloured, after)])


def _finding_blocks(findings: Sequence[Finding]) -> list[str]:
    """A block for each kind: its locations, one for modules that differ in a number only, then the advice."""
    kinds: dict[tuple[str, str], dict[Any, list[Finding]]] = {}
    for f in findings:
        location = (re.sub(r"\d+", "*", f.module), f.phase, f.where, f.shapes)
        kinds.setdefault((f.severity, f.kind), {}).setdefault(location, []).append(f)
    blocks = []
    for (severity, kind), locations in kinds.items():
        lines = [f"\n{severity}: {kind}"]
        for (pattern, phase, where, shapes), same in list(locations.items())[:_SHOWN]:
            modules = {f.module for f in same}
            name = (same[0].module or "(model)") if len(modules) == 1 else f"{pattern} (×{len(modules)})"
            concerned = f"{percentage(sum(f.share for f in same))} of the {same[0].share_of}"
            lines += [f"  {name}, {phase}, {where}: {same[0].message}", f"    {shapes}: {concerned}"]
        if len(locations) > _SHOWN:
            lines.append(f"  and {len(locations) - _SHOWN} more locations, which .findings holds")
        first = next(iter(locations.values()))[0]
        blocks.append("\n".join([*lines, f"  Why it matters: {first.why}", f"  What to do: {first.fix}"]))
    return blocks


def html(audit: Records) -> str:
    """The audit as a notebook shows it."""
    found = [
        (
            *(f.severity, f.kind, f.module or "(model)", f.where, f.message, f.shapes),
            *(percentage(f.share), f.why, f.fix),
        )
        for f in audit.findings
    ]
    lines = "".join(f"<p>{htmllib.escape(line)}</p>" for line in [*phases(audit), *_lowering(audit)])
    return (
        f"<p><b>audit of {htmllib.escape(audit.name)}</b>: {summary(audit.findings)}</p>"
        + tables.html(HEADER, [*rows(audit), total(audit)])
        + lines
        + (tables.html(_FINDINGS, found) if found else "")
    )


def quantity(n: int, unit: str) -> str:
    """A number with its unit, in steps of a thousand."""
    if not n:
        return ""
    value = float(n)
    for prefix in ("", "k", "M", "G", "T", "P"):
        if value < 1000 or prefix == "P":
            break
        value /= 1000
    return f"{value:.3g} {prefix}{unit}" if value < 1000 else f"{value:.0f} {prefix}{unit}"


def shares(flops: dict[str, int]) -> str:
    """`bf16`, or `bf16 75.0 %, f32 25.0 %`."""
    all_flops = sum(flops.values())
    names = {key: " × ".join(_SHORT.get(d, d) for d in key.split(" × ")) for key in flops}
    if len(flops) == 1:
        return next(iter(names.values()))
    ordered = sorted(flops, key=lambda k: -flops[k])
    return ", ".join(f"{names[k]} {percentage(flops[k] / all_flops)}" for k in ordered)


def amounts(sizes: dict[str, int]) -> str:
    """`bf16 12 MB, f32 3 MB, other 1 kB`: floating dtypes, the largest first, then integers and bools together."""
    floating = {_SHORT.get(k, k): n for k, n in sizes.items() if n and "float" in k}
    other = sum(sizes.values()) - sum(floating.values())
    amounts = sorted(floating.items(), key=lambda item: -item[1]) + ([("other", other)] if other else [])
    return ", ".join(f"{name} {quantity(n, 'B')}" for name, n in amounts)


def _lowering(audit: Records) -> list[str]:
    if audit.lowering is None:
        return []
    found = ", ".join(f"{n} of {operands}" for operands, n in audit.lowering.lowered.items()) or "none"
    return [f"matmuls in the StableHLO for {audit.lowering.platform}: {found}"]


def _coloured(line: str) -> str:
    """A finding in the colour of its severity, where there is a terminal that shows colours."""
    if not sys.stdout.isatty() or (rich := _rich()) is None:
        return line
    start, colon, rest = line.lstrip("\n").partition(":")
    if start not in _COLOURS:
        return line
    return _rendered(rich, rich["Text"].assemble((start, _COLOURS[start]), colon + rest))


def printed(
    header: tables.Row,
    body: Collection[tables.Row],
    last: Collection[tables.Row] = (),
    *,
    right: Collection[str] = (),
    breaks: Mapping[str, str],
) -> str:
    """A table whose header is bold, where there is a terminal that shows it."""
    title, below = tables.table(header, body, last, right=right, breaks=breaks)
    if sys.stdout.isatty() and (rich := _rich()) is not None:
        title = _rendered(rich, rich["Text"](title, "bold"))
    return f"{title}\n{below}"


def _rendered(rich: dict[str, Any], renderable: Any) -> str:
    out = io.StringIO()
    console = rich["Console"](
        file=out,
        width=shutil.get_terminal_size((120, 24)).columns,
        force_terminal=sys.stdout.isatty(),
        highlight=False,
        markup=False,
    )
    console.print(renderable)
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip("\n").split("\n"))


def _rich() -> dict[str, Any] | None:
    """What is needed of rich, if it is installed."""
    try:
        from rich.console import Console
        from rich.text import Text
    except ImportError:
        return None
    return {"Console": Console, "Text": Text}
