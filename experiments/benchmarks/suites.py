"""The suites: each returns rows, which `show` prints and draws.

A row has a `group`, a `name`, ratios and `seconds` with their quartiles, and the suite's own counts.
"""

import functools
import gc
import time
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TypeVar

import chex
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from experiments import measure
from experiments.benchmarks import options, problems, pytorch, steps
from experiments.benchmarks.problems import Problem
from experiments.benchmarks.steps import Contender
from experiments.benchmarks.timing import Compiled, Measured, Row, by_turns, measure_steps, ratio, spread
from experiments.errors import UsageError
from mpjax._precision import cpu_lowering
from mpjax._precision.ops import hooked

DTYPES = ("float32", "bfloat16", "float16")
Say = Callable[[str], None]
T = TypeVar("T")


def loss_scale(suite: options.LossScale, say: Say) -> list[Row]:
    """Dynamic loss scaling where nearly all of the step is the optimizer."""
    problem = problems.mlp(suite.layers, suite.width, suite.batch)
    assert problem.by_hand is not None
    by_hand = problem.by_hand(jnp.float16)
    base = "unscaled, hand-written"
    contenders = [
        steps.unscaled(problem, by_hand, base),
        steps.dynamic_by_hand(problem, by_hand),
        steps.mpjax_step(problem, "float16"),
        steps.jmp_step(problem, "float16"),
        steps.flax_step(problem, "float16"),
    ]
    if steps.has_mpx():
        contenders.append(steps.mpx_step(problem))
    else:
        say("mpx is left out: it needs pip install -e '.[bench]'")
    compiled = {c.name: Compiled(c, problem.batch) for c in contenders}
    rows = measure_steps(compiled, suite.rounds, {"over unscaled": lambda name: base})
    return [{"group": "float16", "name": name} | row for name, row in rows.items()]


def gpt(suite: options.GPT, say: Say) -> list[Row]:
    """The whole step of a GPT."""
    problem = problems.gpt(suite.layers, suite.width, suite.batch, suite.length, suite.vocabulary)
    if not pytorch.is_there():
        say(pytorch.EXTRA)
        return _precisions(problem, suite.rounds)
    say("PyTorch's time over float32 is over its own")
    dtypes = ["float32"]
    if suite.quick or cpu_lowering.has_native_bfloat16():
        dtypes.append("bfloat16")
    else:
        say("PyTorch in bfloat16 is left out: without the instructions for it a step takes a minute")
    others = {(dtype, "PyTorch"): functools.partial(pytorch.Step, suite, dtype) for dtype in dtypes}
    return _precisions(problem, suite.rounds, others)


def resnet(suite: options.ResNet, say: Say) -> list[Row]:
    """The whole step of a residual network."""
    del say
    return _precisions(problems.resnet(suite.blocks, suite.channels, suite.batch, suite.size), suite.rounds)


def _precisions(
    problem: Problem,
    rounds: int,
    others: Mapping[tuple[str, str], Callable[[], Measured]] = MappingProxyType({}),
) -> list[Row]:
    """Every library in every precision; the base is the hand-written step, or Flax's if there is none.

    Args:
      problem: what is trained.
      rounds: how often each takes a step.
      others: from dtype and name of another framework to its step, which is measured over its own float32.
    """
    bar = "Flax" if problem.by_hand is None else "hand-written"
    contenders: dict[tuple[str, str], Measured] = {}
    saved: dict[tuple[str, str], Row] = {}
    for dtype in DTYPES:
        for c in _libraries(problem, dtype):
            contenders[dtype, c.name] = Compiled(c, problem.batch)
            saved[dtype, c.name] = {"saved_bytes": _saved_bytes(c, problem)}
        contenders |= {key: make() for key, make in others.items() if key[0] == dtype}
    bases: dict[str, Callable[[tuple[str, str]], tuple[str, str]]] = {
        "over float32": lambda key: ("float32", key[1] if key in others else bar),
        f"over {bar}": lambda key: (key[0], bar),
    }
    rows = measure_steps(contenders, rounds, bases)
    return [
        {"group": dtype, "name": name} | row | saved.get((dtype, name), {})
        for (dtype, name), row in rows.items()
    ]


def _libraries(problem: Problem, dtype: str) -> Iterator[Contender]:
    yield steps.mpjax_step(problem, dtype)
    if problem.by_hand is not None:
        by_hand = problem.by_hand(jnp.dtype(dtype))
        dynamic = dtype == "float16"
        yield (
            steps.dynamic_by_hand(problem, by_hand)
            if dynamic
            else steps.unscaled(problem, by_hand, "hand-written")
        )
    if dtype != "float32" or problem.by_hand is None:
        yield steps.flax_step(problem, dtype)
        yield steps.jmp_step(problem, dtype)


def _saved_bytes(contender: Contender, problem: Problem) -> int:
    loss = contender.loss
    assert loss is not None
    return measure.saved_bytes(
        lambda *args: loss(*args)[0], problem.params, problem.model_state, problem.batch
    )


def trace(suite: options.Trace, say: Say) -> list[Row]:
    """Tracing, lowering and compiling; and what an operation costs when no policy is active."""
    rows: list[Row] = []
    for layers in suite.layers:
        for scanned in (False, True):
            group = f"{layers} layers{', scanned' if scanned else ''}"
            say(group)
            problem = problems.gpt(layers, 64, 2, 16, 64, scanned=scanned)
            contenders = [steps.flax_step(problem, "bfloat16"), steps.mpjax_step(problem, "bfloat16")]
            rows += _stages(group, contenders, problem.batch, suite.rounds)
    return rows + _bind_costs(suite.binds, suite.rounds)


