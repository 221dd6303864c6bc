"""`explain`: which policy governs which module of a model, and why."""

import dataclasses
from typing import Any

import numpy as np

from mpjax import _tables
from mpjax._frameworks.protocol import FRAMEWORKS, ModuleParameters, framework_of
from mpjax._precision import dtypes
from mpjax._precision.policy_map import PolicyMap, PolicyMapLike, as_policy_map

_HEADER = ("module", "class", "decided by", "policy", "parameters", "stored in")
# Whose end says more than their beginning, where a terminal is narrow.
_LONG = {"module", "class", "decided by"}


@dataclasses.dataclass(frozen=True)
class ModulePolicy:
    """What governs one module.

    Attributes:
      path: the `/`-joined path; empty for the model itself.
      cls: the name of its class.
      pattern: the pattern that decided, `"*"` for the map's default.
      policy: the policy that governs it.
      parameters: how many numbers its own parameters hold, those of its submodules not counted.
      dtypes: the dtypes that they are stored in.
    """

    path: str
    cls: str
    pattern: str
    policy: str
    parameters: int
    dtypes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Explanation:
    """A table of a model's modules under a policy map; it prints in a terminal and in a notebook."""

    rows: tuple[ModulePolicy, ...]

    @property
    def parameters(self) -> int:
        """How many numbers the parameters of the whole model hold."""
        return sum(row.parameters for row in self.rows)

    def __getitem__(self, path: str) -> ModulePolicy:
        for row in self.rows:
            if row.path == path:
                return row
        close = dtypes.closest(path, [row.path for row in self.rows], 3)
        raise KeyError(f"No module '{path}'; the closest are {close}.")

    def _cells(self) -> list[tuple[str, ...]]:
        cells = [
            (
                row.path or "(model)",
                row.cls,
                row.pattern,
                row.policy,
                f"{row.parameters:,}" if row.parameters else "",
                ", ".join(row.dtypes),
            )
            for row in self.rows
        ]
        stored = sorted({d for row in self.rows for d in row.dtypes})
        return [*cells, ("total", "", "", "", f"{self.parameters:,}", ", ".join(stored))]

    def __str__(self) -> str:
        *body, total = self._cells()
        return "\n".join(
            _tables.table(_HEADER, body, [total], right={"parameters"}, breaks={}, shorten=_LONG)
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return _tables.html(_HEADER, self._cells())


def explain(
    model: Any,
    policies: PolicyMapLike,
    *example_inputs: Any,
    **kwargs: Any,
) -> Explanation:
    """Returns a table of which policy governs which module of a model, and which pattern decided.

    >>> model = nn.Dense(4)
    >>> explain(model, "p=f32,c=bf16,o=f32", jnp.ones((1, 3)))[""].policy
    'p=full,c=bf16,o=full'

    Nothing is computed: a linen or Haiku model is traced with the shapes of the inputs.

    Args:
      model: a flax.linen, flax.nnx or Equinox module, or what `hk.transform` returns.
      policies: a policy string, a policy, a dict from pattern to policy, or a `PolicyMap`.
      *example_inputs: what the model is called with, arrays or `jax.ShapeDtypeStruct`s; nnx and Equinox models
        need none.
      **kwargs: further arguments of the call, such as `train=False`.

    Raises:
      ValueError: if a pattern governs no module.
      TypeError: if `model` belongs to no framework that mpjax knows.
    """
    policies = as_policy_map(policies)
    framework = framework_of(model)
    if framework is None:
        raise TypeError(
            f"explain expects a model of {', '.join(FRAMEWORKS)}, got {type(model).__name__}. A plain function has no "
            "modules; the map's default governs it."
        )
    modules = framework.modules(model, policies, example_inputs, kwargs)
    return Explanation(tuple(_row(module, policies) for module in modules))


def _row(module: ModuleParameters, policies: PolicyMap) -> ModulePolicy:
    return ModulePolicy(
        path=module.path,
        cls=module.cls.__name__,
        pattern=policies.pattern(module.entry),
        policy=str(policies.policy(module.entry)),
        parameters=int(sum(np.prod(x.shape, dtype=np.int64) for x in module.parameters)),
        dtypes=tuple(sorted({x.dtype.name for x in module.parameters})),
    )
