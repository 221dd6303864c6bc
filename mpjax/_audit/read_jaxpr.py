"""Reads a traced program into one flat list of operations: opens inner jaxprs and says what belongs where."""

import contextlib
import itertools
import math
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from mpjax._audit import source_locations
from mpjax._audit.program import Loop, LostConstant, Op, Program, Value
from mpjax._audit.source_locations import BACKWARD, OPTIMIZER, Line
from mpjax._frameworks.protocol import intercepted
from mpjax._precision import module_scope

# Their inner jaxprs say how two numbers are combined, or are a kernel.
_OPAQUE = ("pallas_call", "scatter", "reduce", "select_and", "argm", "sort", "all_reduce", "reduce_window")
_LOOP = "loop"
# Comparisons as distances between their sides: a < b is b - a > 0, a <= b is b - a + 1 > 0.
_COMPARED = {"lt": (1, 0), "le": (1, 1), "gt": (-1, 0), "ge": (-1, 1)}
# So many frames around a cast are looked through for the number that it cast.
_NEAR = 4
# Part of the key of JAX's caches: what was traced before is traced anew, as casts of numbers show in tracing only.
_reading = jax.make_user_context(default_value=None)
_readings = itertools.count()


def traced_anew() -> contextlib.AbstractContextManager[None]:
    """A context in which functions that JAX has traced before are traced once more."""
    return _reading(next(_readings))


def read(fn: Callable[..., Any], args: tuple[Any, ...]) -> Program:
    """Traces `fn` and reads the program.

    Args:
      fn: any JAX function.
      args: arrays or `jax.ShapeDtypeStruct`s.
    """
    lost: list[LostConstant] = []

    # JAX casts a number when it traces the operation that takes it, and keeps what is left of it.
    def record(kind: str, flag: int) -> None:
        constant = _lost_constant(kind == "overflow")
        if constant is not None:
            lost.append(constant)

    with (
        module_scope.recording() as classes,
        intercepted(),
        np.errstate(over="call", under="call", call=record),
    ):
        jaxpr, out = jax.make_jaxpr(fn, return_shape=True)(*args)
    reader = _Reader()
    flat = jax.tree_util.tree_flatten_with_path(args)[0]
    names = [_argument_name(path) for path, _ in flat]
    inputs = [
        Value(v.aval, name=name, given=leaf)
        for v, name, (_, leaf) in zip(jaxpr.jaxpr.invars, names, flat, strict=True)
    ]
    outputs = reader.read(jaxpr, inputs, "", 1, None)
    _mark_live(reader.ops, outputs)
    root = _attribute(reader.ops)
    abstract = jax.tree.unflatten(jax.tree.structure(args), [v.aval for v in inputs])
    return Program(reader.ops, inputs, outputs, abstract, out, reader.loops, lost, root, classes, jaxpr)


def _run_jaxprs(eqn: Any) -> list[Any]:
    """The jaxprs that an equation runs."""
    solver = getattr(eqn.params.get("jaxprs"), "solve", None)
    if solver is not None:  # a linear solve holds those of its derivatives, too
        return [solver]
    found = []
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(item, "eqns") or hasattr(getattr(item, "jaxpr", None), "eqns"):
                found.append(item)
    return found


