"""What a checkpoint says of itself: its leaves, its policy and its loss scales, and how another state differs.

A manifest is plain JSON and needs no array to be read, so that what does not fit is reported before anything is
restored.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mpjax._precision import dtypes
from mpjax._precision.policy_map import as_policy_map
from mpjax._training.loss_scale import DynamicLossScale, LossScale, NoOpLossScale, StaticLossScale
from mpjax._training.types import KeyPath, Leaf, Policies, PyTree

if TYPE_CHECKING:
    from etils import epath

FORMAT = 1
EXTRA = "extra:"
_SCALES = (NoOpLossScale, StaticLossScale, DynamicLossScale)
_SHOWN = 5
Manifest = dict[str, Any]


class CheckpointError(ValueError):
    """A checkpoint cannot be used as it was asked for; the message names the way out."""


class DamageError(CheckpointError):
    """A checkpoint cannot be read, unlike one that does not fit."""


def read(path: "epath.Path", where: str) -> Manifest:
    """Reads a manifest.

    Args:
      path: of the file.
      where: names the checkpoint in messages.

    Raises:
      CheckpointError: if it comes from a newer mpjax.
      DamageError: if it is missing or no manifest.
    """
    try:
        found = json.loads(path.read_text())
        version = found["format"]
        if version <= FORMAT:
            return {key: found[key] for key in ("policy", "loss_scales", "metrics", "notes", "leaves")}
    except Exception as e:
        raise DamageError(f"{where} is damaged: {first_line(e)}.") from None
    raise CheckpointError(
        f"{where} was written by a newer mpjax, in format {version}; this one reads up to {FORMAT}. Install the "
        "version that wrote it."
    )


def first_line(error: Exception) -> str:
    """The first line of what an error says, without a full stop."""
    text = str(error).strip().splitlines()
    return (text[0] if text else type(error).__name__).rstrip(".")


def named_leaves(state: PyTree, extra: PyTree) -> dict[str, Leaf]:
    """Every leaf of a state, and of what is saved next to it, by its path.

    Args:
      state: a pytree.
      extra: another, whose paths begin with `extra:`.

    Raises:
      ValueError: if two leaves spell the same path.
    """
    named: dict[str, Leaf] = {}
    for prefix, tree in (("", state), (EXTRA, extra)):
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            name = prefix + jax.tree_util.keystr(path, simple=True, separator="/")
            if name in named:
                raise ValueError(f"Two leaves have the path '{name}'; rename one to save both.")
            named[name] = leaf
    return named


def is_value(leaf: Leaf) -> bool:
    """Whether a leaf is a plain number or text, which is stored in the manifest itself."""
    return isinstance(leaf, (bool, int, float, str)) and not isinstance(leaf, np.generic)


def is_key(leaf: Leaf) -> bool:
    """Whether a leaf holds typed PRNG keys."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def describe(
    state: PyTree,
    extra: PyTree,
    policy: Policies | None,
    metrics: Mapping[str, Any] | None,
    notes: Mapping[str, Any] | None,
) -> Manifest:
    """The manifest of a state.

    Args:
      state: a pytree of arrays.
      extra: another, saved next to it.
      policy: the policy it is trained under, or None.
      metrics: from name to number.
      notes: what else to store, in a form that JSON can hold.
    """
    named = named_leaves(state, extra)
    sums = _byte_sums({name: x for name, x in named.items() if not is_value(x)})
    leaves = {
        name: {"value": x} if is_value(x) else _shape(x) | {"sum": sums[name]} for name, x in named.items()
    }
    return {
        "format": FORMAT,
        "policy": None if policy is None else as_policy_map(policy).to_dict(),
        "loss_scales": {name: _settings(scale) for name, scale in loss_scales(state).items()},
        "metrics": {k: float(v) for k, v in (metrics or {}).items()},
        "notes": notes or {},
        "leaves": leaves,
    }


