"""Checkpoints: what comes back, what is refused, what survives damage."""

import builtins
import json
import os
import re
import resource
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import mpjax
from mpjax._training import manifest
from mpjax.checkpoint import CheckpointError, Checkpoints, CheckpointWarning

MODEL = nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(4)])
TX = optax.adamw(0.1)


def create(policy: Any = "mixed_float16", seed: int = 0, **kwargs: Any) -> mpjax.TrainState:
    params = MODEL.init(jax.random.key(seed), jnp.ones((1, 8)))["params"]
    return mpjax.TrainState.create(apply_fn=None, params=params, tx=TX, policy=policy, **kwargs)


def loss_fn(params: Any, batch: Any, rng: Any) -> Any:
    return jnp.mean((MODEL.apply({"params": params}, batch).astype(jnp.float32) - 1) ** 2)


STEP = jax.jit(mpjax.make_train_step(loss_fn), donate_argnums=0)
BATCH = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)


def trained(steps: int = 2, **kwargs: Any) -> mpjax.TrainState:
    state = create(**kwargs)
    for _ in range(steps):
        state, _ = STEP(state, BATCH)
    return state


def save(directory: Path, state: Any, *steps: int, **kwargs: Any) -> Checkpoints:
    checkpoints = Checkpoints(directory)
    for step in steps or (None,):
        checkpoints.save(state, step=step, **kwargs)
        checkpoints.wait()
    return checkpoints


def assert_identical(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert isinstance(x, jax.Array)
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        np.testing.assert_array_equal(x, y)


def test_a_state_comes_back_bit_identical_with_the_limits_of_its_loss_scale(tmp_path: Path) -> None:
    scale = mpjax.DynamicLossScale(256.0, 17, 19, 4, 2.0**-10, 2.0**20, 2)
    state = trained(loss_scale=scale, model_state={"seen": jnp.arange(3)})
    with save(tmp_path, state) as checkpoints:
        other = create(seed=1, model_state={"seen": jnp.zeros(3, int)})
        restored, _ = checkpoints.restore(other)
    assert_identical(restored, state)
    assert (float(restored.loss_scale.loss_scale), int(restored.loss_scale.counter)) == (1024.0, 0)
    assert restored.loss_scale.min_loss_scale == 2.0**-10
    before, after = STEP(restored, BATCH), STEP(state, BATCH)
    assert_identical(before, after)


def test_keys_numbers_and_numpy_arrays_beside_the_state_come_back_as_what_they_were(tmp_path: Path) -> None:
    extra = {
        "rng": jax.random.split(jax.random.key(7, impl="rbg"), 2),
        "position": 2**40,
        "shuffle": np.arange(3, dtype=np.int64) + 2**40,
        "name": "part-3",
    }
    blank = {
        "rng": jax.random.split(jax.random.key(0, impl="rbg"), 2),
        "position": 0,
        "shuffle": np.zeros(3, np.int64),
        "name": "",
    }
    with save(tmp_path, create(), extra=extra) as checkpoints:
        _, restored = checkpoints.restore(create(), extra=blank)
        assert checkpoints.restore(create())[1] is None
    assert restored["rng"].dtype == extra["rng"].dtype
    assert (jax.random.bits(restored["rng"][1]) == jax.random.bits(extra["rng"][1])).all()
    assert (restored["position"], restored["name"]) == (2**40, "part-3")
    assert isinstance(restored["shuffle"], np.ndarray)
    np.testing.assert_array_equal(restored["shuffle"], extra["shuffle"])


def test_a_state_may_be_donated_as_soon_as_save_returns(tmp_path: Path) -> None:
    state = trained()
    wanted = jax.device_get(state)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state)
        for _ in range(5):
            state, _ = STEP(state, BATCH)
        checkpoints.wait()
        restored, _ = checkpoints.restore(create())
    jax.tree.map(np.testing.assert_array_equal, restored, wanted)