class _Reader:
    """Opens jaxprs into one list of operations."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.loops: list[Loop] = []
        self._devices = 1

    def read(self, jaxpr: Any, args: list[Value], prefix: str, count: int, call: Op | None) -> list[Value]:
        """Reads a jaxpr whose inputs are `args`, and returns its outputs."""
        consts = getattr(jaxpr, "consts", ())
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        env: dict[Any, Value] = {}
        for var, const in zip(jaxpr.constvars, consts, strict=False):
            env[var] = Value(var.aval, const=const)
        for var in jaxpr.constvars:
            env.setdefault(var, Value(var.aval))
        env.update(zip(jaxpr.invars, args, strict=True))

        def value_of(atom: Any) -> Value:
            return Value(atom.aval, const=atom.val) if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            ins = [value_of(v) for v in eqn.invars]
            stack = source_locations.join(prefix, str(eqn.source_info.name_stack))
            outs = self._equation(eqn, ins, stack, count, call)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [value_of(v) for v in jaxpr.outvars]

    def _equation(self, eqn: Any, ins: list[Value], stack: str, count: int, call: Op | None) -> list[Value]:
        name = eqn.primitive.name
        inner = [] if name.startswith(_OPAQUE) else _run_jaxprs(eqn)
        if not inner:
            return self._op(name, eqn, ins, stack, count, call).outs
        around = Op(name, eqn, [], stack, count, call, glue=True)
        if name == "scan":
            return self._scan(around, inner[0], ins)
        if name == "while":
            return self._while(around, ins)
        if name == "cond":
            return self._cond(around, inner, ins)
        if name == "shard_map":
            return self._shard_map(around, inner[0], ins)
        first = getattr(inner[0], "jaxpr", inner[0])
        if len(inner) == 1 and (len(first.invars), len(first.outvars)) == (len(ins), len(eqn.outvars)):
            return self.read(inner[0], ins, stack, count, around)
        return self._unknown(around, inner, ins)

    def _op(
        self,
        name: str,
        eqn: Any,
        ins: list[Value],
        stack: str,
        count: int,
        call: Op | None,
        glue: bool = False,
    ) -> Op:
        op = Op(name, eqn, ins, stack, count, call, glue)
        op.outs = [Value(v.aval, op) for v in eqn.outvars]
        return self._listed(op)

    def _glue(self, around: Op, ins: list[Value], aval: Any, count: int, name: str) -> Value:
        op = Op(name, around.eqn, ins, around.stack, count, around.call, glue=True)
        op.outs = [Value(aval, op)]
        return self._listed(op).out

    def _listed(self, op: Op) -> Op:
        op.devices = self._devices
        self.ops.append(op)
        return op

    def _carries(self, around: Op, start: list[Value], avals: list[Any], count: int) -> list[Value]:
        return [
            self._glue(around, [s], aval, count, f"{_LOOP} carry")
            for s, aval in zip(start, avals, strict=True)
        ]

    def _close(self, start: list[Value], carry: list[Value], new: list[Value], length: int | None) -> None:
        for c, n in zip(carry, new, strict=True):
            assert c.op is not None
            c.op.ins.append(n)
            n.uses.append(c.op)
        self.loops.append(Loop(length, tuple(zip(start, carry, new, strict=True))))

    def _scan(self, around: Op, jaxpr: Any, ins: list[Value]) -> list[Value]:
        eqn, length = around.eqn, around.eqn.params["length"]
        body = getattr(jaxpr, "jaxpr", jaxpr)
        # What is scanned over has an axis more outside; how the parameters say it depends on the version.
        scanned = [_ndim(o) != _ndim(v) for o, v in zip(eqn.invars, body.invars, strict=True)]
        n_xs = sum(scanned)
        n_carry = sum(_ndim(o) == _ndim(v) for o, v in zip(eqn.outvars, body.outvars, strict=True))
        n_consts = len(ins) - n_carry - n_xs
        count = around.count * length
        avals = [v.aval for v in body.invars]
        start = ins[n_consts : n_consts + n_carry]
        carry = self._carries(around, start, avals[n_consts : n_consts + n_carry], count)
        xs = [
            self._glue(around, [x], aval, count, f"{_LOOP} slice")
            for x, aval in zip(ins[n_consts + n_carry :], avals[n_consts + n_carry :], strict=True)
        ]
        outs = self.read(jaxpr, [*ins[:n_consts], *carry, *xs], around.stack, count, around)
        self._close(start, carry, outs[:n_carry], length)
        return [
            self._glue(around, [o], v.aval, around.count, f"{_LOOP} result")
            for o, v in zip(outs, eqn.outvars, strict=True)
        ]

    def _while(self, around: Op, ins: list[Value]) -> list[Value]:
        params = around.eqn.params
        n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
        start = ins[n_cond + n_body :]
        length = _trip_count(around.eqn, ins)
        count = around.count * (1 if length is None else length)
        body = getattr(params["body_jaxpr"], "jaxpr", params["body_jaxpr"])
        carry = self._carries(around, start, [v.aval for v in body.invars[n_body:]], count)
        (again,) = self.read(params["cond_jaxpr"], [*ins[:n_cond], *carry], around.stack, count, around)
        outs = self.read(
            params["body_jaxpr"], [*ins[n_cond : n_cond + n_body], *carry], around.stack, count, around
        )
        self._close(start, carry, outs, length)
        return [
            self._glue(around, [o, again], v.aval, around.count, f"{_LOOP} result")
            for o, v in zip(outs, around.eqn.outvars, strict=True)
        ]

    def _cond(self, around: Op, branches: list[Any], ins: list[Value]) -> list[Value]:
        results = [self.read(b, ins[1:], around.stack, around.count, around) for b in branches]
        return [
            self._glue(around, [ins[0], *outs], v.aval, around.count, "branches")
            for v, *outs in zip(around.eqn.outvars, *results, strict=True)
        ]

    def _shard_map(self, around: Op, jaxpr: Any, ins: list[Value]) -> list[Value]:
        params = around.eqn.params
        sizes = dict(params["mesh"].shape)
        axes = params.get("newly_manual_axes", params.get("manual_axes")) or sizes
        devices = math.prod(sizes[a] for a in axes)
        count = around.count * devices
        body = getattr(jaxpr, "jaxpr", jaxpr)
        self._devices *= devices
        shards = [
            self._glue(around, [x], v.aval, count, "shard") for x, v in zip(ins, body.invars, strict=True)
        ]
        outs = self.read(jaxpr, shards, around.stack, count, around)
        self._devices //= devices
        return [
            self._glue(around, [o], v.aval, around.count, "unshard")
            for o, v in zip(outs, around.eqn.outvars, strict=True)
        ]

    def _unknown(self, around: Op, jaxprs: list[Any], ins: list[Value]) -> list[Value]:
        """A primitive with several jaxprs: everything in them may depend on everything that goes in."""
        outs = []
        for jaxpr in jaxprs:
            invars = getattr(jaxpr, "jaxpr", jaxpr).invars
            args = [self._glue(around, list(ins), v.aval, around.count, "enter") for v in invars]
            outs += self.read(jaxpr, args, around.stack, around.count, around)
        return [self._glue(around, [*ins, *outs], v.aval, around.count, "leave") for v in around.eqn.outvars]


def _ndim(var: Any) -> int:
    return len(getattr(var.aval, "shape", ()))


def _trip_count(eqn: Any, ins: list[Value]) -> int | None:
    """How often a loop such as `i = a; while i < b: i += c` over integers runs, None for any other."""
    cond, body = (getattr(j, "jaxpr", j) for j in (eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]))
    if len(cond.eqns) != 1 or cond.eqns[0].primitive.name not in _COMPARED:
        return None
    start = ins[eqn.params["cond_nconsts"] + eqn.params["body_nconsts"] :]
    before, after = body.invars[eqn.params["body_nconsts"] :], body.outvars

    def first_and_step(atom: Any) -> tuple[Any, Any]:
        """What a side of the comparison starts with, and what each iteration adds to it."""
        if isinstance(atom, Literal):
            return _integer(atom.val), 0
        i = cond.invars.index(atom) - eqn.params["cond_nconsts"]
        if i < 0:
            return _integer(ins[i + eqn.params["cond_nconsts"]].const), 0
        return _integer(start[i].const), 0 if after[i] is before[i] else _step(body, before[i], after[i])

    (left, left_step), (right, right_step) = map(first_and_step, cond.eqns[0].invars)
    if None in (left, left_step, right, right_step):
        return None
    # The loop runs as long as the distance is positive.
    sign, least = _COMPARED[cond.eqns[0].primitive.name]
    distance, change = sign * (right - left) + least, sign * (right_step - left_step)
    if distance <= 0:
        return 0
    return -(distance // change) if change < 0 else None


def _step(body: Any, before: Any, after: Any) -> int | None:
    """The integer that the body of a loop adds to a carry."""
    eqn = next((e for e in body.eqns if after in e.outvars), None)
    if eqn is None or eqn.primitive.name not in ("add", "sub"):
        return None
    left, right = eqn.invars
    if eqn.primitive.name == "add" and right is before:
        left, right = right, left
    if left is not before or not isinstance(right, Literal):
        return None
    step = _integer(right.val)
    return -step if step is not None and eqn.primitive.name == "sub" else step


def _integer(number: Any) -> int | None:
    if number is None or isinstance(number, jax.core.Tracer) or np.ndim(number):
        return None
    return int(number) if np.issubdtype(np.result_type(number), np.integer) else None


def _mark_live(ops: list[Op], outputs: list[Value]) -> None:
    reached = [v.op for v in outputs] + [op for op in ops if op.eqn.effects and not op.glue]
    while reached:
        op = reached.pop()
        if op is not None and not op.live:
            op.live = True
            reached += [v.op for v in op.ins]


def _attribute(ops: list[Op]) -> str | None:
    """Gives each operation its module path and phase, and returns the class of the one model, if it is one."""
    scopes = [source_locations.scope(op.stack) for op in ops]
    root = _place(ops, scopes)
    backward = any(scope.phase == BACKWARD for scope in scopes)
    for op, scope in zip(ops, scopes, strict=True):
        op.phase = scope.phase
        if not scope.explicit and any(_follows(v) for v in op.ins):
            op.phase = OPTIMIZER
    # Weight decay and schedules come before any gradient, but serve neither pass of the model.
    serves: set[int] = set()
    for op, scope in zip(reversed(ops), reversed(scopes), strict=True):
        if scope.explicit or any(id(use) in serves for v in op.outs for use in v.uses):
            serves.add(id(op))
        elif backward:
            op.phase = OPTIMIZER
    return root


def _place(ops: list[Op], scopes: list[source_locations.Scope]) -> str | None:
    """Gives each operation its module, and returns the class of the one model, if it is one."""
    marked = any(s.module is not None for s in scopes)
    # In a program that is differentiated, what is neither forward nor backward belongs to no module.
    differentiated = any(s.explicit for s in scopes)
    found: list[tuple[str, tuple[str, ...]]] = []
    for op, s in zip(ops, scopes, strict=True):
        classes: tuple[str, ...] = ()
        if not (s.root or s.path or s.module is not None) and (s.explicit or not differentiated):
            classes = _called_classes(op)
        found.append((classes[0], classes[1:]) if classes else (s.root, s.path))
    roots = {
        root
        for (root, _), s in zip(found, scopes, strict=True)
        if root and (s.module is not None or not marked)
    }
    only = roots.pop() if len(roots) == 1 else None
    for op, s, (root, path) in zip(ops, scopes, found, strict=True):
        op.path = "/".join(path if root == only else ([root] if root else []) + list(path))
        op.module = op.path if s.module is None else s.module
        op.model = root
    return only


def _called_classes(op: Op) -> tuple[str, ...]:
    """What stands for the path of modules that open no scope, as those of nnx without a policy."""
    outer = () if op.call is None else _called_classes(op.call)
    return outer + source_locations.called_classes(op.eqn.source_info.traceback)


def _follows(value: Value) -> bool:
    """Whether a value depends on gradients."""
    return value.op is not None and value.op.phase in (BACKWARD, OPTIMIZER)


def _lost_constant(overflow: bool) -> LostConstant | None:
    """The number whose cast has just overflowed or underflowed, if nothing is left of it, and the running frames."""
    number: float | None = None
    found: list[Line] = []
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename != __file__:
        if number is None and len(found) < _NEAR:
            number = next((n for x in frame.f_locals.values() if (n := _lost(x, overflow)) is not None), None)
        found.append(Line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname))
        frame = frame.f_back  # type: ignore[assignment]
    return None if number is None else LostConstant(number, overflow, tuple(found))


def _lost(x: Any, overflow: bool) -> float | None:
    """`x` as a float, if it is a finite number that float16 makes infinite or zero, as the case may be."""
    if not isinstance(x, (float, int, np.generic, np.ndarray)) or np.ndim(x) or isinstance(x, bool):
        return None
    try:
        number = float(x)
    except (TypeError, ValueError, OverflowError):
        return None
    with np.errstate(all="ignore"):
        half = float(np.float16(number))
    gone = math.isinf(half) if overflow else half == 0 and number != 0
    return number if gone and math.isfinite(number) else None


def _argument_name(path: tuple[Any, ...]) -> str:
    position = getattr(path[0], "idx", 0)
    rest = jax.tree_util.keystr(path[1:], simple=True, separator="/").removesuffix("/value")  # of a Variable
    return f"argument {position}" + (f" '{rest}'" if rest else "")