def check(
    manifest: Manifest, state: PyTree, extra: PyTree, policy: Policies | None, where: str, *, cast: bool
) -> None:
    """Raises if a state is not what a manifest describes.

    Args:
      manifest: of `describe`.
      state: a pytree of arrays or `jax.ShapeDtypeStruct`s.
      extra: likewise.
      policy: the policy that the state is going to be trained under.
      where: names the checkpoint in messages.
      cast: let another policy, other floating dtypes and another kind of loss scale pass.

    Raises:
      CheckpointError: listing what differs.
    """
    named = named_leaves(state, extra)
    saved = {k: v for k, v in manifest["leaves"].items() if extra is not None or not k.startswith(EXTRA)}
    own = own_scales(manifest, state)  # which are reported below
    _check_leaves(
        {k: v for k, v in saved.items() if _owner(k, manifest["loss_scales"]) not in own},
        {k: v for k, v in named.items() if _owner(k, loss_scales(state)) not in own},
        where,
    )
    narrowed = [
        f"'{name}' is {saved[name]['dtype']} there and {_shape(leaf)['dtype']} here"
        for name, leaf in named.items()
        if name in saved and "dtype" in saved[name] and saved[name]["dtype"] != _shape(leaf)["dtype"]
    ]
    if cast:
        return
    now = None if policy is None else as_policy_map(policy)
    then = None if manifest["policy"] is None else as_policy_map(manifest["policy"])
    if then != now:
        changes = f" ({_listed(narrowed)})" if narrowed else ""
        raise CheckpointError(
            f"{where} was trained under the policy '{then}', this state has '{now}'{changes}. Train under the "
            "first, or go on under the second with cast=True."
        )
    if narrowed:
        raise CheckpointError(
            f"{where} holds other dtypes than this state: {_listed(narrowed)}. Make the state as it was when "
            "it was saved, or let it be cast with cast=True."
        )
    for name, scale in loss_scales(state).items():
        kind = manifest["loss_scales"].get(name, {}).get("kind")
        if kind != type(scale).__name__:
            raise CheckpointError(
                f"{where} has a {kind} at '{name}', this state a {type(scale).__name__}. Create the state with "
                "the kind of loss scale it was saved with, or go on with its own with cast=True."
            )


def own_scales(manifest: Manifest, state: PyTree) -> set[str]:
    """Paths of the loss scales whose kind is not the saved one, so that their own numbers stay."""
    saved, now = manifest["loss_scales"], loss_scales(state)
    return {
        name
        for name in saved.keys() | now.keys()
        if saved.get(name, {}).get("kind") != (type(now[name]).__name__ if name in now else None)
    }


def belongs(name: str, owners: set[str]) -> bool:
    """Whether a leaf is part of one of the loss scales `owners`."""
    return _owner(name, owners) is not None


def with_saved_settings(state: PyTree, manifest: Manifest) -> PyTree:
    """A restored state whose loss scales have the limits, period and factor that they were saved with."""

    def with_settings(path: KeyPath, x: Leaf) -> Leaf:
        saved = manifest["loss_scales"].get(jax.tree_util.keystr(path, simple=True, separator="/"))
        if not isinstance(x, _SCALES) or saved is None or saved["kind"] != type(x).__name__:
            return x
        return dataclasses.replace(x, **{k: v for k, v in saved.items() if k != "kind"})

    return jax.tree_util.tree_map_with_path(with_settings, state, is_leaf=lambda x: isinstance(x, _SCALES))


def damaged_leaves(manifest: Manifest, restored: dict[str, Leaf]) -> list[str]:
    """Paths of the restored leaves whose bytes are not those that were saved."""
    sums = _byte_sums(restored)
    return [name for name, total in sums.items() if total != manifest["leaves"][name]["sum"]]


def template(x: Leaf, dtype: str) -> jax.ShapeDtypeStruct | np.ndarray:
    """What orbax is to read for a leaf, in the dtype it was saved in."""
    shape = x.shape
    if is_key(x):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, x.dtype))
        shape, dtype = data.shape, data.dtype
    if _is_bound(x):
        sharding = (jax.random.key_data(x) if is_key(x) and isinstance(x, jax.Array) else x).sharding
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)
    return np.empty(shape, dtype)


def _key_impl(x: Leaf) -> Any:
    """How typed keys, concrete or abstract, are computed with."""
    found = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), jax.ShapeDtypeStruct(x.shape, x.dtype))
    return found[0]


def _is_bound(x: Leaf) -> bool:
    """Whether a leaf is bound to certain devices.

    A new array is not, until it is put on one: it is used together with arrays on any device. JAX compiles a step for
    the one kind or the other, and would compile it again for a restored state of another kind.
    """
    return x.committed if isinstance(x, jax.Array) else getattr(x, "sharding", None) is not None


def as_wanted(restored: Leaf, x: Leaf) -> Leaf:
    """A leaf that was read, of the dtype and kind of the leaf it is for."""
    if isinstance(restored, np.ndarray) and not isinstance(x, (np.ndarray, np.generic)):
        restored = jnp.array(restored)
    if is_key(x):
        return jax.random.wrap_key_data(restored, impl=_key_impl(x))
    return restored if restored.dtype == x.dtype else restored.astype(x.dtype)


