"""What a module framework tells mpjax, and which frameworks there are.

A framework is one file of this package. Its modules either ask for their policy when they are called (flax.linen and
Haiku, by an interceptor), or carry it (flax.nnx and Equinox, after `apply_policy`). A file is imported only when the
program itself has imported its framework.
"""

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

from mpjax._precision.policy_map import PolicyMap

# The one list of frameworks: the package that a program imports, and the file here that knows it.
_FILES = {"flax.linen": "linen", "flax.nnx": "nnx", "equinox": "equinox", "haiku": "haiku"}

FRAMEWORKS = tuple(_FILES)


class ModuleParameters(NamedTuple):
    """A module of a model under policies: what `explain` shows of it.

    Attributes:
      path: its `/`-joined path; empty for the model itself.
      cls: its class.
      entry: the entry of the policy map that governs it.
      parameters: its own parameters, abstract or concrete, without those of its submodules.
    """

    path: str
    cls: type
    entry: int
    parameters: list[Any]


class Framework:
    """What mpjax has to know of a framework whose models are made of modules; each overrides what it has.

    Attributes:
      name: as a person would write it, such as `"flax.linen"`.
      directory: where its source lies: frames of it in a traceback are not the user's.
      layers: which of its files hold layers, whose names in a traceback tell the class of a module.
      scopes: a regular expression of the names that its layers themselves put on JAX's name stack, which say no more
        than the path of a module does; empty if there are none.
      explained_without_inputs: whether its modules show without a call of the model.
    """

    name: ClassVar[str]
    directory: ClassVar[str]
    layers: ClassVar[tuple[str, ...]] = ()
    scopes: ClassVar[str] = ""
    explained_without_inputs: ClassVar[bool] = True

    def is_model(self, x: Any) -> bool:
        """Whether `x` is a module, or another object that stands for a model of this framework."""
        raise NotImplementedError

    def intercepted(self) -> contextlib.AbstractContextManager[None]:
        """Open around each function that runs under policies, and around each trace of an audit.

        In it every call of a module goes through `module_scope.call_module`, and is marked with
        `module_scope.marked`. A framework whose modules carry their policy does that in the modules themselves.
        """
        return contextlib.nullcontext()

    def check_arguments(self, policies: PolicyMap, args: Sequence[Any]) -> None:
        """Raises if a model among the arguments of a function cannot follow `policies`.

        Raises:
          ValueError: naming the model and the way out.
        """

    def apply_policy(self, model: Any, policies: PolicyMap) -> Any:
        """A copy of a model that carries its policies.

        Raises:
          TypeError: if models of this framework follow the policy of the function that calls them.
        """
        raise TypeError(
            f"{type(model).__name__} is a model of {self.name}, whose modules follow the policy of the function that "
            "calls them and carry none: use mpjax.autocast(fn, policies), mpjax.value_and_grad(loss_fn, policies) or a "
            "TrainState with policy=…."
        )

    def modules(
        self, model: Any, policies: PolicyMap, inputs: Sequence[Any], kwargs: dict[str, Any]
    ) -> Iterator[ModuleParameters]:
        """The modules of a model under policies, for `explain`; nothing is computed.

        Args:
          model: of this framework.
          policies: the map to resolve them with.
          inputs: what the model is called with, arrays or `jax.ShapeDtypeStruct`s.
          kwargs: further arguments of the call.
        """
        raise NotImplementedError

    def split(self, models: list[Any]) -> "tuple[list[Any], Callable[[list[Any]], list[Any]]] | None":
        """The arrays of models, and the function that makes the models from them; None if they are pytrees of arrays.

        Args:
          models: several, as they may share modules.

        Returns:
          A pytree of arrays for each model, and a function from a list of such to models.
        """
        return None


def imported() -> tuple[Framework, ...]:
    """The frameworks that this program has imported."""
    return tuple(_load(file) for package, file in _FILES.items() if package in sys.modules)


def framework_of(model: Any) -> Framework | None:
    """The framework that a model belongs to, or None."""
    return next((framework for framework in imported() if framework.is_model(model)), None)


@contextlib.contextmanager
def intercepted() -> Iterator[None]:
    """Calls of modules of every imported framework are seen while it is open."""
    with contextlib.ExitStack() as stack:
        for framework in imported():
            stack.enter_context(framework.intercepted())
        yield


@functools.cache
def _load(file: str) -> Framework:
    return importlib.import_module(f"mpjax._frameworks.{file}").FRAMEWORK
