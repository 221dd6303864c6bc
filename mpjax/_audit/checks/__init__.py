"""What an audit looks for: each file is a check, a function that adds what it finds to the `Findings`.

A new check is a file here, a line below, and its kinds in `findings.KINDS`.
"""

from collections.abc import Callable

from mpjax._audit.checks import casts, lowering, matmuls, numbers, state, sums
from mpjax._audit.findings import Findings

CHECKS: tuple[Callable[[Findings], None], ...] = (
    matmuls.check,
    sums.check,
    numbers.check,
    casts.check,
    state.check,
    lowering.check,
)
