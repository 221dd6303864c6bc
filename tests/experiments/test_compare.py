"""The comparison: what it measures, and its gates."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import mpjax
from experiments import compare, comparison, measure
from experiments.gates import Gate, parse_gates


class Linear:
    """A task with one gradient entry per parameter, equal to the batch's."""

    def __init__(self, policy: str) -> None:
        self.policies = mpjax.as_policy_map(policy)

    def loss(self, params: Any, model_state: None, batch: Any, rng: Any) -> tuple[Any, Any]:
        out = mpjax.full_precision(jnp.sum)(batch @ jnp.diag(params["w"]))
        return out, (model_state, {})


def shares(policy: str, lr: float, gradient: list[float], scale: Any = None) -> dict[str, float]:
    """What a probe measures with weights of 1 and plain gradient descent."""
    task = Linear(policy)
    state = mpjax.TrainState.create(
        apply_fn=None,
        params={"w": jnp.ones(len(gradient))},
        tx=optax.sgd(lr),
        policy=policy,
        loss_scale=scale or mpjax.NoOpLossScale(),
    )
    probe = measure.LossProbe(task, measure.float32_gradients(Linear("float32")))  # type: ignore[arg-type]
    return probe(state, jnp.array([gradient]), jax.random.key(0))


def test_gradients_below_the_range_of_float16_become_zero_without_a_loss_scale() -> None:
    gradient = [1e-9, 1e-9, 1e-3, 0.0, 1.0]  # of the four that are not zero, two vanish
    assert shares("mixed_float16", 0.1, gradient)["zeroed"] == 0.5
    assert shares("mixed_bfloat16", 0.1, gradient)["zeroed"] == 0.0


def test_an_update_below_half_a_unit_in_the_last_place_is_lost_in_16_bit_weights() -> None:
    # Around 1, bfloat16 has steps of 2**-8 downwards and float16 of 2**-11.
    gradient = [1.0, 1.0, 1.0, 100.0]
    assert shares("bfloat16", 1e-3, gradient)["lost"] == 0.75
    assert shares("float16", 1e-3, gradient)["lost"] == 0.0
    assert shares("float16", 1e-4, gradient)["lost"] == 0.75
    assert shares("mixed_bfloat16", 1e-4, gradient)["lost"] == 0.0


def result(loss: float, rate: float, n: int) -> dict[str, Any]:
    sizes = {"param_bytes": n, "optimizer_bytes": n, "activation_bytes": n}
    return sizes | {"val_loss": {"mean": loss}, "rate": {"mean": rate}}


@pytest.mark.parametrize(
    ("gate", "passes", "fails"),
    [
        ("loss=1%", result(1.0099, 1, 1), result(1.0101, 1, 1)),
        ("rate=10%", result(1, 0.91, 1), result(1, 0.89, 1)),
        ("bytes=0%", result(1, 1, 100), result(1, 1, 101)),
        ("bytes=-30%", result(1, 1, 69), result(1, 1, 71)),
        ("loss=1%", result(0.5, 1, 1), result(float("nan"), 1, 1)),
    ],
)
def test_a_gate_holds_a_policy_to_its_distance_from_float32(
    gate: str, passes: dict[str, Any], fails: dict[str, Any]
) -> None:
    (parsed,) = parse_gates([gate])
    float32 = result(1.0, 1.0, 100 if "bytes" in gate else 1)
    assert parsed.failure("mixed", passes, float32) is None
    assert "mixed: " in (parsed.failure("mixed", fails, float32) or "")


def test_a_failure_says_what_was_measured_and_what_was_asked_for() -> None:
    message = Gate("loss", 0.01).failure("bfloat16 mixed", result(1.05, 1, 1), result(1.0, 1, 1))
    assert message == (
        "bfloat16 mixed: loss 1.05 is +5.00% against float32 (1); the gate asks for +1.00% or less"
    )


def test_gates_decide_on_the_exit_status(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    chosen = [c for c in comparison.CONTENDERS if c.name in ("float32", "bfloat16 mixed")]
    monkeypatch.setattr(comparison, "CONTENDERS", chosen)
    run, results = comparison._run_all_seeds, {}

    def run_once(contender: comparison.Contender, *args: Any) -> dict[str, Any]:
        if contender.name not in results:
            results[contender.name] = run(contender, *args)
        return results[contender.name]

    monkeypatch.setattr(comparison, "_run_all_seeds", run_once)
    argv = (
        "resnet --model.stages 1 --model.width 4 --batch-size 8 --warmup-steps 1 --steps 2 "
        f"--eval-every 1 --seeds 2 --out {tmp_path / 'out'} --gate"
    ).split()
    assert compare.main([*argv, "loss=10%", "bytes=0%"]) == 0
    assert "all gates passed" in capsys.readouterr().out

    assert compare.main([*argv, "loss=10%", "bytes=-99%"]) == 1
    output = capsys.readouterr().out
    assert "gate failed: bfloat16 mixed: bytes" in output
    assert "mean ± spread of 2 seeds" in output
    assert (tmp_path / "out" / "compare.png").stat().st_size > 10_000
    written = json.loads((tmp_path / "out" / "results.json").read_text())["results"]
    assert len(written["float32"]["val_loss"]["values"]) == 2
    assert written["float32"]["zeroed"]["mean"] == 0
    activations = [r["activation_bytes"] for r in written.values()]
    assert activations[1] < activations[0]
