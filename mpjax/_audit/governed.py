"""Which entry of a policy map governs an operation of a traced program."""

import re

from mpjax._audit.program import Op, Program
from mpjax._precision.policy_map import DEFAULT_ENTRY, PolicyMap, ancestors


def check_governs(program: Program, policies: PolicyMap) -> None:
    """Raises if an entry matches no module of the program, as one that is misspelt does.

    Raises:
      ValueError: naming the pattern and the closest paths.
    """
    known = [
        (a, classes.get(a)) for classes in program.classes.values() for p in classes for a in ancestors(p)
    ]
    others = {a for op in program.ops if op.model not in program.classes for a in ancestors(op.module)}
    matches = {policies.match(path, cls) for path, cls in known}
    matches |= {_match(policies, path, program.root) for path in others}
    if not program.classes:  # of modules with names of their own the program does not know the class
        matches |= {i for i, (key, _) in enumerate(policies.entries) if key.startswith("class:")}
    policies.check_governs({m for m in matches if m is not None}, {path for path, _ in known} | others)


def entry_of(policies: PolicyMap, op: Op, program: Program) -> int:
    """The entry of a map that governs an operation."""
    if (classes := program.classes.get(op.model)) is not None:
        return policies.resolve(op.module, classes)
    matches = (_match(policies, ancestor, program.root) for ancestor in ancestors(op.module))
    return next((m for m in matches if m is not None), DEFAULT_ENTRY)


def _match(policies: PolicyMap, path: str, root: str | None) -> int | None:
    """The first entry that matches a path of names; of classes all that is known is the name of the module."""
    name = re.sub(r"_\d+$", "", path.rpartition("/")[2]) or root or ""
    return next(
        (
            i
            for i, (key, _) in enumerate(policies.entries)
            if (key.rpartition(".")[2] == name if key.startswith("class:") else re.fullmatch(key, path))
        ),
        None,
    )