# CPython 3.11 keeps its frames in chunks of 16 kB, and a call that crosses from one to the next costs a page fault or
# more. Whom that hits, with thousands of them, depends on how deep its stack happens to be, so every round starts from
# another depth.
_DEPTH = 20


def _deeper(frames: int, fn: Callable[[], T]) -> T:
    return fn() if frames == 0 else _deeper(frames - 1, fn)


def _stages(group: str, contenders: list[Contender], batch: chex.ArrayTree, rounds: int) -> list[Row]:
    """One row per contender and stage, each over the first contender."""
    carries = {c.name: jax.eval_shape(c.carry) for c in contenders}
    seconds: dict[tuple[str, str], list[float]] = {}

    def stages(c: Contender) -> dict[str, float]:
        jax.clear_caches()
        gc.collect()  # the garbage of the one before
        start = time.perf_counter()
        traced = jax.jit(c.step, donate_argnums=0).trace(carries[c.name], batch)
        after_trace = time.perf_counter()
        lowered = traced.lower()
        after_lower = time.perf_counter()
        lowered.compile()
        end = time.perf_counter()
        times = {
            "trace": after_trace - start,
            "lower": after_lower - after_trace,
            "compile": end - after_lower,
        }
        return times | {"all": end - start}

    for i in range(rounds + 1):
        for c in contenders:
            times = _deeper(_DEPTH * i, functools.partial(stages, c))
            if i:  # the first round warms up
                for stage, t in times.items():
                    seconds.setdefault((c.name, stage), []).append(t)
    base = contenders[0].name
    return [
        {
            "group": group,
            "name": f"{name}, {stage}",
            f"over {base}": ratio(values, seconds[base, stage]),
            "seconds": spread(values),
        }
        for (name, stage), values in seconds.items()
    ]


def _bind_costs(binds: int, rounds: int) -> list[Row]:
    """What mpjax's wrapper adds to one operation while no policy is active: around an operation that does nothing."""
    x = jnp.ones((2, 2))
    rows = []
    for name, fn in (("add", jnp.add), ("exp", lambda x, _: jnp.exp(x)), ("dot_general", jax.lax.dot)):
        *_, eqn = jax.make_jaxpr(fn)(x, x).eqns

        def many(bind: Callable[..., None], eqn: jax.extend.core.JaxprEqn = eqn) -> None:
            args, params = [x] * len(eqn.invars), eqn.params
            for _ in range(binds):
                bind(*args, **params)

        wrapped = hooked(_nothing, eqn.primitive.bind.rule)
        seconds = by_turns(
            {"bare": functools.partial(many, _nothing), "wrapped": functools.partial(many, wrapped)},
            5 * rounds,
        )
        added = [(b - a) / binds for a, b in zip(seconds["bare"], seconds["wrapped"], strict=True)]
        group = "one operation, no policy active"
        rows.append({"group": group, "name": f"{name}, added by mpjax", "seconds": spread(added)})
    return rows


def _nothing(*args: object, **params: object) -> None:
    pass


def scaling(suite: options.Scaling, say: Say) -> list[Row]:
    """What policy, scale and finite check add as parameters and devices grow, in a hand-written step and in mpjax's."""
    rows = []
    for parameters in suite.parameters:
        say(f"{parameters:.0e} parameters")
        runs = parameters <= suite.largest
        problem = problems.mlp(4, round((parameters / 4) ** 0.5), 16, abstract=not runs)
        compiled = {c.name: Compiled(c, problem.batch) for c in _bare_and_scaled(problem)}
        rows += _added(f"{parameters:.0e} parameters", compiled, suite.rounds if runs else 0)
    for kind, spec in (("replicated", P()), ("sharded", P("data"))):
        for devices in suite.devices:
            if devices > jax.device_count():
                raise UsageError(
                    f"--devices {devices} are more than the {jax.device_count()} of this machine"
                )
            group = f"{devices} {'device' if devices == 1 else 'devices'}, {kind}"
            say(group)
            rows += _over_devices(group, devices, spec, suite.rounds)
    return rows


def _over_devices(group: str, devices: int, spec: P, rounds: int) -> list[Row]:
    mesh = Mesh(jax.devices()[:devices], ("data",), axis_types=(AxisType.Auto,))
    problem = problems.mlp(4, 256, 8 * devices)
    batch = jax.device_put(problem.batch, NamedSharding(mesh, P("data")))

    def shardings(carry: chex.ArrayTree) -> chex.ArrayTree:
        return jax.tree.map(lambda x: NamedSharding(mesh, spec if x.ndim > 1 else P()), carry)

    return _added(group, {c.name: Compiled(c, batch, shardings) for c in _bare_and_scaled(problem)}, rounds)


def _bare_and_scaled(problem: Problem) -> list[Contender]:
    assert problem.by_hand is not None
    loss = problem.by_hand(jnp.float16)
    by_hand = steps.dynamic_by_hand(problem, loss)
    return [steps.unscaled(problem, loss, "unscaled"), by_hand, steps.mpjax_step(problem, "float16")]


def _added(group: str, compiled: dict[str, Compiled], rounds: int) -> list[Row]:
    """Over the unscaled step: the time, or with no rounds the bytes that the compiler counts."""
    if rounds:
        rows = measure_steps(compiled, rounds, {"over unscaled": lambda name: "unscaled"})
    else:
        rows = {name: c.costs() for name, c in compiled.items()}
        bare = rows["unscaled"]["bytes_accessed"]
        for row in rows.values():
            row["bytes over unscaled"] = row["bytes_accessed"] / bare
    return [{"group": group, "name": name} | row for name, row in rows.items()]
