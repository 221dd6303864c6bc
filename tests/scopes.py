"""Which module a product of a traced program belongs to, read from JAX's name stacks."""

import re
from collections.abc import Callable
from typing import Any

from programs import PRODUCTS, trace


def product_dtypes_by_scope(fn: Callable[..., Any], *args: Any) -> dict[str, set[str]]:
    """From the path of each module that has products to the dtypes that their operands take."""
    found: dict[str, set[str]] = {}
    for eqn in trace(fn, *args):
        if eqn.primitive.name in PRODUCTS:
            operands = {v.aval.dtype.name for v in eqn.invars if v.aval.dtype.kind in "fV"}
            found.setdefault(_path(str(eqn.source_info.name_stack)), set()).update(operands)
    return found


def _path(name_stack: str) -> str:
    """The name stack without what transformations and einsum add to it."""
    added = re.compile(r"\w+\(.*|rematted_computation|checkpoint|.*->.*|while|body|closed_call|jit\w*")
    return "/".join(part for part in name_stack.split("/") if not added.fullmatch(part))
