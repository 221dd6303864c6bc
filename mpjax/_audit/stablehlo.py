"""The matmuls in the StableHLO that another platform's compiler is given."""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
from jax import export

from mpjax._audit.program import Program
from mpjax._audit.records import Lowering
from mpjax._precision import dtypes

# The names that a person types, and what jax.export calls them.
PLATFORMS = {"tpu": "tpu", "cuda": "cuda", "gpu": "cuda", "rocm": "rocm", "cpu": "cpu"}

_NAME = r"@(\"[^\"]*\"|[\w$.\-]+)\("
_FUNCTION = re.compile(r"^\s*func\.func .*?" + _NAME)
_CALL = re.compile(r"\bcall " + _NAME)
_TENSOR = r"tensor<((?:[^<>]|<[^<>]*>)*)>"
_MATMUL = re.compile(
    r"\b(?:stablehlo\.(?:dot_general|convolution)|chlo\.ragged_dot)\b.*:\s*"
    rf"\({_TENSOR}, {_TENSOR}[^)]*\)\s*->"
)
_ELEMENT = {
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
    "f8E4M3FN": "float8_e4m3fn",
    "f8E5M2": "float8_e5m2",
    "complex<f32>": "complex64",
    "complex<f64>": "complex128",
    "i1": "bool",
}


def check_platform(platform: str) -> str:
    """The name that jax.export has for a platform.

    Raises:
      ValueError: if there is none.
    """
    if platform not in PLATFORMS:
        raise ValueError(
            f"Unknown platform '{platform}'{dtypes.did_you_mean(str(platform), list(PLATFORMS))} It must be one of "
            f"{', '.join(PLATFORMS)}."
        )
    return PLATFORMS[platform]


def lower(fn: Callable[..., Any], args: tuple[Any, ...], program: Program, platform: str) -> Lowering:
    """Lowers `fn` for a platform, which need not be present.

    Args:
      fn: what was read as `program`.
      args: its arguments.
      program: the traced program.
      platform: one of `PLATFORMS`.
    """
    name = check_platform(platform)
    exported = export.export(jax.jit(fn), platforms=[name])(*args)
    traced = Counter(_sorted(*op.operand_dtypes) for op in program.matmuls())
    lowered = matmuls(exported.mlir_module())
    return Lowering(platform, dict(sorted(traced.items())), dict(sorted(lowered.items())))


def matmuls(module: str) -> Counter[str]:
    """How many matmuls of a StableHLO module take which operands, those of a function once for each call of it."""
    own: dict[str, Counter[str]] = {}
    calls: dict[str, Counter[str]] = {}
    function = ""
    for line in module.splitlines():
        if (start := _FUNCTION.match(line)) is not None:
            function = start.group(1)
            own[function], calls[function] = Counter(), Counter()
        for lhs, rhs in _MATMUL.findall(line):
            own[function][_sorted(_element(lhs), _element(rhs))] += 1
        calls.get(function, Counter()).update(_CALL.findall(line))

    totals: dict[str, Counter[str]] = {}

    def total(name: str) -> Counter[str]:
        if name not in totals:
            totals[name] = Counter(own.get(name, Counter()))
            for callee, times in calls.get(name, Counter()).items():
                for operands, n in total(callee).items():
                    totals[name][operands] += n * times
        return totals[name]

    return total("main")


def _element(tensor: str) -> str:
    element = re.sub(r"^(?:[\d?]+x)*", "", tensor.split(",")[0])
    return _ELEMENT.get(element, re.sub(r"^i(\d+)$", r"int\1", re.sub(r"^ui(\d+)$", r"uint\1", element)))


def _sorted(lhs: str, rhs: str) -> str:
    return " × ".join(sorted((lhs, rhs)))
