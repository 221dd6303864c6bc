"""How an audit prints: in a terminal, in colours where rich is installed, and in a notebook."""

import dataclasses
import html as htmllib
import io
import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from mpjax import _tables as tables
from mpjax._audit.findings import SEVERITIES, Finding, share

if TYPE_CHECKING:
    from mpjax._audit.audit import Audit

_HEADER = ("module", "products", "FLOPs", "share", "operands", "casts write", "saved for backward")
_RIGHT = {"products", "FLOPs", "share", "casts write"}
# Where cells may be broken in a narrow terminal.
_BREAKS = dict.fromkeys(("operands", "saved for backward", "before", "after"), ", ") | {"what": " "}
_TOTAL = "total"
_COLOURS = {"error": "bold red", "warning": "yellow", "note": "dim"}
_SHORT = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64"}

# Places of one kind of finding that are printed.
_SHOWN = 6


def rows(audit: "Audit") -> list[tables.Row]:
    """A row for each module, those that differ in a number of their path and nothing else together."""
    groups: dict[Any, list[str]] = {}
    flops, saved, casts, count = _by_module(audit)
    for module in audit.modules:
        if not (module in flops or module in saved or module in casts):
            continue
        dtypes = frozenset(flops.get(module, {})), frozenset(saved.get(module, {}))
        groups.setdefault((re.sub(r"\d+", "*", module), dtypes), []).append(module)
    table: list[tables.Row] = []
    for (pattern, _), members in groups.items():
        name = members[0] if len(members) == 1 else f"{pattern} (×{len(members)})"
        own_flops = _merged(flops.get(m, {}) for m in members)
        table.append(
            (
                name or "(model)",
                str(sum(count.get(m, 0) for m in members) or ""),
                quantity(sum(own_flops.values()), "FLOP") if own_flops else "",
                share(sum(own_flops.values()) / audit.total_flops) if own_flops else "",
                _shares(own_flops),
                quantity(sum(casts.get(m, 0) for m in members), "B"),
                _amounts(_merged(saved.get(m, {}) for m in members)),
            )
        )
    return table


def total(audit: "Audit") -> tables.Row:
    """The last row."""
    return (
        _TOTAL,
        str(sum(p.count for p in audit.products)),
        quantity(audit.total_flops, "FLOP"),
        "",
        _shares(audit.flops),
        quantity(audit.cast_bytes, "B"),
        _amounts(audit.saved_bytes),
    )


def phases(audit: "Audit") -> list[str]:
    """A line for each phase that has products: how its FLOPs are divided among operand dtypes."""
    by_phase: dict[str, dict[str, int]] = {}
    for p in audit.products:
        own = by_phase.setdefault(p.phase, {})
        own[p.operands] = own.get(p.operands, 0) + p.flops
    return [f"{phase}: {quantity(sum(f.values()), 'FLOP')}, {_shares(f)}" for phase, f in by_phase.items()]


def summary(findings: Sequence[Finding]) -> str:
    """How many findings of each severity there are."""
    counts = [(sum(f.severity == s for f in findings), s) for s in SEVERITIES]
    return ", ".join(f"{n} {s}{'s' if n != 1 else ''}" for n, s in counts if n) or "no findings"


def text(audit: "Audit") -> str:
    """The audit as it prints in a terminal."""
    head = f"audit of {audit.name}: {summary(audit.findings)}"
    table = _table(_HEADER, rows(audit), [total(audit)])
    after = [*phases(audit), *_lowering(audit), *_finding_blocks(audit.findings)]
    return "\n".join([_coloured(head), table, *map(_coloured, after)])


