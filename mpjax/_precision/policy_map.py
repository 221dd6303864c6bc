"""`PolicyMap`: which policy governs which module."""

import dataclasses
import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import jax
import jmp

from mpjax._precision.policy import Policy, get_policy

# The key of the default in the dict form. As a regular expression it would not compile, so that it
# cannot be mistaken for a pattern.
DEFAULT_KEY = "*"
_CLASS_PREFIX = "class:"
DEFAULT_ENTRY = -1


@dataclasses.dataclass(frozen=True, init=False)
class PolicyMap:
    r"""Patterns of module paths, or module classes, and the policy each stands for.

    A pattern is a regular expression that must match the whole `/`-joined path of a module
    (`"block_\d+/attn"`, in nnx `"blocks/0/attn"`). A class governs its instances and those of its
    subclasses. The first match wins; a module that nothing matches inherits from its parent, the top one
    from the default. Maps are hashable and compare by value.

    >>> PolicyMap({".*attn": "p=f32,c=f32,o=bf16"}, default="p=f32,c=bf16,o=f32").to_dict()
    {'.*attn': 'p=full,c=full,o=bf16', '*': 'p=full,c=bf16,o=full'}

    Args:
      patterns: from pattern (or module class) to policy (or policy string). The key `"*"` is another way to
        give the default. In the dict form a class is written `"class:package.module.Name"`.
      default: what governs modules that no pattern reaches; float32 throughout if left out.

    Raises:
      ValueError: if a pattern does not compile, or a policy string is wrong.
      TypeError: if a key is neither a string nor a class.
    """

    entries: tuple[tuple[str, Policy], ...]
    default: Policy

    def __init__(
        self,
        patterns: Mapping[str | type, str | jmp.Policy] | None = None,
        default: str | jmp.Policy | None = None,
    ) -> None:
        patterns = dict(patterns or {})
        inner_default = patterns.pop(DEFAULT_KEY, None)
        if inner_default is not None and default is not None:
            raise ValueError(
                f"The default is given twice: as '{DEFAULT_KEY}': '{inner_default}' and as "
                f"default='{default}'; give it once."
            )
        chosen = next((d for d in (default, inner_default) if d is not None), "float32")
        entries = tuple((_pattern_key(k), _policy_of(k, v)) for k, v in patterns.items())
        object.__setattr__(self, "entries", entries)
        object.__setattr__(self, "default", get_policy(chosen))
        object.__setattr__(self, "_hash", hash((entries, self.default)))
        object.__setattr__(self, "_matchers", tuple(_matcher(key) for key, _ in entries))

    def __hash__(self) -> int:
        # Every jit call under a policy hashes it.
        return self._hash  # type: ignore[attr-defined]

    def __reduce__(self) -> tuple[Any, ...]:
        return (PolicyMap, (self.to_dict(),))

    def policy(self, entry: int) -> Policy:
        """The policy of an entry, as `match` returns it."""
        return self.default if entry == DEFAULT_ENTRY else self.entries[entry][1]

    def pattern(self, entry: int) -> str:
        """The pattern of an entry as it is written in the dict form."""
        return DEFAULT_KEY if entry == DEFAULT_ENTRY else self.entries[entry][0]

    def match(self, path: str, cls: type | None = None) -> int | None:
        """The first entry that names this module itself, or None.

        Args:
          path: the module's `/`-joined path; empty for the top module.
          cls: its class; without one, entries for classes match nothing.
        """
        for i, matcher in enumerate(self._matchers):  # type: ignore[attr-defined]
            if isinstance(matcher, str):
                if cls is not None and any(matcher == _class_name(c) for c in cls.__mro__):
                    return i
            elif matcher.fullmatch(path):
                return i
        return None

    def resolve(self, path: str, classes: Mapping[str, type | None] | None = None) -> int:
        """The entry that governs a module: its own match, else its nearest ancestor's, else the default.

        Args:
          path: the module's `/`-joined path.
          classes: the classes of the module and its ancestors by path, as far as they are known.
        """
        classes = classes or {}
        for ancestor in ancestors(path):
            entry = self.match(ancestor, classes.get(ancestor))
            if entry is not None:
                return entry
        return DEFAULT_ENTRY

    @property
    def policies(self) -> tuple[Policy, ...]:
        """Every policy of the map, the default last."""
        return (*(policy for _, policy in self.entries), self.default)

    def to_dict(self) -> dict[str, str]:
        """The map as plain strings; `as_policy_map` takes them back to an equal map."""
        return {key: str(policy) for key, policy in self.entries} | {DEFAULT_KEY: str(self.default)}

    @classmethod
    def from_dict(cls, patterns: Mapping[str, str]) -> "PolicyMap":
        """The map that `to_dict` gave, as a JSON, YAML or TOML config can hold it."""
        return as_policy_map(patterns)

    def __str__(self) -> str:
        if not self.entries:
            return str(self.default)
        return "; ".join(f"{key}: {policy}" for key, policy in self.to_dict().items())

    def check_governs(self, governed: Iterable[int], paths: Iterable[str]) -> None:
        """Raises if an entry governs no module of a model.

        Args:
          governed: the entries that match a module.
          paths: the paths of the model's modules, from which the message names the closest.

        Raises:
          ValueError: naming the pattern and the closest paths.
        """
        governed, paths = set(governed), sorted(set(paths))
        for i, (key, _) in enumerate(self.entries):
            if i in governed:
                continue
            later = [p for p in paths if _matches(self._matchers[i], p)]  # type: ignore[attr-defined]
            if later:
                first = self.match(later[0])
                raise ValueError(
                    f"Policy pattern '{key}' governs no module: '{later[0]}' matches it, but '"
                    f"{self.pattern(DEFAULT_ENTRY if first is None else first)}' comes first. Put the "
                    "narrower pattern before the wider one."
                )
            raise ValueError(
                f"Policy pattern '{key}' governs no module. It must match a module's whole path; the "
                f"closest paths are {_closest(key, paths)}. `mpjax.explain(model, policies, …)` lists them all."
            )


