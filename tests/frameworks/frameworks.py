"""The same models in every framework, behind one interface.

`in_linen`, `in_nnx`, `in_equinox` and `in_haiku` define models of the same names (`Blocks`, `Recurrent`, `Tied`, …) as
their users would write them, without a dtype. `build(framework, "Blocks", X, how="scan")` makes one of them.
"""

import abc
import importlib
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax

BF16 = "p=f32,c=bf16,o=f32"
F16 = "p=f32,c=f16,o=f32"
NO_SCALE = mpjax.NoOpLossScale()
NAMES = ("linen", "nnx", "equinox", "haiku")
EVERY_FRAMEWORK = pytest.mark.parametrize("framework", NAMES)
HALF = pytest.mark.parametrize(
    ("policy", "half"), [(BF16, "bfloat16"), (F16, "float16")], ids=["bf16", "f16"]
)


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


X = normal(2, 4, 8)


class Model(abc.ABC):
    """A model of one framework as pure functions `(params, state, *inputs) -> (output, new state)`.

    Attributes:
      params: float32 parameters, a pytree of arrays.
      state: what the model itself changes, a pytree of arrays.
      inputs: what it was initialised with.
    """

    # Where the paths of modules differ from those that the tests spell: before all of them, of stacked blocks, and of
    # blocks in a Python list.
    top: ClassVar[str] = ""
    stacked: ClassVar[str] = "blocks"
    block: ClassVar[str] = "blocks/{}"

    params: Any
    state: Any
    inputs: tuple[Any, ...]

    @abc.abstractmethod
    def call(self, policies: Any, method: str = "__call__") -> Callable[..., Any]:
        """The function whose modules follow policies; to be called under them where modules carry none."""

    def under(self, policies: Any, method: str = "__call__") -> Callable[..., Any]:
        """The function that runs under policies."""
        return mpjax.autocast(self.call(policies, method), policies, cast_output=False)

    @abc.abstractmethod
    def params_under(self, policies: Any) -> Any:
        """Parameters as the model stores them under policies, and as a user gives them to an optimizer."""

    @abc.abstractmethod
    def explain(self, policies: Any) -> mpjax.Explanation:
        """What `mpjax.explain` says of it."""

    def path(self, name: str) -> str:
        """The framework's path of a module: `block_1/attn` is `blocks/1/attn` where blocks are in a list."""
        head, _, rest = name.partition("/")
        if head.startswith("block_"):
            head = self.block.format(head.removeprefix("block_"))
        return "/".join(part for part in (self.top, head, rest) if part)

    def output(self, policies: Any, *inputs: Any, method: str = "__call__") -> Any:
        """What the model returns, jitted."""
        run = jax.jit(self.under(policies, method))
        return run(self.params, self.state, *(inputs or self.inputs))[0]

    def output_shape(self, policies: Any, *inputs: Any, method: str = "__call__") -> Any:
        """Shapes and dtypes of what the model returns."""
        run = self.under(policies, method)
        return jax.eval_shape(run, self.params, self.state, *(inputs or self.inputs))[0]

    def grads(self, policies: Any, *, inside: bool = True) -> Callable[..., Any]:
        """`(params, state, *inputs) -> gradients` of the summed sines of the output.

        Args:
          policies: what the model runs under.
          inside: whether the backward pass is traced under the policies, or outside of them.
        """
        run = (self.call if inside else self.under)(policies)

        def loss(params: Any, state: Any, *inputs: Any) -> jax.Array:
            return sum(
                jnp.sum(jnp.sin(x.astype(jnp.float32)))
                for x in jax.tree.leaves(run(params, state, *inputs)[0])
            )

        if not inside:
            return jax.grad(loss)
        grad_fn = mpjax.value_and_grad(loss, policies)
        return lambda *args: grad_fn(NO_SCALE, *args)[1]

    def arguments(self) -> tuple[Any, ...]:
        """Parameters, state (a copy, as Equinox lets none be used twice) and inputs."""
        return (self.params, jax.tree.map(lambda x: x, self.state), *self.inputs)

    def matmuls(self, fn: Callable[..., Any]) -> dict[str, set[str]]:
        """From the paths of modules that have matmuls to the dtypes of their operands, as an audit tells them."""
        found: dict[str, set[str]] = {}
        for row in mpjax.audit(fn, *self.arguments()).matmuls:
            found.setdefault(row.module, set()).add(row.operands)
        return found


def build(framework: str, name: str, *inputs: Any, **options: Any) -> Model:
    """A model, with parameters and state initialised in float32 without any policy."""
    module = importlib.import_module(f"in_{framework}")
    return module.build(getattr(module, name), inputs, options)


def operands(fn: Callable[..., Any], *args: Any) -> set[str]:
    """The dtypes of the operands of all matmuls of a program."""
    from programs import operand_dtypes

    return {dtype for pair in operand_dtypes(fn, *args) for dtype in pair}


def dtypes_of(tree: Any) -> set[str]:
    return {x.dtype.name for x in jax.tree.leaves(tree)}


def assert_near(actual: Any, expected: Any, fraction: float = 0.03) -> None:
    """Equal up to a share of the largest entry of the whole tree."""
    actual, expected = jax.tree.leaves(actual), jax.tree.leaves(expected)
    largest = max(float(np.abs(np.asarray(x, np.float64)).max()) for x in expected)
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(
            np.asarray(a, np.float64), np.asarray(e, np.float64), rtol=0, atol=fraction * largest
        )
