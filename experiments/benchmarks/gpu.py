"""One run under ten minutes on a GPU: a GPT of about 350 M parameters in every precision."""

import contextlib
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from experiments import measure
from experiments.benchmarks import options, problems, steps
from experiments.benchmarks.problems import Problem
from experiments.benchmarks.timing import Compiled, Row, measure_steps
from experiments.errors import UsageError

PRECISIONS = {
    "float32": ("float32", "highest"),
    "tf32": ("float32", "default"),
    "bfloat16": ("bfloat16", "default"),
    "float16, dynamic scale": ("float16", "default"),
}
"""From a name to the compute dtype and JAX's precision for float32 matmuls."""


def gpu(suite: options.GPU, say: Callable[[str], None]) -> list[Row]:
    """Tokens/s, share of the measured peak, memory, and the largest batch that fits.

    Raises:
      UsageError: without a GPU; with `--quick` anything will do.
    """
    if jax.default_backend() != "gpu" and not suite.quick:
        raise UsageError("the suite gpu needs a GPU, JAX sees none here; --quick shows that it runs")
    peak = _peak(64 if suite.quick else 8192, suite.rounds)
    say(f"a large bfloat16 matmul runs at {peak / 1e12:.3g} TFLOP/s; fp8 is left out: it needs gemm policies")

    problem = _problem(suite, suite.batch)
    tokens = suite.batch * suite.length
    flops = 6 * measure.tree_size(problem.params) * tokens
    compiled = {}
    for name in PRECISIONS:
        say(f"compiling {name}")
        compiled[name] = _compile(problem, name)
    for name in ("jmp", "Flax"):
        # They select every leaf where mpjax has a conditional, which on a GPU waits for its predicate.
        make = steps.jmp_step if name == "jmp" else steps.flax_step
        compiled[f"float16, dynamic scale, {name}"] = Compiled(make(problem, "float16"), problem.batch)
    rows = measure_steps(compiled, suite.rounds, {"over float32": lambda name: "float32"})
    result = []
    for name, row in rows.items():
        rate = 1 / row["seconds"]["median"]
        ours = {"group": f"GPT, {suite.batch} × {suite.length} tokens", "name": f"mpjax {name}"}
        if name not in PRECISIONS:
            ours["name"] = name
        result.append(ours | row | {"tokens_per_second": tokens * rate, "share_of_peak": flops * rate / peak})
    del compiled
    if suite.largest_batch:
        result += [{"group": "largest batch", "name": f"{n}: {_largest_batch(suite, n)}"} for n in PRECISIONS]
    return result


def _problem(suite: options.GPU, batch: int) -> Problem:
    return problems.gpt(suite.layers, suite.width, batch, suite.length, suite.vocabulary, scanned=True)


def _compile(problem: Problem, name: str) -> Compiled:
    dtype, precision = PRECISIONS[name]
    with jax.default_matmul_precision(precision) if precision != "default" else contextlib.nullcontext():
        return Compiled(steps.mpjax_step(problem, dtype), problem.batch)


def _largest_batch(suite: options.GPU, name: str) -> int:
    """By doubling until memory ends."""
    batch = suite.batch
    while True:
        try:
            _compile(_problem(suite, 2 * batch), name).run()
        except Exception as e:  # which class it is depends on the version of JAX
            if "RESOURCE_EXHAUSTED" not in str(e):
                raise
            return batch
        batch *= 2


def _peak(size: int, rounds: int) -> float:
    """FLOP/s of a square bfloat16 matmul, at its fastest."""
    x = jnp.ones((size, size), jnp.bfloat16)
    matmul = jax.jit(jnp.matmul).lower(x, x).compile()
    fastest = float("inf")
    for _ in range(rounds + 1):
        start = time.perf_counter()
        jax.block_until_ready(matmul(x, x))
        fastest = min(fastest, time.perf_counter() - start)
    return 2 * size**3 / fastest