# All the ways to give policies.
PolicyMapLike: TypeAlias = str | jmp.Policy | Mapping[Any, Any] | PolicyMap


def as_policy_map(policies: PolicyMapLike) -> PolicyMap:
    """Returns the map that any way to give a policy stands for.

    Args:
      policies: a policy string, a policy (ours or jmp's), a dict as `PolicyMap` takes it, or a map.
    """
    if isinstance(policies, PolicyMap):
        return policies
    if isinstance(policies, Mapping):
        return PolicyMap(policies)
    return PolicyMap(default=get_policy(policies))


def ancestors(path: str) -> Iterable[str]:
    """`a/b/c`, `a/b`, `a` and the top module's empty path."""
    while path:
        yield path
        path = path.rpartition("/")[0]
    yield ""


def _class_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _pattern_key(key: Any) -> str:
    if isinstance(key, type):
        return _CLASS_PREFIX + _class_name(key)
    if isinstance(key, str):
        return key
    raise TypeError(
        f"A policy pattern must be a regular expression (a string) or a module class, got {key!r}."
    )


def _policy_of(key: Any, value: Any) -> Policy:
    try:
        return get_policy(value)
    except (ValueError, TypeError) as e:
        raise type(e)(f"{e} (The policy for pattern '{_pattern_key(key)}'.)") from None


def _matcher(key: str) -> "re.Pattern[str] | str":
    """A compiled pattern, or the full name of a class."""
    if key.startswith(_CLASS_PREFIX):
        return key.removeprefix(_CLASS_PREFIX)
    try:
        return re.compile(key)
    except re.error as e:
        raise ValueError(
            f"Policy pattern '{key}' does not compile as a regular expression: {e}. Patterns match whole "
            f"paths, as in '.*attn.*'; '{DEFAULT_KEY}' alone is the key of the default."
        ) from None


def _matches(matcher: "re.Pattern[str] | str", path: str) -> bool:
    return not isinstance(matcher, str) and matcher.fullmatch(path) is not None


def _closest(key: str, paths: list[str], n: int = 5) -> str:
    """The paths, or their last parts, that look most like what the pattern spells."""
    spelled = re.sub(r"[^\w/]+", "", key.removeprefix(_CLASS_PREFIX))

    def likeness(path: str) -> float:
        parts = path.split("/")
        suffixes = ("/".join(parts[i:]) for i in range(len(parts)))
        return max(difflib.SequenceMatcher(None, spelled, suffix).ratio() for suffix in suffixes)

    close = sorted((p for p in paths if p), key=likeness, reverse=True)[:n]
    return ", ".join(f"'{p}'" for p in close) if close else "none, as the model has no submodules"


def leaf_dtypes(params: Any, policies: PolicyMap, part: str) -> list[tuple[str, Any, Any]]:
    """What the policies say of each parameter, by the path of its module.

    Args:
      params: parameters whose key paths spell the paths of their modules, as Flax's do.
      policies: the map that governs them.
      part: which part of a policy to ask for, such as `"param_dtype"`.

    Returns:
      Path, leaf and dtype of each; None for a dtype that only the module's class could tell.
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(params)
    by_class = {getattr(p, part) for key, p in policies.entries if key.startswith("class:")}
    result = []
    for keys, leaf in flat:
        names = [str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in keys]
        if names and isinstance(keys[-1], jax.tree_util.GetAttrKey) and names[-1] in ("value", "raw_value"):
            names.pop()  # an nnx.Variable
        if names[:1] == ["params"]:
            names.pop(0)
        dtype = getattr(policies.policy(policies.resolve("/".join(names[:-1]))), part)
        result.append(("/".join(names), leaf, dtype if by_class <= {dtype} else None))
    return result
