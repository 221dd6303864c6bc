"""The same run on one device and on several."""

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from tiny import EIGHT_ROWS, REDUCTION_NOISE, Command, losses

from experiments.placement import Placement, make_mesh

RUN = [*EIGHT_ROWS, "--steps", "6"]


@pytest.mark.slow  # as the run below and that in two processes are on such meshes
@pytest.mark.parametrize("mesh", ["data=4", "data=2,model=2", "fsdp=4"])
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


def test_without_a_mesh_everything_is_unchanged() -> None:
    placement, state = Placement(make_mesh("", 4, 1)), {"w": np.zeros(3)}
    assert placement.mesh is None
    assert placement.state(state) is placement.gathered(state) is state
    assert placement.shardings(state) is None
