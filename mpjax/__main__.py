"""The command line: `python -m mpjax audit PACKAGE.MODULE:FUNCTION` and `python -m mpjax explain …`."""

import argparse
import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mpjax._audit.audit import audit
from mpjax._audit.findings import KINDS
from mpjax._audit.stablehlo import PLATFORMS, check_platform
from mpjax._frameworks.explain import explain
from mpjax._frameworks.protocol import FRAMEWORKS, framework_of
from mpjax._precision.policy_map import PolicyMap, as_policy_map

FOUND, USAGE = 1, 2


class UsageError(Exception):
    """What was asked for cannot be done; the message says what would."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status: 0, 1 if the audit found errors, or 2 if it could not run."""
    options = _parser().parse_args(argv)
    try:
        return options.command(options)
    except UsageError as e:
        print(f"error: {e}", file=sys.stderr)
    except Exception as e:
        # It is the target's own, so it is shown unchanged; but status 1 says that the audit has errors.
        traceback.print_exception(e)
    return USAGE


def _audit(options: argparse.Namespace) -> int:
    policies = None if options.policy is None else _policies(options.policy)
    if options.platform is not None:
        _checked(lambda: check_platform(options.platform), "--platform")
    fn, args = _program(options.target)
    try:
        found = audit(
            fn, *args, policies=policies, platform=options.platform, ignore=_ignored(options.ignore)
        )
    except Exception as e:
        if isinstance(e, (TypeError, ValueError)) and not getattr(e, "__notes__", ()):
            raise UsageError(f"{options.target}: {e}") from None
        raise
    print(found.to_json() if options.json else found)
    return FOUND if found.errors else 0


def _explain(options: argparse.Namespace) -> int:
    made = _call(options.target)
    # A model may be a tuple itself.
    parts = made if isinstance(made, tuple) and framework_of(made) is None else (made,)
    framework = framework_of(parts[0]) if parts else None
    if framework is None:
        raise UsageError(
            f"{options.target} must return a model of {', '.join(FRAMEWORKS)}, or (model, example inputs…), got "
            f"{_described(made)}"
        )
    policies = _policies(options.policy)
    model, inputs = parts[0], parts[1:]
    if len(inputs) == 1 and isinstance(inputs[0], tuple):
        inputs = inputs[0]
    if not inputs and not framework.explained_without_inputs:
        raise UsageError(
            f"{options.target} returned a model of {framework.name} alone, whose modules show only when it is called: "
            "return (model, example inputs…), of which shapes are enough (jax.ShapeDtypeStruct)"
        )
    print(_checked(lambda: explain(model, policies, *inputs), options.target))
    return 0


def _program(target: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    made = _call(target)
    if not (
        isinstance(made, tuple)
        and len(made) == 2
        and callable(made[0])
        and isinstance(made[1], (tuple, list))
    ):
        raise UsageError(
            f"{target} must return (fn, args), the function to audit and a tuple of its arguments, got "
            f"{_described(made)}"
        )
    return made[0], tuple(made[1])


def _call(target: str) -> Any:
    """What the function that a target names returns.

    Raises:
      UsageError: if it cannot be imported. An error of the function itself is raised unchanged.
    """
    name, colon, function = target.partition(":")
    if not (name and colon and function):
        raise UsageError(
            f"the target must read PACKAGE.MODULE:FUNCTION, as in experiments.tasks:gpt, got '{target}'"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(name)
    except ImportError as e:
        raise UsageError(f"'{name}' of '{target}' does not import: {e}") from None
    except SystemExit as e:  # whose status would else be taken for that of the audit
        raise UsageError(
            f"'{name}' of '{target}' ends the program when it is imported (status {e.code}); put what it runs as a "
            "script under if __name__ == '__main__'"
        ) from None
    made: Any = module
    for part in function.split("."):
        made = getattr(made, part, None)
    if not callable(made):
        public = [n for n, x in vars(module).items() if callable(x) and getattr(x, "__module__", "") == name]
        raise UsageError(
            f"'{name}' has no function '{function}'; it has {', '.join(sorted(public)[:10]) or 'none'}"
        )
    try:
        return made()
    except SystemExit as e:
        raise UsageError(
            f"'{target}' ended the program (status {e.code}) instead of returning what to read"
        ) from None


def _policies(text: str) -> PolicyMap:
    """A policy string, or a JSON file with a map from pattern to policy."""
    path = Path(text)
    if path.suffix == ".json":
        try:
            return _checked(lambda: as_policy_map(json.loads(path.read_text())), f"--policy {text}")
        except OSError as e:
            raise UsageError(f"--policy {text}: cannot be read ({e.strerror})") from None
    return _checked(lambda: as_policy_map(text), f"--policy '{text}'")


def _ignored(rules: list[str]) -> dict[str, list[str]]:
    ignored: dict[str, list[str]] = {}
    for rule in rules:
        pattern, colon, kind = rule.rpartition(":")
        if not colon:
            raise UsageError(f"--ignore must read PATTERN:KIND, as in '.*norm:half-range', got '{rule}'")
        ignored.setdefault(pattern, []).append(kind)
    return ignored


def _checked(f: Callable[[], Any], what: str) -> Any:
    """What `f` returns, with its complaint about what was asked for as a usage error."""
    try:
        return f()
    except (ValueError, TypeError, NotImplementedError) as e:
        raise UsageError(f"{what}: {e}") from None


def _described(x: Any) -> str:
    inside = f" of {', '.join(type(i).__name__ for i in x)}" if isinstance(x, (tuple, list)) else ""
    return f"{type(x).__name__}{inside}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mpjax",
        description="Shows which precision a program runs in, and which policy governs it.",
    )
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser(
        "audit",
        help="what precision a function really runs in",
        description="Prints an audit. Exit status 0, 1 if it has errors, 2 if it could not be made.",
        epilog=f"Kinds of findings: {', '.join(KINDS)}.",
    )
    command.add_argument("target", help="PACKAGE.MODULE:FUNCTION, which returns (fn, args)")
    command.add_argument(
        "--policy", help="compare with this: 'p=f32,c=bf16,o=f32' or alike, or a JSON file with a policy map"
    )
    command.add_argument("--platform", help=f"also lower for one of {', '.join(PLATFORMS)}")
    command.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="PATTERN:KIND",
        help="leave out findings of a kind in modules whose path the pattern matches; may be given again",
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(command=_audit)
    command = commands.add_parser(
        "explain",
        help="which policy governs which module",
        description="Prints which policy governs which module of a model.",
    )
    command.add_argument("target", help="PACKAGE.MODULE:FUNCTION, which returns (model, example inputs…)")
    command.add_argument(
        "--policy", required=True, help="'p=f32,c=bf16,o=f32' or alike, or a JSON file with a policy map"
    )
    command.set_defaults(command=_explain)
    return parser


if __name__ == "__main__":
    sys.exit(main())
