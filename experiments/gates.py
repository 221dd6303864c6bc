"""Targets that a mixed policy has to meet, relative to float32."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from experiments.errors import UsageError

FAILED_STATUS = 1
_EXAMPLE = "write it as in --gate loss=1% rate=10% bytes=5%"


@dataclasses.dataclass(frozen=True)
class Gate:
    """How much worse than float32 a mixed policy may be.

    Attributes:
      measure: `loss`, `rate` or `bytes`.
      allowed: as a share; negative where an improvement is asked for.
    """

    measure: str
    allowed: float

    def failure(self, name: str, result: dict[str, Any], float32: dict[str, Any]) -> str | None:
        """Says how a policy misses the target, or None if it does not.

        Args:
          name: what to call the policy.
          result: its results, as `comparison` collects them.
          float32: those of float32.
        """
        value, reference = _value(self.measure, result), _value(self.measure, float32)
        change = (value - reference) / reference
        worse = -change if self.measure == "rate" else change
        # Written so that a NaN fails.
        if worse <= self.allowed:
            return None
        return (
            f"{name}: {self.measure} {value:.4g} is {change:+.2%} against float32 ({reference:.4g}); "
            f"the gate asks for {self.target()}"
        )

    def target(self) -> str:
        """The change from float32 that is just allowed, in words."""
        bound = -self.allowed if self.measure == "rate" else self.allowed
        return f"{bound:+.2%} or {'more' if self.measure == 'rate' else 'less'}"


MEASURES = ("loss", "rate", "bytes")


def parse_gates(texts: Sequence[str]) -> list[Gate]:
    """The gates that `--gate` asks for.

    Args:
      texts: such as `loss=1%`; several may also be joined by commas.

    Raises:
      UsageError: if one is not of that form.
    """
    return [_parse(part) for text in texts for part in text.split(",")]


def _parse(text: str) -> Gate:
    measure, equals, percent = text.partition("=")
    if measure not in MEASURES:
        raise UsageError(
            f"--gate '{text}': unknown measure '{measure}', expected one of {', '.join(MEASURES)}; {_EXAMPLE}"
        )
    try:
        if not equals or not percent.endswith("%"):
            raise ValueError
        allowed = float(percent.removesuffix("%")) / 100
        if allowed != allowed:
            raise ValueError
    except ValueError:
        raise UsageError(
            f"--gate '{text}': expected a percentage such as {measure}=1%, got '{percent}'; {_EXAMPLE}"
        ) from None
    return Gate(measure, allowed)


def _value(measure: str, result: dict[str, Any]) -> float:
    if measure == "loss":
        return result["val_loss"]["mean"]
    if measure == "rate":
        return result["rate"]["mean"]
    return result["param_bytes"] + result["optimizer_bytes"] + result["activation_bytes"]
