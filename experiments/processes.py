"""Several processes as one run: how they find each other, and what they do together."""

import os
import sys
from collections.abc import Callable
from typing import NoReturn

import jax
import numpy as np

from experiments import config
from experiments.errors import FAILURE_STATUS, UsageError

_IN_ORDER = "--xla_cpu_enable_concurrency_optimized_scheduler=false"


def set_up(options: config.Devices) -> None:
    """Makes virtual devices and joins the other processes, before JAX looks for devices.

    Args:
      options: with `virtual_devices`, `processes`, `process_id` and `coordinator`.

    Raises:
      UsageError: if they do not fit together.
    """
    if options.virtual_devices is not None:
        _make_virtual_devices(options.virtual_devices)
    if options.processes == "1":
        return
    if options.processes == "auto":
        try:
            _join(options.coordinator, None, options.process_id)
        except (ValueError, RuntimeError) as e:
            raise UsageError(
                f"--processes auto found no other processes ({str(e).splitlines()[0]}); give --processes N "
                "--process-id I --coordinator HOST:PORT"
            ) from None
        return
    count = int(options.processes) if options.processes.isdecimal() else 0
    if count < 1 or options.process_id is None or options.coordinator is None:
        raise UsageError(
            f"--processes {options.processes} needs --process-id I and --coordinator HOST:PORT as well; "
            "--processes auto asks Cloud TPU, SLURM or MPI for all three"
        )
    if not 0 <= options.process_id < count:
        raise UsageError(f"--process-id must be from 0 to {count - 1}, got {options.process_id}")
    _join(options.coordinator, count, options.process_id)


def is_main() -> bool:
    """Whether this is the process that prints and writes."""
    return jax.process_index() == 0


def any_process(flag: bool) -> bool:
    """Whether the flag is set in any process; all of them wait here for each other."""
    if jax.process_count() == 1:
        return flag
    from jax.experimental import multihost_utils

    return bool(multihost_utils.process_allgather(np.asarray(flag)).any())


def on_main(action: Callable[[], None]) -> None:
    """Does something in process 0, for which the others wait.

    Raises:
      UsageError: in every process, if it does in process 0.
    """
    error: UsageError | None = None
    if is_main():
        try:
            action()
        except UsageError as e:
            error = e
    if any_process(error is not None):
        raise error or UsageError("process 0 says what is wrong")


def give_up(message: str) -> NoReturn:
    """Ends this process at once with a message; JAX would first wait for the others, of which one is gone."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(FAILURE_STATUS)


def _join(coordinator: str | None, count: int | None, process_id: int | None) -> None:
    # On a CPU, XLA starts collectives of one program side by side, which processes then may meet in different
    # orders and wait for each other for ever, once a mesh has several axes.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_IN_ORDER}".strip()
    # `Stop` handles SIGTERM. JAX would otherwise handle it to agree on a step in its own way.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(coordinator, count, process_id)


def _make_virtual_devices(count: int) -> None:
    if count < 1:
        raise UsageError(f"--virtual-devices must be at least 1, got {count}")
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:  # JAX has looked for devices already, as in a test
        if jax.local_device_count() != count:
            raise UsageError(
                f"--virtual-devices {count} comes too late, as JAX has been used: there are "
                f"{jax.local_device_count()}"
            ) from None