def _finding_blocks(findings: Sequence[Finding]) -> list[str]:
    """A block for each kind: its places, those in modules that differ in a number only as one, then the advice."""
    kinds: dict[tuple[str, str], dict[Any, list[Finding]]] = {}
    for f in findings:
        place = (re.sub(r"\d+", "*", f.module), f.phase, f.where, f.shapes)
        kinds.setdefault((f.severity, f.kind), {}).setdefault(place, []).append(f)
    blocks = []
    for (severity, kind), places in kinds.items():
        lines = [f"\n{severity}: {kind}"]
        for (pattern, phase, where, shapes), same in list(places.items())[:_SHOWN]:
            modules = {f.module for f in same}
            name = (same[0].module or "(model)") if len(modules) == 1 else f"{pattern} (×{len(modules)})"
            concerned = f"{share(sum(f.share for f in same))} of the {same[0].share_of}"
            lines += [f"  {name}, {phase}, {where}: {same[0].message}", f"    {shapes}: {concerned}"]
        if len(places) > _SHOWN:
            lines.append(f"  and {len(places) - _SHOWN} more places, which .findings holds")
        first = next(iter(places.values()))[0]
        blocks.append("\n".join([*lines, f"  Why it matters: {first.why}", f"  What to do: {first.fix}"]))
    return blocks


def html(audit: "Audit") -> str:
    """The audit as a notebook shows it."""

    def row(cells: Iterable[str], tag: str = "td") -> str:
        return "<tr>" + "".join(f"<{tag}>{htmllib.escape(c)}</{tag}>" for c in cells) + "</tr>"

    def table(header: tuple[str, ...], body: Iterable[tuple[str, ...]]) -> str:
        return f"<table><thead>{row(header, 'th')}</thead><tbody>{''.join(map(row, body))}</tbody></table>"

    found = [
        (
            f.severity,
            f.kind,
            f.module or "(model)",
            f.where,
            f.message,
            f.shapes,
            share(f.share),
            f.why,
            f.fix,
        )
        for f in audit.findings
    ]
    header = ("severity", "kind", "module", "line", "what", "shapes", "share", "why it matters", "what to do")
    lines = "".join(f"<p>{htmllib.escape(line)}</p>" for line in [*phases(audit), *_lowering(audit)])
    return (
        f"<p><b>audit of {htmllib.escape(audit.name)}</b>: {summary(audit.findings)}</p>"
        + table(_HEADER, [*rows(audit), total(audit)])
        + lines
        + (table(header, found) if found else "")
    )


@dataclasses.dataclass(frozen=True)
class Diff:
    """What differs between two audits.

    Attributes:
      changes: (module, what, before, after), such as `("blocks/0/attn", "operands", "f32", "bf16")`.
      gone: findings of the first that the second does not have.
      new: findings of the second that the first does not have.
    """

    changes: tuple[tuple[str, str, str, str], ...]
    gone: tuple[Finding, ...]
    new: tuple[Finding, ...]

    def __bool__(self) -> bool:
        return bool(self.changes or self.gone or self.new)

    def __str__(self) -> str:
        if not self:
            return "no difference"
        header = ("module", "what", "before", "after")
        body = [change for change in self.changes if change[0] != _TOTAL]
        whole = [change for change in self.changes if change[0] == _TOTAL]
        lines = [_table(header, body, whole)] if self.changes else []
        for title, found in (("gone", self.gone), ("new", self.new)):
            lines += [f"{title}: {f.severity}: {f.kind} in {f.module or '(model)'}, {f.where}" for f in found]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<pre>{htmllib.escape(str(self))}</pre>"

    def to_dict(self) -> dict[str, Any]:
        """The difference as plain strings, lists and dicts."""
        names = ("module", "what", "before", "after")
        return {
            "changes": [dict(zip(names, change, strict=True)) for change in self.changes],
            "gone": [dataclasses.asdict(f) for f in self.gone],
            "new": [dataclasses.asdict(f) for f in self.new],
        }


def diff(before: "Audit", after: "Audit") -> Diff:
    """See `Audit.diff`."""
    described = [_described(a) for a in (before, after)]
    # What either has in all comes last, in whichever of them its modules come.
    modules = [m for m in dict.fromkeys([*described[0], *described[1]]) if m != _TOTAL]
    changes = []
    for module in [*modules, _TOTAL]:
        olds, news = (d.get(module, {}) for d in described)
        for what in dict.fromkeys([*olds, *news]):
            old, new = olds.get(what, ""), news.get(what, "")
            if old != new:
                changes.append((module, what, old or "none", new or "none"))
    keys = [{(f.kind, f.module, f.file, f.line) for f in a.findings} for a in (before, after)]
    return Diff(
        tuple(changes),
        tuple(f for f in before.findings if (f.kind, f.module, f.file, f.line) not in keys[1]),
        tuple(f for f in after.findings if (f.kind, f.module, f.file, f.line) not in keys[0]),
    )


