"""What differs between two audits, module by module."""

import dataclasses
import html as htmllib
from typing import Any

from mpjax._audit import report
from mpjax._audit.records import Finding, Records

_HEADER = ("module", "what", "before", "after")
_BREAKS = {"what": " ", "before": ", ", "after": ", "}


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
        body = [change for change in self.changes if change[0] != report.TOTAL]
        whole = [change for change in self.changes if change[0] == report.TOTAL]
        lines = [report.printed(_HEADER, body, whole, breaks=_BREAKS)] if self.changes else []
        for title, found in (("gone", self.gone), ("new", self.new)):
            lines += [f"{title}: {f.severity}: {f.kind} in {f.module or '(model)'}, {f.where}" for f in found]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<pre>{htmllib.escape(str(self))}</pre>"

    def to_dict(self) -> dict[str, Any]:
        """The difference as plain strings, lists and dicts."""
        return {
            "changes": [dict(zip(_HEADER, change, strict=True)) for change in self.changes],
            "gone": [dataclasses.asdict(f) for f in self.gone],
            "new": [dataclasses.asdict(f) for f in self.new],
        }


def diff(before: Records, after: Records) -> Diff:
    """See `mpjax.Audit.diff`."""
    described = [_described(a) for a in (before, after)]
    # The rows of the total come last, also where one audit has modules that the other does not have.
    modules = [m for m in dict.fromkeys([*described[0], *described[1]]) if m != report.TOTAL]
    changes = []
    for module in [*modules, report.TOTAL]:
        olds, news = (d.get(module, {}) for d in described)
        for what in dict.fromkeys([*olds, *news]):
            old, new = olds.get(what, ""), news.get(what, "")
            if old != new:
                changes.append((module, what, old or "none", new or "none"))
    return Diff(tuple(changes), _missing(before, after), _missing(after, before))


def _missing(audit: Records, other: Records) -> tuple[Finding, ...]:
    """The findings of an audit that another does not have."""
    known = {_identity(f) for f in other.findings}
    return tuple(f for f in audit.findings if _identity(f) not in known)


def _identity(f: Finding) -> tuple[str, str, str, int]:
    return f.kind, f.module, f.file, f.line


def _described(audit: Records) -> dict[str, dict[str, str]]:
    """What is compared of each module, and of the whole."""
    totals = report.by_module(audit)
    found = {module or "(model)": _cells(totals[module]) for module in audit.modules}
    return found | {report.TOTAL: _cells(report.whole(audit))}


def _cells(own: report.Totals) -> dict[str, str]:
    return {
        "operands": report.shares(own.flops),
        "FLOPs": report.quantity(own.total_flops, "FLOP"),
        "casts write": report.quantity(own.cast_bytes, "B"),
        "saved for backward": report.amounts(own.saved),
    }
