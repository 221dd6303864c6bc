"""The benchmark: every suite runs and writes what it measured. No test asserts a speed."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from promotion import standard_promotion
from tiny import Command

from experiments import bench
from experiments.benchmarks import options, problems, pytorch, steps, timing


def run(suite: str, out: Path, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    with standard_promotion():  # some of the libraries that are compared need it
        assert bench.main([suite, "--quick", "--out", str(out)]) == 0
    assert (out / f"{suite}.png").read_bytes().startswith(b"\x89PNG")
    return json.loads((out / f"{suite}.json").read_text()), capsys.readouterr().out


def names(content: dict[str, Any]) -> set[tuple[str, str]]:
    return {(row["group"], row["name"]) for row in content["rows"]}


def test_loss_scale_compares_with_the_unscaled_step(tmp_path, capsys):
    content, out = run("loss_scale", tmp_path, capsys)
    contenders = {"unscaled, hand-written", "hand-written", "mpjax", "jmp", "Flax"}
    found = {name for _, name in names(content)}
    assert contenders <= found
    assert found <= contenders | {"mpx"}
    assert content["rows"][0]["over unscaled"]["median"] == 1.0
    assert set(content["rows"][0]) > {"seconds", "temp_bytes", "bytes_accessed", "converts"}
    assert out.index("over") < out.index("tempo-")


def test_a_missing_peer_is_left_out_with_a_message(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(steps, "has_mpx", lambda: False)
    content, out = run("loss_scale", tmp_path, capsys)
    assert ("float16", "mpx") not in names(content)
    assert "mpx is left out: it needs pip install -e '.[bench]'" in out


@pytest.mark.slow
def test_gpt_compares_every_precision_with_the_hand_written_one(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(pytorch, "is_there", lambda: False)
    content, out = run("gpt", tmp_path, capsys)
    assert "PyTorch is left out: it needs pip install -e '.[torch]'" in out
    assert names(content) == {
        *(("float32", name) for name in ("mpjax", "hand-written")),
        *((dtype, n) for dtype in ("bfloat16", "float16") for n in ("mpjax", "hand-written", "Flax", "jmp")),
    }
    assert all({"over float32", "over hand-written", "saved_bytes"} <= set(row) for row in content["rows"])
    assert content["machine"]["packages"]["jax"] == jax.__version__


@pytest.mark.slow
@pytest.mark.skipif(not pytorch.is_there(), reason="needs the extra torch")
def test_pytorch_is_measured_over_its_own_float32(tmp_path, capsys):
    content, _ = run("gpt", tmp_path, capsys)
    rows = {row["group"]: row for row in content["rows"] if row["name"] == "PyTorch"}
    assert rows.keys() == {"float32", "bfloat16"}
    assert rows["float32"]["over float32"]["median"] == 1.0 != rows["float32"]["over hand-written"]["median"]
    assert "saved_bytes" not in rows["bfloat16"]


@pytest.mark.slow
@pytest.mark.skipif(not pytorch.is_there(), reason="needs the extra torch")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pytorch_trains_the_gpt_of_the_others(dtype):
    import torch

    suite = options.TINY[options.GPT]
    assert isinstance(suite, options.GPT)
    step, losses = pytorch.Step(suite, dtype), []
    ours = problems.gpt(suite.layers, suite.width, suite.batch, suite.length, suite.vocabulary)
    parameters = sum(p.numel() for p in step._model.parameters())
    assert parameters == sum(x.size for x in jax.tree.leaves(ours.params))
    for _ in range(5):
        step.run()
        losses.append(step.loss)
    assert losses[0] == pytest.approx(np.log(suite.vocabulary), rel=0.05)
    assert losses[-1] < losses[0]
    assert all(p.dtype == torch.float32 for p in step._model.parameters())


@pytest.mark.slow
def test_resnet_compares_with_flax(tmp_path, capsys):
    content, _ = run("resnet", tmp_path, capsys)
    assert all({"over float32", "over Flax"} <= set(row) for row in content["rows"])


@pytest.mark.slow
def test_trace_times_every_stage_and_an_operation_without_a_policy(tmp_path, capsys):
    content, _ = run("trace", tmp_path, capsys)
    stages = ("trace", "lower", "compile", "all")
    for group in ("1 layers", "1 layers, scanned"):
        assert {n for g, n in names(content) if g == group} == {
            f"{c}, {s}" for c in ("Flax", "mpjax") for s in stages
        }
    assert ("one operation, no policy active", "add, added by mpjax") in names(content)


@pytest.mark.slow
def test_scaling_counts_collectives_and_costs_what_it_does_not_run(tmp_path, capsys):
    content, _ = run("scaling", tmp_path, capsys)
    rows = {(row["group"], row["name"]): row for row in content["rows"]}
    assert "seconds" in rows["1e+03 parameters", "mpjax"]
    assert "seconds" not in rows["1e+05 parameters", "mpjax"]
    assert rows["1e+05 parameters", "mpjax"]["bytes over unscaled"] > 0
    for kind in ("replicated", "sharded"):
        bare, mpjax = (rows[f"2 devices, {kind}", name] for name in ("unscaled", "mpjax"))
        # The loss is one; finite flag and norm are reduced together with it or with the gradients.
        assert mpjax["scalar_collectives"] <= bare["scalar_collectives"] == 1
    # The gradients are reduced already, so each device computes the finite flag by itself.
    assert rows["2 devices, replicated", "mpjax"]["collectives"] <= 2


def test_collectives_are_told_from_those_of_scalars_alone() -> None:
    text = """
  %all-reduce.1 = (f32[], f32[8,4]{1,0}, /*index=5*/f32[]) all-reduce(%a, %b, %c), channel_id=1
  %all-reduce.2 = (f32[], pred[]) all-reduce(%d, %e), channel_id=2
  ROOT %r = f32[] all-reduce-start(%f), channel_id=3
  %g = bf16[16]{0} all-gather(%all-reduce.2), channel_id=4
  %done = f32[] all-reduce-done(%r)
