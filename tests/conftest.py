"""What every test runs under."""

import gc
import os
import pathlib
from collections.abc import Iterator

import hypothesis
import jax
import promotion
import pytest

# Tables are as wide as the terminal, which the workers of a parallel run do not have.
os.environ["COLUMNS"] = "120"

# Before anything asks for a device: replicas are tested on several, which share the cores of this machine.
jax.config.update("jax_num_cpu_devices", 8)

# With the older of XLA's two ways to emit loops a program compiles in half the time. Newer releases, which may not
# know the flag, compile as for users.
if jax.__version_info__ < (0, 11):
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_use_fusion_emitters=false")

# Most of the time goes into compiling small programs, many of them the same. They are compiled with little
# optimization, but where that is what is tested, which takes `optimized_programs`.
jax.config.update("jax_disable_most_optimizations", True)
jax.config.update(
    "jax_compilation_cache_dir", str(pathlib.Path(__file__).parent.parent / ".pytest_cache" / "jax")
)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)

# A silent upcast between arrays, or a silent broadcast to another rank, is an error; but not in what optax computes,
# which raises floats to the power of integers and adds to parameters of one dtype updates of another.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
promotion.use_standard_promotion_in_optax()

# What is alive by now stays, and what a traced program leaves behind does not press.
gc.freeze()
gc.set_threshold(20_000, 20, 20)

hypothesis.settings.register_profile(
    "mpjax",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=30,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("mpjax")


@pytest.fixture
def optimized_programs() -> Iterator[None]:
    """Compiles as users do."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def standard_promotion() -> Iterator[None]:
    """JAX's standard promotion, which users have, for tests of code that mixes dtypes and ranks on purpose."""
    with promotion.standard_promotion():
        yield
