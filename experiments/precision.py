"""Parses the policy map and the loss scale of the command line."""

import json
import math
from pathlib import Path
from typing import Any

import mpjax
from experiments.errors import UsageError

POLICY_HELP = (
    "--policy takes a string such as 'p=f32,c=bf16,o=f32', auto, or a JSON file with a map from "
    "module path patterns to policies"
)


def resolve_policy(text: str, option: str = "--policy") -> mpjax.PolicyMap:
    """The policies that `--policy` asks for.

    Args:
      text: a policy string, `auto`, or the path of a JSON file.
      option: where it was given.

    Raises:
      UsageError: if it is none of these.
    """
    if text == "auto":
        return mpjax.as_policy_map(mpjax.default_policy())
    path = Path(text)
    try:
        if path.suffix == ".json" or path.is_file():
            return mpjax.as_policy_map(_read_map(path))
        return mpjax.as_policy_map(text)
    except UsageError:
        raise
    except (ValueError, TypeError) as e:
        raise UsageError(f"{option} '{text}': {e} {POLICY_HELP}") from None


def policy_to_json(policies: mpjax.PolicyMap) -> str | dict[str, str]:
    """A policy map as config.json holds it: a string if one policy governs everything."""
    return policies.to_dict() if policies.entries else str(policies.default)


def resolve_loss_scale(text: str, policies: mpjax.PolicyMap) -> mpjax.LossScale:
    """The loss scale that `--loss-scale` asks for.

    Args:
      text: `auto`, `none`, `dynamic` or a positive number.
      policies: decide what `auto` means.

    Raises:
      UsageError: if it is none of these.
    """
    if text == "auto":
        return mpjax.loss_scale_for(policies)
    if text == "none":
        return mpjax.NoOpLossScale()
    if text == "dynamic":
        return mpjax.DynamicLossScale(2.0**15)
    try:
        factor = float(text)
    except ValueError:
        factor = math.nan
    if not 0 < factor < math.inf:
        raise UsageError(
            f"--loss-scale must be auto, none, dynamic or a positive number such as 1024, got '{text}'"
        )
    try:
        return mpjax.StaticLossScale(factor)
    except ValueError as e:  # beyond float32
        raise UsageError(f"--loss-scale {text}: {e}") from None


def loss_scale_to_json(loss_scale: mpjax.LossScale) -> str | float:
    """A loss scale as config.json holds it."""
    if isinstance(loss_scale, mpjax.DynamicLossScale):
        return "dynamic"
    if isinstance(loss_scale, mpjax.NoOpLossScale):
        return "none"
    return float(loss_scale.loss_scale)


def _read_map(path: Path) -> Any:
    try:
        content = json.loads(path.read_text())
    except OSError as e:
        raise UsageError(f"--policy '{path}' cannot be read ({e.strerror}); {POLICY_HELP}") from None
    except ValueError as e:
        raise UsageError(f"--policy '{path}' is not valid JSON ({e}); {POLICY_HELP}") from None
    if not isinstance(content, dict) or not all(isinstance(v, str) for v in content.values()):
        raise UsageError(
            f"--policy '{path}' must hold an object from pattern to policy string, such as "
            '{".*attn": "p=f32,c=f32,o=bf16", "*": "p=f32,c=bf16,o=f32"}'
        )
    return content
