"""Measuring by turns: A B C A B C …, so that a busy machine is equally unfair to all."""

import gc
import re
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import chex
import jax
import numpy as np

from experiments.benchmarks.steps import Contender

Row = dict[str, Any]
K = TypeVar("K", bound=Hashable)


def spread(values: Sequence[float] | np.ndarray) -> dict[str, float]:
    """Median and quartiles of a sample."""
    low, median, high = np.quantile(np.asarray(values, float), (0.25, 0.5, 0.75))
    return {"median": float(median), "low": float(low), "high": float(high)}


def ratio(seconds: list[float], base: list[float]) -> dict[str, float]:
    """One's time over another's in the same round: what slows down a round slows down both."""
    return spread(np.asarray(seconds) / np.asarray(base))


def by_turns(
    thunks: Mapping[K, Callable[[], float | None]], rounds: int, warmup: int = 1
) -> dict[K, list[float]]:
    """Seconds that each thunk took in each round; every round runs all of them once, in order.

    Args:
      thunks: what to run. A thunk waits for its own result, and returns the seconds that count or None
        for all that it took.
      rounds: how often.
      warmup: rounds that do not count.
    """
    seconds: dict[K, list[float]] = {name: [] for name in thunks}
    gc.collect()
    for i in range(warmup + rounds):
        for name, thunk in thunks.items():
            start = time.perf_counter()
            own = thunk()
            elapsed = time.perf_counter() - start if own is None else own
            if i >= warmup:
                seconds[name].append(elapsed)
    return seconds


_COLLECTIVE = re.compile(
    r" = (.*) (?:all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)
_DIMENSIONS = re.compile(r"\b[a-z]\w*\[([\d,]*)\]")


def collectives(text: str) -> tuple[int, int]:
    """Collectives of an optimized program, and how many of them carry nothing but scalars."""
    shapes = [_DIMENSIONS.findall(types) for types in _COLLECTIVE.findall(text)]
    return len(shapes), sum(not any(s) for s in shapes)


class Compiled:
    """A contender's compiled step, and the costs that the compiler reports."""

    def __init__(
        self,
        contender: Contender,
        batch: chex.ArrayTree,
        shardings: Callable[[chex.ArrayTree], chex.ArrayTree] | None = None,
    ) -> None:
        """Compiles.

        Args:
          contender: what to compile.
          batch: of every step.
          shardings: from the carry to its shardings, if it is spread over devices.
        """
        self._contender, self._batch, self._carry = contender, batch, None
        abstract = jax.eval_shape(contender.carry)
        self._place = None if shardings is None else shardings(abstract)
        placed: dict[str, Any] = {} if shardings is None else {"out_shardings": (self._place, None)}
        if self._place is not None:
            abstract = jax.tree.map(
                lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract, self._place
            )
        step = jax.jit(contender.step, donate_argnums=0, **placed)
        self._step = step.lower(abstract, batch).compile()

    def run(self) -> None:
        """One step; the first also makes the carry."""
        if self._carry is None:
            self._carry = self._contender.carry()
            if self._place is not None:
                self._carry = jax.device_put(self._carry, self._place)
        self._carry, metrics = self._step(self._carry, self._batch)
        jax.block_until_ready((self._carry, metrics))

    def costs(self) -> dict[str, float]:
        """Of the optimized program: bytes, and the number of converts and of collectives."""
        memory, cost = self._step.memory_analysis(), self._step.cost_analysis()
        text = self._step.as_text() or ""
        total, of_scalars = collectives(text)
        return {
            "temp_bytes": float(memory.temp_size_in_bytes) if memory else float("nan"),
            "bytes_accessed": float((cost or {}).get("bytes accessed", float("nan"))),
            "converts": text.count(" convert("),
            "collectives": total,
            "scalar_collectives": of_scalars,
        }


class Measured(Protocol):
    """What `measure_steps` asks of a contender."""

    def run(self) -> None:
        """Takes a step, and waits for it."""

    def costs(self) -> dict[str, float]:
        """What can be counted."""


def measure_steps(
    compiled: Mapping[K, Measured], rounds: int, bases: dict[str, Callable[[K], K]]
) -> dict[K, Row]:
    """Runs training steps by turns.

    Args:
      compiled: what to compare, by name.
      rounds: how often each takes a step, after one that does not count.
      bases: from the name of a ratio to whose time to divide that of a contender by.

    Returns:
      A row for each contender: `seconds` and the ratios, each with its quartiles, and the costs.
    """
    seconds = by_turns({name: c.run for name, c in compiled.items()}, rounds)
    rows: dict[K, Row] = {}
    for name, c in compiled.items():
        rows[name] = {key: ratio(seconds[name], seconds[base(name)]) for key, base in bases.items()}
        rows[name] |= {"seconds": spread(seconds[name])} | c.costs()
    return rows
