"""Models that carry their policies: which policy governs a module is decided once and stored in its class.

flax.nnx and Equinox have no interceptors, so `apply_policy` returns a copy of a model whose modules belong to
subclasses that do what an interceptor does. The decision is carried by the class through `jit`, `scan`, `vmap`,
`remat` and every other transformation that takes a model apart and puts it together again.
"""

import contextlib
import dataclasses
import functools
import inspect
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax

from mpjax._precision import module_scope, regions
from mpjax._precision.module_scope import Mark
from mpjax._precision.policy_map import PolicyMap

_ATTRIBUTE = "mpjax_policy"

# How a framework runs a method: `(module, name, bound method, args, kwargs, governed) -> result`.
Run = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Governed:
    """What a module of a model under policies carries.

    Attributes:
      policies: the map.
      entry: the entry of the map that governs the module.
      path: the module's `/`-joined path.
    """

    policies: PolicyMap
    entry: int
    path: str

    def __str__(self) -> str:
        return str(self.policies.policy(self.entry))

    __repr__ = __str__

    @functools.cached_property
    def region(self) -> regions.Region:
        """The module's region, without the path: modules under one policy share their traces."""
        return regions.Region(self.policies, self.entry, in_module=True)


def governed_of(module: Any) -> Governed | None:
    """What a module carries, or None."""
    return getattr(type(module), _ATTRIBUTE, None)


def original_class(module: Any) -> type:
    """The class that a module had before `apply_policy`."""
    cls = type(module)
    return cls.__mro__[1] if _ATTRIBUTE in vars(cls) else cls


def resolve(policies: PolicyMap, classes: Mapping[str, type]) -> dict[str, Governed]:
    """What each module of a model is to carry.

    Args:
      policies: the map.
      classes: the original class of each module, by path.

    Raises:
      ValueError: if a pattern governs no module, or a policy cannot be run.
    """
    for policy in policies.policies:
        regions.check_runs(policy)
    if policies.entries:
        matches = {policies.match(path, cls) for path, cls in classes.items()}
        policies.check_governs({m for m in matches if m is not None}, classes)
    return {path: Governed(policies, policies.resolve(path, classes), path) for path in classes}


@functools.cache
def subclass(
    cls: type,
    governed: Governed,
    base: type,
    run: Run,
    make: Callable[[type, Governed], type],
    excluded: tuple[str, ...] = (),
) -> type:
    """The subclass of `cls` whose public methods run in their module's region.

    The policy is an attribute of the class: modules, and what walks over their attributes, see no other.

    Args:
      cls: a class of modules.
      governed: what its modules carry.
      base: the framework's own class, whose methods are left alone.
      run: how the framework runs a method.
      make: the framework's function of the first two arguments, by which a pickle makes the class anew.
      excluded: methods that return state rather than results.
    """
    namespace: dict[str, Any] = {
        _ATTRIBUTE: governed,
        "__doc__": cls.__doc__,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__reduce__": lambda self: (_rebuild, (make, cls, governed, dict(vars(self)))),
    }
    inherited = {*dir(base), *excluded}
    for name in dir(cls):
        if name != "__call__" and (name.startswith("_") or name in inherited):
            continue
        method = next((vars(c)[name] for c in cls.__mro__ if name in vars(c)), None)
        if _is_method(method):
            namespace[name] = _in_region(name, method, governed, cls, run)
    with warnings.catch_warnings():  # what a framework has to say of the class it has said when that was made
        warnings.simplefilter("ignore")
        return type(cls)(cls.__name__, (cls,), namespace)


def _rebuild(make: Any, cls: type, governed: Governed, attributes: dict[str, Any]) -> Any:
    """Unpickles a module, of a class that has no importable name."""
    module = object.__new__(make(cls, governed))
    vars(module).update(attributes)
    return module


def _is_method(x: Any) -> bool:
    """Functions, and what transforms such as `nnx.jit` make of them when they decorate a method."""
    if isinstance(x, types.FunctionType):
        return True
    return callable(x) and hasattr(x, "__get__") and not isinstance(x, (type, staticmethod, classmethod))


def _in_region(name: str, method: Any, governed: Governed, cls: type, run: Run) -> Any:
    @functools.wraps(method, updated=())
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = method.__get__(self, type(self))
        if module_scope.running() == (governed.path, cls):
            return bound(*args, **kwargs)
        return run(self, name, bound, args, kwargs, governed)

    # Equinox takes a function that wraps one of `jax.jit` or `jax.checkpoint` for a mistake.
    wrapper.__signature__ = inspect.signature(wrapper)  # type: ignore[attr-defined]
    del wrapper.__wrapped__  # type: ignore[attr-defined]
    return wrapper


@contextlib.contextmanager
def scopes(
    cls: type, governed: Governed, paths: Callable[[], Iterable[str]], base: str | None = None
) -> Iterator[None]:
    """The scopes around a module's method: its name for profilers and, while an audit records, its mark.

    Args:
      cls: the module's original class.
      governed: what it carries.
      paths: the paths of all modules of the model, asked for the outermost module of an audit only.
      base: as of `module_scope.Mark`.
    """
    with jax.named_scope(_relative_path(governed.path) or cls.__name__):
        if not module_scope.is_recording():
            yield
            return
        caller = module_scope.innermost()
        root = cls.__name__ if not governed.path else caller.root if caller else ""
        if caller is None:  # modules that do not run are modules of the model, too
            module_scope.add_modules(root, paths())
        with module_scope.marked(Mark(root, governed.path, base), cls):
            yield


def _relative_path(path: str) -> str:
    """The path as seen from the module that is running, so that nested scopes spell the whole."""
    outer = module_scope.running()
    return path.removeprefix(f"{outer[0]}/") if outer else path


def check_carries(policies: PolicyMap, models: Iterable[Any], framework: str) -> None:
    """Raises if one of these models, arguments of a function under a map with patterns, does not carry policies.

    Raises:
      ValueError: naming the model and the way out.
    """
    for model in models:
        if governed_of(model) is None:
            raise ValueError(
                f"The policy map '{policies}' has patterns, but the {framework} module {type(model).__name__} does "
                "not carry them. Pass mpjax.apply_policy(model, policies) instead of the model."
            )