def test_the_last_ones_and_the_best_are_kept(tmp_path: Path) -> None:
    losses = {1: 0.9, 2: 0.1, 3: 0.5, 4: float("nan"), 5: 0.7, 6: None}
    with Checkpoints(tmp_path, keep=2, keep_best=1, metric="val_loss") as checkpoints:
        for step, loss in losses.items():
            metrics = {} if loss is None else {"val_loss": loss}
            checkpoints.save({"w": jnp.ones(2)}, step=step, metrics=metrics)
        checkpoints.wait()
        assert (checkpoints.steps, checkpoints.best, checkpoints.latest) == ([2, 5, 6], 2, 6)
        assert checkpoints.info(2).metrics == {"val_loss": 0.1}
    with Checkpoints(tmp_path, mode="max", metric="val_loss") as checkpoints:
        assert checkpoints.best == 5


def test_equal_bests_the_later_is_retained_and_checkpoints_without_the_metric_never_are(
    tmp_path: Path,
) -> None:
    with Checkpoints(tmp_path, keep=1, keep_best=2) as checkpoints:
        for step, metrics in {
            1: {"loss": 0.5},
            2: {},
            3: {"loss": 0.5},
            4: {"loss": 0.5},
            5: {},
            6: {},
        }.items():
            checkpoints.save({"w": jnp.ones(2)}, step=step, metrics=metrics)
        checkpoints.wait()
        assert (checkpoints.steps, checkpoints.best) == ([3, 4, 6], 4)


def test_a_checkpoint_of_format_1_is_read_whoever_wrote_it(tmp_path: Path) -> None:
    import orbax.checkpoint as ocp

    found = {
        "params/w": np.asarray([1.0, -2.0], np.float32),
        "loss_scale/loss_scale": np.asarray(64.0, np.float32),
    }
    found["loss_scale/counter"] = np.asarray(3, np.int32)
    sums = {"params/w": 383, "loss_scale/loss_scale": 194, "loss_scale/counter": 3}
    leaves = {
        name: {"shape": list(x.shape), "dtype": str(x.dtype), "sum": sums[name]} for name, x in found.items()
    }
    settings = {
        "period": 2000,
        "factor": 2,
        "min_loss_scale": 1.0,
        "max_loss_scale": 2.0**20,
        "hysteresis": 1,
    }
    text = {
        "format": 1,
        "policy": None,
        "loss_scales": {"loss_scale": {"kind": "DynamicLossScale", **settings}},
        "metrics": {"loss": 0.5},
        "notes": {},
        "leaves": leaves | {"extra:position": {"value": 7}},
    }
    args = ocp.args.Composite(state=ocp.args.PyTreeSave(found), mpjax=ocp.args.JsonSave(text))
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as writer:
        writer.save(tmp_path / "5", args=args)
    state = {"params": {"w": jnp.zeros(2)}, "loss_scale": mpjax.DynamicLossScale(2.0)}
    with Checkpoints(tmp_path) as checkpoints:
        restored, extra = checkpoints.restore(state, extra={"position": 0})
        assert checkpoints.info(5).metrics == {"loss": 0.5}
    assert restored["params"]["w"].tolist() == [1.0, -2.0]
    scale = restored["loss_scale"]
    assert (float(scale.loss_scale), int(scale.counter), scale.max_loss_scale) == (64.0, 3, 2.0**20)
    assert extra == {"position": 7}


def mesh(*shape: int) -> Mesh:
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, ("data", "model")[: len(shape)])


def sharded(state: Any, mesh: Mesh) -> Any:
    def place(x: Any) -> Any:
        spec = P(None, mesh.axis_names[-1]) if x.ndim == 2 else P()
        return jax.device_put(x, NamedSharding(mesh, spec))

    return jax.tree.map(place, state)


