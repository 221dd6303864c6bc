"""Findings about lowering: matmuls for another platform that are not those of the traced program."""

from mpjax._audit.findings import Findings
from mpjax._audit.records import ERROR, NOTE


def check(found: Findings) -> None:
    """Compares what was lowered, if something was, with what was traced."""
    if (lowering := found.lowering) is None:
        return
    missing = any(after < before for before, after in lowering.differences.values())
    # JAX lowers some operations, such as decompositions and unrolled loops, to more matmuls than were traced;
    # and of code that depends on the platform it lowers what this one needs.
    chosen = any(op.name == "platform_index" for op in found.program.ops)
    # On CPUs mpjax itself widens 16-bit matmuls where the machine has none, see cpu_lowering.py.
    chosen |= lowering.platform == "cpu"
    for operands, (before, after) in lowering.differences.items():
        found.add(
            "lowering",
            ERROR if missing and not chosen else NOTE,
            None,
            f"For {lowering.platform} {after} matmuls take {operands}; the traced program has {before}.",
            operands,
        )
