"""`explain`: which policy governs which module of a model, and why."""

import dataclasses
import html
import shutil
from collections.abc import Mapping
from typing import Any

import flax.linen
import jax
import jmp
import numpy as np
from flax import nnx

from mpjax._frameworks.autocast import under
from mpjax._frameworks.nnx import apply_policy, governed_modules
from mpjax._precision import dtypes
from mpjax._precision.policy_map import PolicyMap, as_policy_map

_HEADER = ("module", "class", "decided by", "policy", "parameters", "stored in")


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
        lines = [_HEADER, *self._cells()]
        widths = _fitted([max(len(line[i]) for line in lines) for i in range(len(_HEADER))])
        text = [_line(line, widths) for line in lines]
        rule = "─" * max(map(len, text))
        return "\n".join([text[0], rule, *text[1:-1], rule, text[-1]])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        def row(cells: tuple[str, ...], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

        body = "".join(row(cells, "td") for cells in self._cells())
        return f"<table><thead>{row(_HEADER, 'th')}</thead><tbody>{body}</tbody></table>"


def explain(
    model: "flax.linen.Module | nnx.Module",
    policies: "str | dict | jmp.Policy | PolicyMap",
    *example_inputs: Any,
    **kwargs: Any,
) -> Explanation:
    """Returns a table of which policy governs which module of a model, and which pattern decided.

    Nothing is computed: a linen model is traced with the shapes of the inputs.

    Args:
      model: a flax.linen or flax.nnx module.
      policies: a policy string, a policy, a dict from pattern to policy, or a `PolicyMap`.
      *example_inputs: what the model is called with, arrays or `jax.ShapeDtypeStruct`; an nnx model
        needs none.
      **kwargs: further arguments of the call, such as `train=False`.

    Raises:
      ValueError: if a pattern governs no module.
      TypeError: if `model` is no Flax module.
    """
    policies = as_policy_map(policies)
    if isinstance(model, nnx.Module):
        return Explanation(tuple(_nnx_rows(model, policies)))
    if isinstance(model, flax.linen.Module):
        return Explanation(tuple(_linen_rows(model, policies, example_inputs, kwargs)))
    raise TypeError(
        f"explain expects a flax.linen or flax.nnx module, got {type(model).__name__}. A plain function has no "
        "modules; the map's default governs it."
    )


def _linen_rows(
    model: flax.linen.Module, policies: PolicyMap, inputs: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[ModulePolicy]:
    rngs = {name: jax.random.key(0) for name in ("params", "dropout")}
    seen: list[Any] = []

    def init(*inputs: Any) -> Any:
        variables, watch = under(model.init, policies).watched(rngs, *inputs, **kwargs)
        seen.append(watch)
        return variables

    variables = jax.eval_shape(init, *inputs)
    params = flax.linen.meta.unbox(variables.get("params", {}))
    rows = []
    for path, (cls, entry) in seen[0].modules.items():
        own = params
        for name in path.split("/") if path else ():
            own = own.get(name, {})
        leaves = [x for v in own.values() if not isinstance(v, Mapping) for x in jax.tree.leaves(v)]
        rows.append(_row(path, cls, policies, entry, leaves))
    return rows


def _nnx_rows(model: nnx.Module, policies: PolicyMap) -> list[ModulePolicy]:
    graphdef, state = nnx.split(model)
    shapes: dict[str, Any] = {}

    def build(state: Any) -> None:
        shapes.update(governed_modules(apply_policy(nnx.merge(graphdef, state), policies)))

    jax.eval_shape(build, state)
    return [
        _row(path, cls, policies, entry, [p.get_value() for p in params])
        for path, (cls, entry, params) in sorted(shapes.items())
    ]


def _row(path: str, cls: type, policies: PolicyMap, entry: int, leaves: list[Any]) -> ModulePolicy:
    return ModulePolicy(
        path=path,
        cls=cls.__name__,
        pattern=policies.pattern(entry),
        policy=str(policies.policy(entry)),
        parameters=int(sum(np.prod(x.shape, dtype=np.int64) for x in leaves)),
        dtypes=tuple(sorted({x.dtype.name for x in leaves})),
    )


def _fitted(widths: list[int]) -> list[int]:
    """Narrows the columns with long texts until the line fits the terminal."""
    room = shutil.get_terminal_size((100, 24)).columns - 2 * (len(widths) - 1)
    widths = list(widths)
    while sum(widths) > room:
        widest = max((0, 1, 2), key=lambda i: widths[i])
        if widths[widest] <= 8:
            break
        widths[widest] -= 1
    return widths


def _line(cells: tuple[str, ...], widths: list[int]) -> str:
    def fit(text: str, width: int) -> str:
        # The end of a path tells more than its beginning.
        return text if len(text) <= width else "…" + text[1 - width :]

    padded = [
        fit(text, width).rjust(width) if name == "parameters" else fit(text, width).ljust(width)
        for name, text, width in zip(_HEADER, cells, widths, strict=True)
    ]
    return "  ".join(padded).rstrip()