def test_a_sharded_state_is_restored_on_another_mesh_and_on_one_device(tmp_path: Path) -> None:
    state = trained()
    with save(tmp_path, sharded(state, mesh(2, 2))) as checkpoints:
        for template in (sharded(create(seed=1), mesh(4)), create(seed=1)):
            restored, _ = checkpoints.restore(template)
            assert_identical(restored, state)
            for x, wanted in zip(jax.tree.leaves(restored), jax.tree.leaves(template), strict=True):
                assert x.sharding.is_equivalent_to(wanted.sharding, x.ndim)


def test_a_restored_state_runs_in_the_program_compiled_for_a_new_one(tmp_path: Path) -> None:
    new, extra = create(), {"rng": jax.random.key(0), "seed": jax.random.PRNGKey(1)}
    step = jax.jit(lambda state, extra: (state.replace(step=state.step + 1), extra))
    step(new, extra)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(new, extra=extra)
        restored = checkpoints.restore(new, extra=extra)
        abstract = checkpoints.restore(jax.eval_shape(create), extra=jax.eval_shape(lambda: extra))
    for found in restored, abstract:
        assert not any(x.committed for x in jax.tree.leaves(found))
        step(*found)
    assert step._cache_size() == 1

    # Elsewhere it goes along, as a new one does.
    batch = jax.device_put(jnp.ones(4, jnp.int32), jax.devices()[1])
    assert (restored[0].step + batch).devices() == {jax.devices()[1]}


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "int32", "float16", "bfloat16", "float32", "float8_e4m3fn", "complex64"]
)
def test_the_sum_of_an_arrays_bytes_is_the_same_on_the_host_and_on_devices(dtype: str) -> None:
    x = jnp.arange(-12, 12).reshape(4, 6).astype(dtype)
    spread = jax.device_put(x, NamedSharding(mesh(2, 2), P("data", "model")))
    on_devices = manifest._sums_on_device({"x": spread})["x"]
    assert int(on_devices) == manifest._sum_on_host(x) == manifest._sum_on_host(np.asarray(x)) > 0


def test_an_abstract_state_is_enough_to_restore_into(tmp_path: Path) -> None:
    state = trained()
    with save(tmp_path, state) as checkpoints:
        restored, _ = checkpoints.restore(jax.eval_shape(create))
    assert_identical(restored, state)


def test_another_policy_is_refused_and_gone_on_with_on_request(tmp_path: Path) -> None:
    with save(tmp_path, trained(policy="float32")) as checkpoints:
        with pytest.raises(CheckpointError) as e:
            checkpoints.restore(create("bfloat16"))
        assert "was trained under the policy 'p=full,c=full,o=full', this state has 'p=bf16,c=bf16" in str(
            e.value
        )
        assert "'params/layers_0/bias' is float32 there and bfloat16 here" in str(e.value)
        assert "or go on under the second with cast=True" in str(e.value)
        restored, _ = checkpoints.restore(create("bfloat16"), cast=True)
    assert {x.dtype for x in jax.tree.leaves(restored.params)} == {np.dtype(jnp.bfloat16)}
    assert restored.policy == mpjax.as_policy_map("bfloat16")


def test_a_map_of_policies_is_compared_module_by_module(tmp_path: Path) -> None:
    policies = mpjax.PolicyMap({"layers_0": "float32", nn.LayerNorm: "bf16"}, default="mixed_bfloat16")
    with save(tmp_path, create(policies)) as checkpoints:
        checkpoints.restore(create(policies))
        with pytest.raises(CheckpointError, match="was trained under the policy 'layers_0: p=full"):
            checkpoints.restore(create("mixed_bfloat16"))
        assert checkpoints.info(0).policy == policies


