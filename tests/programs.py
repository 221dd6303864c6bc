"""Reading traced and lowered programs, for tests that assert what runs in which precision."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import jax

PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation of a jaxpr, inner ones included."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                    yield from equations(inner)


def trace(fn: Callable[..., Any], *args: Any) -> list[Any]:
    return list(equations(jax.make_jaxpr(fn)(*args)))


def operand_dtypes(fn: Callable[..., Any], *args: Any, names: tuple[str, ...] = PRODUCTS) -> list[tuple]:
    """The dtypes of the floating operands of every product, in the order of the program."""
    return [
        tuple(v.aval.dtype.name for v in eqn.invars if v.aval.dtype.kind in "fV")
        for eqn in trace(fn, *args)
        if eqn.primitive.name in names
    ]


def input_dtypes(fn: Callable[..., Any], *args: Any, name: str) -> set[str]:
    """The dtypes of the floating inputs of every operation called `name`."""
    return {d for pair in operand_dtypes(fn, *args, names=(name,)) for d in pair}


def exported_products(fn: Callable[..., Any], *args: Any, platform: str) -> list[tuple[str, str]]:
    """Operand element types of the products in the StableHLO for a platform, lowered from here."""
    text = jax.export.export(jax.jit(fn), platforms=[platform])(*args).mlir_module()
    found = re.findall(
        r"stablehlo\.(?:dot_general|convolution)\b.*?:\s*\(tensor<([^>]*)>, tensor<([^>]*)>\)", text
    )
    return [(a.split("x")[-1], b.split("x")[-1]) for a, b in found]