def _described(audit: "Audit") -> dict[str, dict[str, str]]:
    """What is compared of each module, and of the whole."""
    flops, saved, casts, _ = _by_module(audit)
    found: dict[str, dict[str, str]] = {}
    for module in audit.modules:
        found[module or "(model)"] = {
            "operands": _shares(flops.get(module, {})),
            "FLOPs": quantity(sum(flops.get(module, {}).values()), "FLOP"),
            "casts write": quantity(casts.get(module, 0), "B"),
            "saved for backward": _amounts(saved.get(module, {})),
        }
    whole = dict(zip(_HEADER, total(audit), strict=True))
    found[_TOTAL] = {name: whole[name] for name in ("operands", "FLOPs", "casts write", "saved for backward")}
    return found


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


def _by_module(audit: "Audit") -> tuple[dict[str, dict[str, int]], dict[str, dict[str, int]], dict, dict]:
    """By module: FLOPs by operands, saved bytes by dtype, bytes of casts, products."""
    flops: dict[str, dict[str, int]] = {}
    saved: dict[str, dict[str, int]] = {}
    casts: dict[str, int] = {}
    count: dict[str, int] = {}
    for p in audit.products:
        own = flops.setdefault(p.module, {})
        own[p.operands] = own.get(p.operands, 0) + p.flops
        count[p.module] = count.get(p.module, 0) + p.count
    for s in audit.saved:
        saved.setdefault(s.module, {})[s.dtype] = s.bytes
    for c in audit.casts:
        casts[c.module] = casts.get(c.module, 0) + c.bytes
    return flops, saved, casts, count


def _merged(parts: Iterable[dict[str, int]]) -> dict[str, int]:
    merged: dict[str, int] = {}
    for part in parts:
        for key, n in part.items():
            merged[key] = merged.get(key, 0) + n
    return merged


def _shares(flops: dict[str, int]) -> str:
    """`bf16`, or `bf16 75.0 %, f32 25.0 %`."""
    whole = sum(flops.values())
    names = {key: " × ".join(_SHORT.get(d, d) for d in key.split(" × ")) for key in flops}
    if len(flops) == 1:
        return next(iter(names.values()))
    ordered = sorted(flops, key=lambda k: -flops[k])
    return ", ".join(f"{names[k]} {share(flops[k] / whole)}" for k in ordered)


def _amounts(sizes: dict[str, int]) -> str:
    """`bf16 12 MB, f32 3 MB, other 1 kB`: floating dtypes, the largest first, then integers and bools together."""
    floating = {_SHORT.get(k, k): n for k, n in sizes.items() if n and "float" in k}
    other = sum(sizes.values()) - sum(floating.values())
    amounts = sorted(floating.items(), key=lambda item: -item[1]) + ([("other", other)] if other else [])
    return ", ".join(f"{name} {quantity(n, 'B')}" for name, n in amounts)


def _lowering(audit: "Audit") -> list[str]:
    if audit.lowering is None:
        return []
    found = ", ".join(f"{n} of {operands}" for operands, n in audit.lowering.lowered.items()) or "none"
    return [f"products in the StableHLO for {audit.lowering.platform}: {found}"]


def _coloured(line: str) -> str:
    """A finding in the colour of its severity, where there is a terminal that shows colours."""
    if not sys.stdout.isatty() or (rich := _rich()) is None:
        return line
    start, colon, rest = line.lstrip("\n").partition(":")
    if start not in _COLOURS:
        return line
    return _printed(rich, rich["Text"].assemble((start, _COLOURS[start]), colon + rest))


def _table(header: tables.Row, body: Sequence[tables.Row], last: Sequence[tables.Row]) -> str:
    title, below = tables.table(header, body, last, right=_RIGHT, breaks=_BREAKS)
    if sys.stdout.isatty() and (rich := _rich()) is not None:
        title = _printed(rich, rich["Text"](title, "bold"))
    return f"{title}\n{below}"


def _printed(rich: dict[str, Any], renderable: Any) -> str:
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
