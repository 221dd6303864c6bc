"""Regions: which policy is in force.

A region is a module and all below it that resolve to the same policy entry. The region in force is the
*ambient* one. It lives in a JAX user context, which is thread-local and part of every trace and jit cache
key, so a function that was traced in one region is traced again in another.
"""

import jax
import numpy as np

from mpjax._precision import dtypes
from mpjax._precision.policy import Policy
from mpjax._precision.policy_map import DEFAULT_ENTRY, PolicyMap


class Region:
    """The policy in force at a point of the program, and where that point is.

    Regions are immutable, hashable and compare by value: they are part of JAX's cache keys. The path is stored
    only under a map with patterns, as under a single policy all modules shall share their traces.

    Attributes:
      policies: the whole map, from which modules further in are resolved.
      entry: the map's entry that governs here.
      path: the `/`-joined path of the module that is running, None outside of modules.
      parent: the region that was entered before, under a map with patterns.
      in_module: whether a module is running, rather than the function around it.
      forced: whether modules further in stay in this very region, as in `full_precision`.
      transparent: whether operations run unchanged, as inside JAX's own rules for a decomposition.

    Raises:
      NotImplementedError: if the policy names a gemm recipe.
      ValueError: if one of its dtypes has fewer than 16 bits.
    """

    __slots__ = (
        "_key",
        "compute_dtype",
        "entry",
        "forced",
        "hash",
        "in_module",
        "parent",
        "path",
        "policies",
        "policy",
        "transparent",
    )

    def __init__(
        self,
        policies: PolicyMap,
        entry: int = DEFAULT_ENTRY,
        *,
        path: str | None = None,
        parent: "Region | None" = None,
        in_module: bool = False,
        forced: bool = False,
        transparent: bool = False,
    ) -> None:
        patterned = bool(policies.entries)
        self.policies = policies
        self.entry = entry
        self.path = path if patterned else None
        self.parent = parent if patterned else None
        self.in_module = in_module
        self.forced = forced
        self.transparent = transparent
        self.policy: Policy = policies.policy(entry)
        self.compute_dtype: np.dtype = self.policy.compute_dtype
        check_runs(self.policy)
        self._key = (policies, entry, self.path, self.parent, in_module, forced, transparent)
        self.hash = hash(self._key)

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Region) and self.hash == other.hash and self._key == other._key

    def __repr__(self) -> str:
        where = f" at '{self.path}'" if self.path else ""
        return f"<mpjax region {self.policy}{where}>"

    def is_same_as(self, other: "Region") -> bool:
        """Whether both come from the same entry of the same map."""
        return self.entry == other.entry and self.policies == other.policies

    def of_module(self, path: str, cls: type) -> "Region":
        """The region of a module that is called in this one: its own match, else what its parent has."""
        entry = self.policies.match(path, cls)
        if entry is None:
            entry = self._inherited_entry(path)
        return Region(self.policies, entry, path=path, parent=self, in_module=True)

    def _inherited_entry(self, path: str) -> int:
        """The entry of the nearest ancestor of `path` among the modules that are running."""
        region: Region | None = self
        while region is not None and region.policies == self.policies:
            if region.in_module and region.path is not None and _is_ancestor(region.path, path):
                return region.entry
            region = region.parent
        return self.policies.resolve(path)


def check_runs(policy: Policy) -> None:
    """Raises if a policy can be named but not run.

    Raises:
      NotImplementedError: if it names a gemm recipe.
      ValueError: if one of its dtypes has fewer than 16 bits: casting to them without a scale overflows.
    """
    if policy.gemm is not None:
        raise NotImplementedError(
            f"Policy '{policy}' asks for gemm={policy.gemm}, which this version can name but not "
            f"yet run; leave it out: '{str(policy).partition(',gemm=')[0]}'."
        )
    for field in ("param_dtype", "compute_dtype", "output_dtype"):
        dtype: np.dtype = getattr(policy, field)
        if dtype.itemsize < 2:
            raise ValueError(
                f"Policy '{policy}' has {field} {dtype.name}, to which mpjax does not cast without a scale: it ends "
                f"at {dtypes.limits(dtype).max:g}, so that larger values become inf or NaN. Use bfloat16 or float16 "
                "there, as in 'p=f32,c=bf16,o=f32'."
            )


ambient = jax.make_user_context(None)
# Runs operations unchanged, and marks matmuls as decided so that they stay so when differentiated.
TRANSPARENT = Region(PolicyMap(default="float32"), transparent=True)
FULL_PRECISION = Region(PolicyMap(default="float32"), forced=True)


def current() -> Region | None:
    """The ambient region of this thread."""
    return ambient.value


def _is_ancestor(ancestor: str, path: str) -> bool:
    return ancestor == "" or path == ancestor or path.startswith(ancestor + "/")
