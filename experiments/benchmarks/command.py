"""Runs a suite, prints its results and writes them to files."""

import dataclasses
import importlib.metadata
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import tyro
from rich.console import Console

from experiments.benchmarks import gpu, options, show, suites
from experiments.benchmarks.timing import Row
from experiments.errors import UsageError
from experiments.rundir import write_json
from mpjax._precision import cpu_lowering

RUN: dict[type[options.Suite], Callable[..., list[Row]]] = {
    options.LossScale: suites.loss_scale,
    options.GPT: suites.gpt,
    options.ResNet: suites.resnet,
    options.Trace: suites.trace,
    options.Scaling: suites.scaling,
    options.GPU: gpu.gpu,
}
PACKAGES = ("mpjax", "jax", "flax", "optax", "jmp", "mixed-precision-for-JAX", "torch")


def bench(argv: Sequence[str], description: str) -> int:
    """Runs a suite and returns the exit status.

    Args:
      argv: the command line after the program's name.
      description: what `--help` says first.
    """
    suite = _parse(argv, description)
    if isinstance(suite, options.Scaling):
        _ask_for_devices(max(suite.devices))
    console = Console()
    rows = RUN[type(suite)](
        suite, lambda text: console.print(text, style="dim", highlight=False, markup=False)
    )
    name = next(name for name, cls in options.SUITES.items() if type(suite) is cls)
    content = {"suite": name, "options": dataclasses.asdict(suite), "machine": machine(), "rows": rows}
    _show(show.to_json(content), suite.out, console)
    return 0


def _parse(argv: Sequence[str], description: str) -> options.Suite:
    """The suite that the command line asks for, with its options."""
    prog = "python -m experiments.bench"
    suite = tyro.extras.subcommand_cli_from_dict(
        options.SUITES, args=list(argv), prog=prog, description=description
    )
    if suite.rounds < 1:
        raise UsageError(f"--rounds must be at least 1, got {suite.rounds}")
    if suite.out.exists() and not suite.out.is_dir():
        raise UsageError(f"--out '{suite.out}' is a file; give a directory")
    if suite.quick:
        return dataclasses.replace(options.TINY[type(suite)], out=suite.out, quick=True)
    return suite


def _show(content: dict[str, Any], out: Path, console: Console) -> None:
    """Writes SUITE.json and SUITE.png, and prints the tables."""
    name = content["suite"]
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / f"{name}.json", content)
    show.plot(content, out / f"{name}.png")
    for table in show.tables(content):
        console.print(table)
    where = f"Picture and numbers: {out}/{name}.png and {name}.json"
    console.print(where, highlight=False, soft_wrap=True)


def machine() -> dict[str, Any]:
    """What the figures depend on besides the code."""
    return {
        "backend": jax.default_backend(),
        "device": jax.devices()[0].device_kind,
        "processor": _processor(),
        "devices": jax.device_count(),
        "native bfloat16": cpu_lowering.has_native_bfloat16(),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
    }


def _ask_for_devices(count: int) -> None:
    """Virtual devices, if JAX has not been started with others."""
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:  # JAX runs already, with the devices it has
        return


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} × {names[0]}" if names else platform.processor()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