"""
    assert timing.collectives(text) == (4, 2)


def test_gpu_asks_for_a_gpu(tmp_path, capsys):
    assert bench.main(["gpu", "--out", str(tmp_path)]) == 2
    assert "the suite gpu needs a GPU" in capsys.readouterr().err


@pytest.mark.slow
def test_gpu_runs_small_without_one(tmp_path, capsys):
    content, _ = run("gpu", tmp_path, capsys)
    assert {"tokens_per_second", "share_of_peak"} <= set(content["rows"][0])


def test_rounds_are_counted_from_one(command: Command):
    assert bench.main(["gpt", "--rounds", "0"]) == 2


def test_contenders_run_by_turns():
    order: list[str] = []
    seconds = timing.by_turns(
        {name: lambda name=name: order.append(name) for name in "ABC"}, rounds=2, warmup=1
    )
    assert order == list("ABC" * 3)
    assert {name: len(values) for name, values in seconds.items()} == {"A": 2, "B": 2, "C": 2}


def test_a_ratio_is_the_median_of_the_ratios_within_each_round():
    ratio = timing.ratio([2.0, 30.0, 2.0], [1.0, 10.0, 1.0])
    assert ratio == {"median": 2.0, "low": 2.0, "high": 2.5}


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_all_contenders_compute_the_same_loss():
    tiny = options.TINY[options.GPT]
    assert isinstance(tiny, options.GPT)
    problem = problems.gpt(tiny.layers, tiny.width, tiny.batch, tiny.length, tiny.vocabulary)
    assert problem.by_hand is not None
    losses = {}
    for c in (
        steps.unscaled(problem, problem.by_hand(jnp.float32), "exact"),
        steps.dynamic_by_hand(problem, problem.by_hand(jnp.float16)),
        steps.mpjax_step(problem, "float16"),
        steps.flax_step(problem, "float16"),
        steps.jmp_step(problem, "float16"),
        *([steps.mpx_step(problem)] if steps.has_mpx() else []),
    ):
        carry, step = c.carry(), jax.jit(c.step)
        for _ in range(3):
            carry, loss = step(carry, problem.batch)
        losses[c.name] = float(loss["loss"] if c.name == "mpjax" else loss)
    scaled_twice = losses.pop("mpx", losses["exact"])  # mpx returns the loss unscaled
    assert losses == pytest.approx(dict.fromkeys(losses, losses["exact"]), rel=2e-3)
    assert scaled_twice == pytest.approx(losses["exact"], rel=2e-3)
