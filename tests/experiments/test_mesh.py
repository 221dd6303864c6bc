"""The same run on one device, on several, and in several processes."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from tiny import TINY_GPT, Command

from experiments.placement import Placement, make_mesh
from experiments.processes import any_process, on_main

RUN = [*TINY_GPT, "--batch-size", "8", "--steps", "6", "--policy", "float32"]
# Sums in another order: relative, on the loss of any of six steps.
REDUCTION_NOISE = 2e-6


def losses(directory: Path) -> np.ndarray:
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return np.array([json.loads(line)["loss"] for line in lines])


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    from experiments import train

    out = tmp_path_factory.mktemp("one")
    assert train.main([*RUN, "--out", str(out)]) == 0
    return losses(out)


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param("data=4", marks=pytest.mark.slow),  # as two processes have it below
        "data=2,model=2",
        pytest.param("fsdp=4", marks=pytest.mark.slow),
    ],
)
def test_a_mesh_gives_the_curve_of_one_device(mesh: str, command: Command, one_device: np.ndarray) -> None:
    run = command(*RUN, "--mesh", mesh)
    assert run.status == 0
    assert f"mesh {mesh}" in run.output
    np.testing.assert_allclose(losses(run.directory), one_device, rtol=REDUCTION_NOISE)


def test_a_run_goes_on_on_another_mesh(command: Command, one_device: np.ndarray) -> None:
    first = command(*RUN, "--mesh", "data=2,model=2")
    (first.directory / "checkpoints" / "6").rename(first.directory / "checkpoints" / "6.gone")
    resumed = command(*RUN, "--mesh", "fsdp=4")
    assert "going on after step 4 of 6" in resumed.output
    np.testing.assert_allclose(losses(resumed.directory), one_device, rtol=REDUCTION_NOISE)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_two_processes_of_two_devices_give_the_curve_of_one_and_only_the_first_writes(
    tmp_path: Path, one_device: np.ndarray
) -> None:
    options = ["--virtual-devices", "2", "--processes", "2", "--coordinator", f"127.0.0.1:{free_port()}"]
    command = [
        sys.executable,
        "-m",
        "experiments.train",
        *RUN,
        *options,
        "--out",
        str(tmp_path),
        "--process-id",
    ]
    both = [
        subprocess.Popen(
            [*command, str(i)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=QUICK
        )
        for i in range(2)
    ]
    (out, error), (silent, _) = (p.communicate(timeout=300) for p in both)
    assert [p.returncode for p in both] == [0, 0], error
    assert "mesh data=4" in out
    assert not [line for line in silent.splitlines() if not line.startswith("[Gloo]")]
    np.testing.assert_allclose(losses(tmp_path), one_device, rtol=REDUCTION_NOISE)


QUICK = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


def test_parameters_are_cut_along_their_largest_axes_and_moments_like_them() -> None:
    placement = Placement(make_mesh("fsdp=2,model=2", 4, 1))
    params = {
        "wide": np.zeros((4, 6)),
        "tall": np.zeros((7, 2)),
        "bias": np.zeros(4),
        "odd": np.zeros((3, 3)),
    }
    placed = placement.state({"params": params, "moments": params})
    wanted = {"wide": P("model", "fsdp"), "tall": P(None, "fsdp"), "bias": P(), "odd": P(None, None)}
    for tree in placed.values():
        assert {name: x.sharding.spec for name, x in tree.items()} == wanted


def test_a_batch_is_cut_over_data_and_fsdp() -> None:
    class Task:
        batch_size = 8

        def batch(self, seed: int, step: int, rows: np.ndarray) -> np.ndarray:
            return np.arange(100, 108)[rows]

    placement = Placement(make_mesh("data=2,fsdp=2", 8, 1))
    batch = placement.batch(Task(), 0, 0)  # type: ignore[arg-type]
    assert batch.sharding.spec == P(("data", "fsdp"))
    np.testing.assert_array_equal(batch, np.arange(100, 108))


def test_without_a_mesh_everything_stays_as_it_is() -> None:
    placement, state = Placement(make_mesh("", 4, 1)), {"w": np.zeros(3)}
    assert placement.mesh is None
    assert placement.state(state) is placement.gathered(state) is state
    assert placement.shardings(state) is None


def test_alone_a_process_agrees_with_itself() -> None:
    assert any_process(True)
    assert not any_process(False)
    done: list[int] = []
    on_main(lambda: done.append(1))
    assert done == [1]
