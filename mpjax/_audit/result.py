"""The result of an audit, and the types that it is made of: `mpjax.Audit`, `mpjax.Finding`."""

import dataclasses
import json
from typing import Any

from mpjax._audit import difference, report
from mpjax._audit.difference import Diff as Diff
from mpjax._audit.records import ERROR, SEVERITIES, Records
from mpjax._audit.records import Casts as Casts
from mpjax._audit.records import Finding as Finding
from mpjax._audit.records import Lowering as Lowering
from mpjax._audit.records import Matmuls as Matmuls
from mpjax._audit.records import Saved as Saved


@dataclasses.dataclass(frozen=True)
class Audit(Records):
    """What a function runs in; it prints as a table in a terminal and in a notebook.

    >>> found = mpjax.audit(lambda x, w: x @ w, jnp.ones((8, 16), jnp.bfloat16), jnp.ones((16, 4)))
    >>> found.total_flops, len(found.errors)
    (1024, 0)

    Attributes:
      name: of the function.
      matmuls: matmuls and convolutions by module, phase and operand dtypes.
      casts: casts by module, phase and dtypes.
      saved: bytes saved for the backward pass by module and dtype.
      operations: how many operations of any kind the program has, by module and phase.
      findings: what is wrong, the most severe first.
      lowering: the matmuls for another platform, if one was asked for.
    """

    def of(self, kind: str) -> tuple[Finding, ...]:
        """The findings of one kind."""
        return tuple(f for f in self.findings if f.kind == kind)

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings that are errors."""
        return self.at_least(ERROR)

    def at_least(self, severity: str) -> tuple[Finding, ...]:
        """The findings of this severity and more severe ones.

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
        fields |= {name: list(fields[name]) for name in ("matmuls", "casts", "saved", "findings")}
        return fields

    def to_json(self, indent: int | None = 2) -> str:
        """`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=indent)

    def diff(self, other: "Audit") -> Diff:
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
        return difference.diff(self, other)

    def __str__(self) -> str:
        return report.text(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return report.html(self)