def test_dtypes_that_differ_under_the_same_policy_are_listed_leaf_by_leaf(tmp_path: Path) -> None:
    state = create("mixed_bfloat16")
    narrow = state.replace(params=mpjax.cast_params(state.params, "bfloat16"))
    with save(tmp_path, narrow) as checkpoints:
        with pytest.raises(CheckpointError) as e:
            checkpoints.restore(state)
        assert "holds other dtypes than this state: 'params/layers_0/bias' is bfloat16 there" in str(e.value)
        with pytest.raises(CheckpointError, match="'layers_0/bias' is bfloat16, its policy stores float32"):
            checkpoints.restore(narrow)
        restored, _ = checkpoints.restore(state, cast=True)
    assert {x.dtype for x in jax.tree.leaves(restored.params)} == {np.dtype(jnp.float32)}


def test_a_cast_to_another_kind_of_loss_scale_keeps_the_states_own(tmp_path: Path) -> None:
    with save(tmp_path, trained(policy="mixed_float16")) as checkpoints:
        with pytest.raises(CheckpointError, match="was trained under the policy"):
            checkpoints.restore(create("float32"))
        restored, _ = checkpoints.restore(create("float32"), cast=True)
        assert restored.loss_scale == mpjax.NoOpLossScale()
        with pytest.raises(CheckpointError) as e:
            checkpoints.restore(create("mixed_float16", loss_scale=mpjax.StaticLossScale(8)))
    assert "has a DynamicLossScale at 'loss_scale', this state a StaticLossScale" in str(e.value)


def test_another_models_leaves_are_listed(tmp_path: Path) -> None:
    checkpoints = save(tmp_path, {"a": jnp.ones(2), "b": jnp.ones(3), "c": jnp.ones(1, int)}, 1)
    with checkpoints, pytest.raises(CheckpointError) as e:
        checkpoints.restore({"a": jnp.ones(2), "b": jnp.ones(4), "c": jnp.ones(1), "d": jnp.ones(1)})
    assert (
        "is of another model or optimizer: 'd' is not in the checkpoint; 'b' has shape [3] there and [4] here; "
        "'c' is int32 there and float32 here. Make the state as it was"
    ) in str(e.value)


def test_a_scale_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    bad = create().replace(loss_scale=mpjax.DynamicLossScale(jnp.float32(np.nan)))
    with (
        save(tmp_path, bad) as checkpoints,
        pytest.raises(CheckpointError, match="loss_scale must be a positive finite number, got nan"),
    ):
        checkpoints.restore(create())


def largest_file(directory: Path) -> Path:
    return max((p for p in directory.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def truncate(directory: Path) -> None:
    path = largest_file(directory / "state" / "ocdbt.process_0")
    os.truncate(path, path.stat().st_size // 2)


def flip_a_bit(directory: Path) -> None:
    path = largest_file(directory / "state" / "ocdbt.process_0")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def empty_the_manifest(directory: Path) -> None:
    (directory / "mpjax" / "metadata").write_text("")


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, empty_the_manifest])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(damage: Any, tmp_path: Path) -> None:
    first = {"w": jax.random.normal(jax.random.key(0), (100, 100))}
    save(tmp_path, first, 1).close()
    save(tmp_path, {"w": first["w"] + 1}, 2).close()
    damage(tmp_path / "2")
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.warns(CheckpointWarning, match=r"step 2 in .* is damaged: .* Going back to step 1"):
            restored, _ = checkpoints.restore(first)
        assert_identical(restored, first)
        assert checkpoints.steps == [1]
        assert (tmp_path / "2.damaged").exists()


def test_when_every_checkpoint_is_damaged_each_is_named(tmp_path: Path) -> None:
    with save(tmp_path, {"w": jnp.ones(3)}, 1) as checkpoints:
        empty_the_manifest(tmp_path / "1")
        with pytest.raises(CheckpointError, match=r"step 1 in .* is damaged.* no other to go back to"):
            checkpoints.restore({"w": jnp.ones(3)})
        assert checkpoints.steps == [1]


def test_a_half_written_checkpoint_is_none(tmp_path: Path) -> None:
    with save(tmp_path, {"w": jnp.ones(3)}, 1):
        pass
    (tmp_path / "1").rename(tmp_path / "2.orbax-checkpoint-tmp")
    (tmp_path / "3.deleted").mkdir()
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest is None
        checkpoints.save({"w": jnp.ones(3)}, step=4)
        checkpoints.wait()
    assert [p.name for p in tmp_path.iterdir()] == ["4"]


# The other writes that tensorstore had begun end after orbax has closed the loop they report to.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_full_disk_is_a_warning_and_leaves_older_checkpoints_whole(tmp_path: Path) -> None:
    big = {"w": jax.random.normal(jax.random.key(0), (200, 200))}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with save(tmp_path, big, 1) as checkpoints:
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (50_000, limits[1])
        )  # bytes; as on a full disk, writes fail
        try:
            checkpoints.save(big, step=2)
            with (
                pytest.warns(CheckpointWarning, match="step 2 could not be saved"),
                pytest.raises(
                    CheckpointError, match=r"File too large.* The last one that is whole is of step 1"
                ),
            ):
                checkpoints.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert checkpoints.steps == [1]
        checkpoints.save(big, step=3)
        checkpoints.wait()
        assert checkpoints.steps == [1, 3]
        assert_identical(checkpoints.restore(big)[0], big)