def _check_leaves(saved: dict[str, Any], named: dict[str, Leaf], where: str) -> None:
    """Raises if paths or shapes differ, or dtypes that no cast bridges."""
    differing = [f"'{name}' is only in the checkpoint" for name in saved if name not in named]
    differing += [f"'{name}' is not in the checkpoint" for name in named if name not in saved]
    for name in (n for n in named if n in saved):
        then: dict[str, Any] = saved[name]
        now: dict[str, Any] = {"value": 0} if is_value(named[name]) else _shape(named[name])
        if then.keys() - {"sum"} != now.keys():
            differing.append(f"'{name}' is a {_kind(then)} there and a {_kind(now)} here")
        elif "shape" in now and then["shape"] != now["shape"]:
            differing.append(f"'{name}' has shape {then['shape']} there and {now['shape']} here")
        elif then.get("dtype") != now.get("dtype") and not (
            _is_floating(then["dtype"]) and _is_floating(now["dtype"])
        ):
            differing.append(f"'{name}' is {then['dtype']} there and {now['dtype']} here")
    if differing:
        raise CheckpointError(
            f"{where} is of another model or optimizer: {_listed(differing)}. Make the state as it was when it "
            "was saved, or choose another directory."
        )


def _listed(items: list[str]) -> str:
    more = f"; and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return "; ".join(items[:_SHOWN]) + more


def _kind(leaf: dict[str, Any]) -> str:
    return "plain value" if "value" in leaf else "array"


def _shape(x: Leaf) -> dict[str, Any]:
    x = x if hasattr(x, "dtype") else np.asarray(x)
    return {"shape": list(x.shape), "dtype": str(x.dtype)}


def _is_floating(dtype: str) -> bool:
    return not dtype.startswith("key<") and dtypes.is_floating(jnp.dtype(dtype))


def loss_scales(tree: PyTree) -> dict[str, LossScale]:
    """The loss scales in a tree, by their paths."""
    flat = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: isinstance(x, _SCALES))[0]
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): x
        for path, x in flat
        if isinstance(x, _SCALES)
    }


def _settings(scale: LossScale) -> dict[str, Any]:
    """The kind of a loss scale and its numbers that are no leaves."""
    static = {
        f.name: getattr(scale, f.name)
        for f in dataclasses.fields(scale)  # type: ignore[arg-type]
        if not (isinstance(scale, DynamicLossScale) and f.name in ("loss_scale", "counter"))
    }
    return {"kind": type(scale).__name__} | {
        k: v if isinstance(v, (int, float)) else float(v) for k, v in static.items()
    }


def _owner(name: str, scales: Iterable[str]) -> str | None:
    return next((s for s in scales if name == s or name.startswith(f"{s}/")), None)


def _byte_sums(named: dict[str, Leaf]) -> dict[str, int]:
    """The sum of all bytes of each leaf modulo 2**32: the same however they are sharded."""
    plain = {name: jax.random.key_data(x) if is_key(x) else x for name, x in named.items()}
    far = {name: x for name, x in plain.items() if not _is_on_host(x)}
    # In one program, as each is a reduction over all devices.
    sums = jax.device_get(_sums_on_device(far)) if far else {}
    return {name: int(sums[name]) if name in sums else _sum_on_host(x) for name, x in plain.items()}


def _is_on_host(x: Leaf) -> bool:
    """Whether the bytes can be looked at without a copy and without compiling anything."""
    return not isinstance(x, jax.Array) or (
        x.is_fully_addressable and all(device.platform == "cpu" for device in x.devices())
    )


def _sum_on_host(x: Leaf) -> int:
    whole = np.atleast_1d(_in_whole_bytes(np.asarray(x)))
    return int(np.frombuffer(whole.tobytes(), np.uint8).sum(dtype=np.uint32))


@jax.jit
def _sums_on_device(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    def total(x: jax.Array) -> jax.Array:
        if x.dtype == jnp.bool_:
            x = x.astype(jnp.uint8)
        elif jnp.issubdtype(x.dtype, jnp.complexfloating):
            x = jnp.stack([x.real, x.imag])
        return jnp.sum(lax.bitcast_convert_type(_in_whole_bytes(x), jnp.uint8), dtype=jnp.uint32)

    return {name: total(x) for name, x in arrays.items()}


def _in_whole_bytes(x: Leaf) -> Leaf:
    """Formats of which some have less than a byte as float32, which holds all their values."""
    return x.astype(np.float32) if x.dtype.itemsize == 1 and x.dtype.isbuiltin != 1 else x
