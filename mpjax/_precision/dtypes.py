"""Names of floating formats, their dtypes and their limits.

The one place that knows which names a policy string may use and what a format can hold.
"""

import dataclasses
import difflib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.typing import DTypeLike

# The first name of each format is the one that `str(policy)` prints; jmp prints the same.
_NAMES: dict[str, tuple[str, ...]] = {
    "bfloat16": ("bf16", "bfloat16"),
    "float16": ("f16", "float16", "fp16"),
    "float32": ("full", "f32", "float32", "fp32"),
    "float64": ("f64", "float64", "fp64"),
}


def _narrow_names(name: str) -> tuple[str, ...]:
    """The names of an 8 or 4 bit format: `float8_e4m3fn` is also `f8_e4m3fn` and `fp8_e4m3fn`."""
    bits, layout = name.removeprefix("float").split("_", 1)
    return (f"f{bits}_{layout}", name, f"fp{bits}_{layout}")


_NAMES |= {
    name: _narrow_names(name)
    for name in sorted(dir(ml_dtypes))
    if name.startswith(("float8_", "float4_")) and hasattr(jnp, name)
}

_BY_NAME: dict[str, np.dtype] = {
    alias: np.dtype(getattr(jnp, name)) for name, aliases in _NAMES.items() for alias in aliases
}
_BY_DTYPE: dict[np.dtype, str] = {_BY_NAME[names[0]]: names[0] for names in _NAMES.values()}

FLOAT32 = np.dtype(np.float32)
# The formats that policies move values between. float64, complex numbers, integers, bools and keys are
# never touched, and a value below 16 bits carries a scale that only its owner knows.
CASTABLE = frozenset({np.dtype(jnp.float16), np.dtype(jnp.bfloat16), FLOAT32})
HALF = CASTABLE - {FLOAT32}


def half_dtype() -> type:
    """The 16-bit format of the current backend: `jnp.bfloat16` on TPU, `jnp.float16` elsewhere."""
    return jnp.bfloat16 if jax.local_devices()[0].platform == "tpu" else jnp.float16


def parse_dtype(name: str, *, half: DTypeLike | None = None) -> np.dtype:
    """Returns the dtype that a name of a policy string stands for.

    Args:
      name: such as `"bf16"`, `"float32"`, `"full"`, `"half"` or `"f8_e4m3fn"`; case and surrounding
        spaces do not matter.
      half: what `"half"` stands for; by default `half_dtype()`.

    Raises:
      ValueError: if no format has this name.
    """
    key = name.strip().lower()
    if key == "half":
        return np.dtype(half_dtype() if half is None else half)
    if key in _BY_NAME:
        return _BY_NAME[key]
    valid = ["half", *_BY_NAME]
    raise ValueError(
        f"Unknown dtype '{name}'{did_you_mean(key, valid)} A dtype must be half, full, float16, "
        f"bfloat16 or another of {', '.join(sorted(valid))}."
    )


def dtype_name(dtype: DTypeLike) -> str:
    """The short name that policy strings use, such as `"bf16"`; float32 is `"full"`, as in jmp."""
    dtype = np.dtype(dtype)
    return _BY_DTYPE.get(dtype, dtype.name)


def is_floating(dtype: DTypeLike) -> bool:
    """Whether `dtype` is a real floating format, those of 16, 8 and 4 bits included."""
    return jnp.issubdtype(dtype, jnp.floating)


def closest(name: str, valid: list[str], n: int = 1) -> list[str]:
    """The up to `n` valid names most like `name`, the closest first."""
    return difflib.get_close_matches(name, valid, n=n, cutoff=0.4)


def did_you_mean(name: str, valid: list[str]) -> str:
    """The part of an error message that names the closest valid name, or a full stop."""
    close = closest(name, valid)
    return f"; did you mean '{close[0]}'?" if close else "."


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a floating format can hold.

    Attributes:
      max: the largest finite number.
      smallest_normal: the smallest positive number with full precision.
      smallest_subnormal: the smallest positive number; anything below half of it becomes zero.
      epsilon: the distance from 1 to the next number.
      count: the largest n for which 0, 1, …, n are all representable: a sum of ones stops there.
    """

    max: float
    smallest_normal: float
    smallest_subnormal: float
    epsilon: float
    count: int


def limits(dtype: DTypeLike) -> Limits:
    """Returns the limits of a floating format.

    >>> limits("float16").max, limits("bfloat16").count
    (65504.0, 256)
    """
    info = jnp.finfo(parse_dtype(dtype) if isinstance(dtype, str) else dtype)
    return Limits(
        max=float(info.max),
        smallest_normal=float(info.smallest_normal),
        smallest_subnormal=float(info.smallest_subnormal),
        epsilon=float(info.eps),
        count=2 ** (info.nmant + 1),
    )
