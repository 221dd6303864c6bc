"""What the tests of the experiments share."""

from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from tiny import Command


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    return Command(capsys, tmp_path)


@pytest.fixture(scope="session", autouse=True)
def quick_compilation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compiles with little optimization, and each program once, as most tests train the same models."""
    before = {name: jax.config.values[name] for name in _COMPILATION}
    for name, value in _COMPILATION.items():
        jax.config.update(name, value)
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("compiled")))
    yield
    for name, value in before.items():
        jax.config.update(name, value)


_COMPILATION = {
    "jax_disable_most_optimizations": True,
    "jax_persistent_cache_min_compile_time_secs": 0.2,
    "jax_compilation_cache_dir": None,
}