def test_later_checkpoints_can_be_dropped_to_go_on_from_an_earlier_one(tmp_path: Path) -> None:
    with save(tmp_path, {"w": jnp.ones(3)}, 1, 2, 3) as checkpoints:
        checkpoints.drop_after(1)
        assert checkpoints.steps == [1]


def test_a_checkpoint_of_a_newer_format_names_the_way_out(tmp_path: Path) -> None:
    with save(tmp_path, {"w": jnp.ones(3)}, 1) as checkpoints:
        path = tmp_path / "1" / "mpjax" / "metadata"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 2}))
        with pytest.raises(
            CheckpointError, match=r"written by a newer mpjax, in format 2; this one reads up to 1"
        ):
            checkpoints.restore({"w": jnp.ones(3)})


def test_a_directory_that_is_a_file_or_cannot_be_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file' is a file; give a directory"):
        Checkpoints(tmp_path / "file")

    def denied(path: Any) -> Any:  # root may read everything, so that no mode would do
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "listdir", denied)
    monkeypatch.setattr(Path, "iterdir", denied)
    with pytest.raises(CheckpointError, match=r"cannot be read \(Permission denied\)"):
        Checkpoints(tmp_path)


def test_an_empty_directory_has_nothing_to_restore(tmp_path: Path) -> None:
    with Checkpoints(tmp_path / "none") as checkpoints:
        assert checkpoints.latest is None
        with pytest.raises(CheckpointError, match="There is no checkpoint in"):
            checkpoints.restore({"w": jnp.ones(3)})
    assert not (tmp_path / "none").exists()


def test_a_missing_orbax_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_orbax(name: str, *args: Any) -> Any:
        if name.startswith("orbax"):
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", without_orbax)
    with pytest.raises(ImportError, match=r"needs orbax-checkpoint; run pip install 'mpjax\[checkpoint\]'"):
        Checkpoints(tmp_path)


@pytest.mark.usefixtures("standard_promotion")  # as users run it
def test_the_code_of_the_page_on_checkpoints_runs_from_top_to_bottom(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = Path(__file__).parent.parent / "docs" / "checkpoints.md"
    namespace: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        exec(block, namespace)
    printed = capsys.readouterr().out
    assert printed.startswith("[2, 3, 4] p=full,c=f16,o=full\n")
    assert (
        "was trained under the policy 'p=full,c=f16,o=full', this state has 'p=bf16,c=bf16,o=bf16'" in printed
    )
    assert "Training diverged at step 1: the loss is inf.\nNot finite: 'gradient/w'" in printed
