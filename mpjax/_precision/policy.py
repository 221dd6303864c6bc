"""`Policy`: in which precision a module stores its parameters, computes and returns its results."""

import dataclasses
from typing import TypeVar

import jax
import jmp
import numpy as np
from jax.typing import DTypeLike

from mpjax._precision import casting, dtypes

T = TypeVar("T")

# Operand formats for matmuls that are narrower than the compute dtype.
GEMM_RECIPES = ("fp8", "mxfp8", "mxfp4", "nvfp4")
_KEYS = {
    "p": "param_dtype",
    "params": "param_dtype",
    "c": "compute_dtype",
    "compute": "compute_dtype",
    "o": "output_dtype",
    "output": "output_dtype",
    "gemm": "gemm",
}
# The names that Keras gives to the two usual policies.
_PRESETS = {
    "mixed_bfloat16": "p=f32,c=bf16,o=f32",
    "mixed_float16": "p=f32,c=f16,o=f32",
}


@dataclasses.dataclass(frozen=True)
class Policy(jmp.Policy):
    """A mixed precision policy; whatever takes a `jmp.Policy` takes it.

    Attributes:
      param_dtype: storage of the parameters.
      compute_dtype: of the operands of matmuls and convolutions, and of activations inside of a module.
      output_dtype: of what a module returns to code outside.
      gemm: an operand format for matmuls narrower than the compute dtype, or None.
    """

    param_dtype: np.dtype
    compute_dtype: np.dtype
    output_dtype: np.dtype
    gemm: str | None = None

    def __post_init__(self) -> None:
        for field in ("param_dtype", "compute_dtype", "output_dtype"):
            object.__setattr__(self, field, _floating(getattr(self, field), field))
        if self.gemm is not None and self.gemm not in GEMM_RECIPES:
            raise ValueError(
                f"Unknown gemm recipe '{self.gemm}'{dtypes.did_you_mean(self.gemm, list(GEMM_RECIPES))} "
                f"It must be one of {', '.join(GEMM_RECIPES)}, or left out."
            )

    def cast_to_param(self, x: T) -> T:
        """Casts the floating leaves of `x` to the param dtype."""
        return casting.cast_floating(x, self.param_dtype)

    def cast_to_compute(self, x: T) -> T:
        """Casts the floating leaves of `x` to the compute dtype."""
        return casting.cast_floating(x, self.compute_dtype)

    def cast_to_output(self, x: T) -> T:
        """Casts the floating leaves of `x` to the output dtype."""
        return casting.cast_floating(x, self.output_dtype)

    def with_output_dtype(self, output_dtype: DTypeLike) -> "Policy":
        """The same policy with another output dtype."""
        return dataclasses.replace(self, output_dtype=output_dtype)  # type: ignore[arg-type]

    def __str__(self) -> str:
        names = (
            f"p={dtypes.dtype_name(self.param_dtype)}",
            f"c={dtypes.dtype_name(self.compute_dtype)}",
            f"o={dtypes.dtype_name(self.output_dtype)}",
        )
        return ",".join(names + ((f"gemm={self.gemm}",) if self.gemm else ()))


def get_policy(policy_name: "str | jmp.Policy", *, half: DTypeLike | None = None) -> Policy:
    """Returns the policy that a string describes.

    The grammar is jmp's: `"p=f32,c=bf16,o=f32"`, with long keys `params`, `compute`, `output`. What is left
    out: params default to float32, compute to params, output to compute. A bare dtype (`"bf16"`) stands
    for all three. Beyond jmp: spaces and upper case, the float8 and float4 formats, `mixed_bfloat16`,
    `mixed_float16`, and `gemm=<recipe>`. `get_policy(str(p)) == p` for every policy.

    Args:
      policy_name: the string; a policy, ours or jmp's, is taken over.
      half: what the name `half` stands for. By default bfloat16 on TPU and float16 elsewhere, decided
        now and once: the policy prints as what it resolved to.

    Raises:
      ValueError: if the string has an unknown or repeated key, an unknown dtype or an empty part.
      TypeError: if `policy_name` is neither a string nor a policy.
    """
    if isinstance(policy_name, Policy):
        return policy_name
    if isinstance(policy_name, jmp.Policy):
        return Policy(policy_name.param_dtype, policy_name.compute_dtype, policy_name.output_dtype)
    if not isinstance(policy_name, str):
        raise TypeError(
            f"Expected a policy string such as 'p=f32,c=bf16,o=f32' or a Policy, got {policy_name!r} of type "
            f"{type(policy_name).__name__}."
        )
    text = policy_name.strip().lower()
    text = _PRESETS.get(text, text)
    if "=" not in text:
        try:
            dtype = dtypes.parse_dtype(text, half=half)
        except ValueError as e:
            raise ValueError(
                f"{e} In policy '{policy_name}'; a policy is a dtype, a string such as 'p=f32,c=bf16,o=f32', or "
                f"one of {', '.join(sorted(_PRESETS))}."
            ) from None
        return Policy(dtype, dtype, dtype)
    values = _parse_parts(text, policy_name)
    parsed = {
        field: dtypes.parse_dtype(value, half=half) for field, value in values.items() if field != "gemm"
    }
    param = parsed.get("param_dtype", dtypes.FLOAT32)
    compute = parsed.get("compute_dtype", param)
    return Policy(param, compute, parsed.get("output_dtype", compute), values.get("gemm"))


def default_policy() -> Policy:
    """The best mixed precision policy for the current backend.

    bfloat16 on TPU, on CPU and on GPUs that compute in it (NVIDIA from compute capability 8.0 on, and AMD);
    float16, which wants a dynamic loss scale, on older GPUs. Parameters and results are float32.
    """
    device = jax.local_devices()[0]
    capability = str(getattr(device, "compute_capability", ""))
    old_gpu = device.platform == "gpu" and capability[:1].isdigit() and float(capability) < 8
    return get_policy("mixed_float16" if old_gpu else "mixed_bfloat16")


def _floating(dtype: DTypeLike, field: str) -> np.dtype:
    try:
        if isinstance(dtype, str):
            return dtypes.parse_dtype(dtype)
        canonical = None if dtype is None else np.dtype(dtype)  # numpy takes None for float64
    except TypeError:
        canonical = None
    if canonical is None or not dtypes.is_floating(canonical):
        raise ValueError(f"{field} must be a floating dtype such as jnp.bfloat16 or 'bf16', got {dtype!r}.")
    return canonical


def _parse_parts(text: str, policy: str) -> dict[str, str]:
    values: dict[str, str] = {}
    given: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = (s.strip() for s in part.partition("="))
        if not equals or not value:
            raise ValueError(
                f"'{part.strip()}' in policy '{policy}' has no value; expected key=dtype, as in "
                "'p=f32,c=bf16,o=f32'."
            )
        if key not in _KEYS:
            raise ValueError(
                f"Unknown key '{key}' in '{policy}' should be 'params', 'compute' or 'output' (p, c, o), or "
                f"'gemm'{dtypes.did_you_mean(key, list(_KEYS))}"
            )
        field = _KEYS[key]
        if field in values:
            raise ValueError(
                f"'{key}={value}' in policy '{policy}' repeats '{given[field]}'; give each key once."
            )
        values[field] = value
        given[field] = f"{key}={value}"
    return values
