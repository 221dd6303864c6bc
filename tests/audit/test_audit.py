"""`mpjax.audit` reads a traced program: what runs where, how often, in which precision."""

import importlib
import json
import linecache
import pathlib
import re
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.experimental import pallas as pl

import mpjax
from experiments import config, loop, tasks
from mpjax._audit import read_jaxpr as reading
from mpjax._audit import report
from mpjax._audit import stablehlo as lowering
from mpjax._audit.audit import audit
from mpjax._audit.result import Lowering

BF16 = "p=f32,c=bf16,o=f32"
POLICIES = ("float32", BF16, "p=f32,c=f16,o=f32")


def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


W, X = array(16, 16), array(8, 16)
ONE = 2 * 8 * 16 * 16
"""FLOPs of the matmul of X and W."""


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return nn.LayerNorm(name="norm")(nn.Dense(16, name="dense")(x)), None


class Model(nn.Module):
    scanned: bool = False
    layers: int = 2

    @nn.compact
    def __call__(self, x):
        if self.scanned:
            x = nn.Dense(16, name="embed")(x)  # so that the carry starts in the compute dtype
            split = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            x, _ = nn.scan(nn.remat(Block), length=self.layers, **split)(name="blocks")(x, None)
        else:
            for i in range(self.layers):
                x, _ = Block(name=f"block_{i}")(x)
        return nn.Dense(4, name="head")(x)


def train_step(policy: Any, model: nn.Module | None = None, dtype: Any = jnp.float32) -> tuple[Any, Any]:
    """A train step of a linen model, and its arguments."""
    model = model or Model()
    x = array(8, 16, dtype=dtype)

    def make_state():
        params = model.init(jax.random.key(0), jnp.zeros(x.shape, x.dtype))
        return mpjax.TrainState.create(
            apply_fn=model.apply, params=params, tx=optax.adamw(1e-3), policy=policy
        )

    def loss_fn(params, batch, rng):
        return jnp.mean(model.apply(params, batch) ** 2)

    return mpjax.make_train_step(loss_fn), (jax.eval_shape(make_state), x)


def matmuls(found: Any) -> dict[tuple[str, str], tuple[str, int]]:
    """From module and phase to operands and count."""
    return {(m.module, m.phase): (m.operands, m.count) for m in found.matmuls}


# ------------------------------------------------------------------------------------- what is counted


def test_flops_of_matmuls_agree_with_xla_within_a_percent():
    def f(a, b, c):
        return jnp.einsum("bij,jk->bik", a, b) @ c

    args = (array(4, 32, 64), array(64, 48), array(4, 48, 16))
    analysis = jax.jit(f).lower(*args).compile().cost_analysis()
    assert audit(f, *args).total_flops == pytest.approx(analysis["flops"], rel=0.01)


def test_flops_of_a_convolution_are_two_for_each_number_of_the_input_that_the_kernel_meets():
    def conv(x, kernel):
        return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    assert audit(conv, array(2, 8, 8, 3), array(3, 3, 3, 5)).total_flops == 2 * (2 * 3 * 5) * (8 + 7 + 7) ** 2


def test_a_matmul_in_a_scan_counts_once_for_each_step():
    def f(x, w):
        return lax.scan(lambda h, _: (h @ w, None), x, None, length=7)[0]

    (found,) = audit(f, X, W).matmuls
    assert (found.count, found.flops) == (7, 7 * ONE)


def test_a_loop_with_a_known_number_of_steps_counts_them():
    def f(x, w):
        return lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, c[1] @ w), (0, x))[1]

    assert audit(f, X, W).total_flops == 5 * ONE


@jax.custom_vjp
def custom(x, w):
    return x @ w


custom.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, ct: (ct @ saved[1].T, saved[0].T @ ct))


def in_a_kernel(x, w):
    def kernel(x_ref, w_ref, o_ref):
        o_ref[...] = x_ref[...] @ w_ref[...]

    return pl.pallas_call(kernel, jax.ShapeDtypeStruct((8, 16), x.dtype))(x, w)


def sharded(x, w):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    return jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(spec("data"), spec()), out_specs=spec("data"))(x, w)


@pytest.mark.parametrize(
    ("fn", "times"),
    [
        (jax.jit(lambda x, w: jax.jit(jnp.matmul)(x, w) @ w), 2),
        (jax.checkpoint(lambda x, w: x @ w), 1),
        (jax.grad(lambda x, w: jax.checkpoint(lambda x: jnp.sin(x @ w))(x).sum()), 2),
        (lambda x, w: lax.cond(x[0, 0] > 0, lambda x: x @ w, lambda x: x, x), 1),
        (custom, 1),
        (jax.grad(lambda x, w: custom(x, w).sum(), argnums=(0, 1)), 2),
        (sharded, 1),
        (in_a_kernel, 0),
        (lambda x, w: (x @ w, x)[1], 0),
    ],
    ids=[
        "jit",
        "remat",
        "gradient of remat",
        "cond",
        "custom",
        "gradient of custom",
        "shards",
        "pallas",
        "dead",
    ],
)
def test_every_inner_program_is_read_and_a_kernel_is_opaque(fn, times):
    assert audit(fn, X, W).total_flops == times * ONE


def test_reading_a_scanned_model_takes_as_many_operations_for_96_layers_as_for_4():
    def size(layers: int) -> int:
        fn, args = train_step(BF16, Model(scanned=True, layers=layers))
        return len(reading.read(fn, args).ops)

    assert size(96) == size(4)


def test_nothing_runs():
    ran = []

    def f(x):
        jax.debug.callback(lambda x: ran.append(x), x)
        return x @ x

    assert audit(jax.jit(f), jnp.ones((4, 4))).total_flops == 128
    assert not ran


def test_casts_count_with_the_bytes_that_they_write():
    found = audit(lambda x, w: x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16), X, W)
    assert [(c.before, c.after, c.count, c.bytes) for c in found.casts] == [
        ("float32", "bfloat16", 2, 2 * (8 * 16 + 16 * 16))
    ]


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_what_the_forward_pass_saves_is_counted_in_its_dtype(dtype, size):
    def loss(w, x):
        return jnp.mean(jnp.sin(x @ w.astype(x.dtype)).astype(jnp.float32))

    # The cosine of the matmul; its operands are an input and a cast that the gradient of w does not need.
    assert audit(jax.grad(loss), W, array(8, 16, dtype=dtype)).saved_bytes == {dtype: 8 * 16 * size}


# ------------------------------------------------------------------------------------- modules and phases


def test_operations_belong_to_the_paths_that_a_policy_map_matches():
    found = audit(*unpacked(train_step(BF16)))
    assert matmuls(found) == {
        (module, phase): ("bfloat16", count)
        for module, backward in [("block_0/dense", 1), ("block_1/dense", 2), ("head", 2)]
        for phase, count in [("forward", 1), ("backward", backward)]
    }


def test_the_body_of_a_scan_belongs_to_the_module_that_is_scanned():
    found = audit(*unpacked(train_step(BF16, Model(scanned=True, layers=3))))
    assert matmuls(found)["blocks/dense", "forward"] == ("bfloat16", 3)
    # The forward matmul again, as it is rematerialised, and two of its own.
    assert matmuls(found)["blocks/dense", "backward"] == ("bfloat16", 9)
    assert not found.at_least("warning")


def test_weight_decay_and_moments_are_the_optimizers():
    counts = {(m, phase): n for m, phase, n in audit(*unpacked(train_step(BF16))).operations}
    assert counts["", "optimizer"] > 100
    assert ("", "forward") not in counts or counts["", "forward"] < 20


def nnx_step():
    model = nnx.Sequential(nnx.Linear(16, 8, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(8, 4, rngs=nnx.Rngs(1)))
    model = mpjax.nnx.apply_policy(model, BF16)
    optimizer = mpjax.nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        def loss_fn(model, x):
            return jnp.mean(model(x) ** 2)

        loss, grads, finite = mpjax.nnx.value_and_grad(loss_fn)(optimizer.loss_scale, model, x)
        optimizer.apply_gradients(model, grads, finite)
        return loss

    return step, (model, optimizer, X)


def test_an_nnx_step_that_changes_its_model_is_audited_whole():
    step, args = nnx_step()
    before = jax.tree.leaves(nnx.state(args[0]))
    found = audit(step, *args)
    assert matmuls(found) == {
        ("layers/0", "forward"): ("bfloat16", 1),
        ("layers/0", "backward"): ("bfloat16", 1),
        ("layers/2", "forward"): ("bfloat16", 1),
        ("layers/2", "backward"): ("bfloat16", 2),
    }
    assert any(phase == "optimizer" for _, phase, _ in found.operations)
    assert all(a is b for a, b in zip(before, jax.tree.leaves(nnx.state(args[0])), strict=True))


def test_nnx_modules_without_a_policy_are_named_by_their_classes():
    model = nnx.Sequential(nnx.Linear(16, 8, rngs=nnx.Rngs(0)))
    assert matmuls(audit(lambda model, x: model(x), model, X)) == {("Linear", "forward"): ("float32", 1)}


@pytest.mark.parametrize("abstract", [False, True])
def test_models_of_equinox_are_arguments_whatever_they_hold(abstract):
    class Model(eqx.Module):
        linear: eqx.nn.Linear
        dropout: eqx.nn.Dropout
        activation: Any = jax.nn.relu

        def __call__(self, x, key):
            return self.dropout(self.activation(self.linear(x)), key=key)

    def make():
        return Model(eqx.nn.Linear(16, 8, key=jax.random.key(0)), eqx.nn.Dropout(0.5))

    model = eqx.filter_eval_shape(make) if abstract else make()
    found = audit(lambda model, x, key: model(x, key), model, array(16), jax.random.key(0), policies=BF16)
    assert matmuls(found) == {("Linear", "forward"): ("float32", 1)}
    (finding,) = found.of("silent-upcast")
    assert "It takes argument 0 'linear/weight', float32[8,16]" in finding.message


def test_a_train_step_of_equinox_that_returns_its_model_is_audited_whole():
    tx = optax.sgd(0.1)
    model = mpjax.apply_policy(
        eqx.nn.MLP(16, 4, 8, depth=1, activation=jnp.tanh, key=jax.random.key(0)), BF16
    )

    @eqx.filter_jit
    def step(model, opt_state, x):
        grads = eqx.filter_grad(lambda model: jnp.mean(jax.vmap(model)(x) ** 2))(model)
        updates, opt_state = tx.update(grads, opt_state)
        return eqx.apply_updates(model, updates), opt_state

    found = audit(step, model, tx.init(eqx.filter(model, eqx.is_array)), X, policies=BF16)
    assert {(m.module, m.phase): m.operands for m in found.matmuls} == {
        (f"layers/{i}", phase): "bfloat16" for i in range(2) for phase in ("forward", "backward")
    }
    assert not found.at_least("warning")


def test_models_of_two_frameworks_are_arguments_of_one_function():
    first = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
    second = eqx.nn.Linear(8, 4, key=jax.random.key(0))
    found = audit(lambda x, a, b: jax.vmap(b)(a(x)), X, first, second)
    assert found.total_flops == 2 * 8 * (16 * 8 + 8 * 4)


# ------------------------------------------------------------------------------------- against a policy


def test_a_program_holds_the_policy_that_it_was_traced_under():
    assert not audit(*unpacked(train_step(BF16))).at_least("warning")


def test_a_program_is_compared_with_the_policies_that_are_asked_for():
    fn, args = train_step("float32")
    found = audit(fn, *args, policies=BF16).of("silent-upcast")
    assert {f.module for f in found} == {"block_0/dense", "block_1/dense", "head"}
    assert all(f.severity == "error" for f in found)
    assert sum(f.share for f in found) == pytest.approx(1)
    (first,) = (f for f in found if (f.module, f.phase) == ("head", "forward"))
    assert (
        "It takes argument 0 'params/params/head/kernel', float32[16,4], which was never narrower."
        in first.message
    )


def test_a_matmul_below_the_policy_is_an_error_too():
    fn, args = train_step(BF16)
    found = audit(fn, *args, policies={".*dense": BF16, "*": "float32"}).findings
    assert {(f.kind, f.module, f.severity) for f in found} == {("below-policy", "head", "error")}


def test_classes_of_a_map_are_known_by_the_names_of_modules():
    def loss(params, x):
        return jnp.mean(nn.Sequential([nn.Dense(4), nn.relu]).apply(params, x))

    params = {"params": {"layers_0": {"kernel": array(16, 4), "bias": array(4)}}}
    policies = mpjax.PolicyMap({nn.Sequential: BF16}, default="float32")
    assert audit(loss, params, X, policies=policies).of("silent-upcast")
    assert not audit(loss, params, X, policies="float32").findings


def test_what_is_deliberately_precise_is_no_silent_upcast():
    def f(x, w):
        return jnp.matmul(x, w, precision="highest")

    assert not audit(f, X, W, policies=BF16).findings


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("model", ["gpt", "resnet"])
def test_the_models_of_the_experiments_have_no_error_and_no_warning(model, policy):
    policies = mpjax.as_policy_map(policy)
    size = config.GPTSize(layers=1)
    options = config.GPTTraining(model=size) if model == "gpt" else config.ResNetTraining()
    task = tasks.make_task(options, policies)
    state = loop.create_state(task, tasks.make_optimizer(options), mpjax.loss_scale_for(policies), 0)
    step = mpjax.make_train_step(task.loss, has_model_state=True)
    found = audit(step, state, task.batch(0, 0), jax.random.key(0))
    assert not found.at_least("warning")
    assert set(found.flops) == {mpjax.get_policy(policy).compute_dtype.name}


# ------------------------------------------------------------------------------------- silencing


def overflowing(x):
    with jax.named_scope("attention"):
        return jnp.exp(x) + -1e9


HALF = array(4, 4, dtype=jnp.float16)


@pytest.mark.parametrize(
    ("ignore", "left"),
    [
        (None, {"mask-overflow", "half-range"}),
        ({"attention": "half-range"}, {"mask-overflow"}),
        ({"att.*": ["half-range", "mask-overflow"]}, set()),
        ({".*": "*"}, set()),
        ({"attent": "*"}, {"mask-overflow", "half-range"}),
    ],
)
def test_findings_are_silenced_by_module_and_kind(ignore, left):
    assert {f.kind for f in audit(overflowing, HALF, ignore=ignore).findings} == left


def test_an_unknown_kind_names_the_closest():
    with pytest.raises(ValueError, match=r"Unknown kind of finding 'half-rang'; did you mean 'half-range'\?"):
        audit(overflowing, HALF, ignore={".*": "half-rang"})


def test_a_pattern_that_does_not_compile_is_quoted():
    with pytest.raises(ValueError, match=r"The pattern '\*norm' of findings to ignore does not compile"):
        audit(overflowing, HALF, ignore={"*norm": "*"})


def test_an_unknown_severity_is_quoted():
    with pytest.raises(ValueError, match="Unknown severity 'fatal'; it must be one of error, warning, note"):
        audit(overflowing, HALF).at_least("fatal")


# ------------------------------------------------------------------------------------- other platforms


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_the_matmuls_for_another_platform_are_those_of_the_program(platform):
    found = audit(*unpacked(train_step(BF16, Model(scanned=True))), platform=platform)
    # Two layers in a loop are one matmul in the program: forward, again for the backward pass, and two of its own.
    assert found.lowering.lowered == found.lowering.traced == {"bfloat16 × bfloat16": 9}
    assert f"matmuls in the StableHLO for {platform}: 9 of bfloat16 × bfloat16" in str(found)
    assert not found.of("lowering")


def test_matmuls_that_were_lowered_to_others_are_an_error(monkeypatch):
    wider = Lowering("tpu", {"bfloat16 × bfloat16": 1}, {"float32 × float32": 1})
    module = importlib.import_module("mpjax._audit.audit")
    monkeypatch.setattr(module, "lower", lambda *args: wider)
    found = module.audit(lambda x, w: x @ w, X, W, platform="tpu").of("lowering")
    assert {f.severity for f in found} == {"error"}
    assert "For tpu 1 matmuls take float32 × float32; the traced program has 0." in {f.message for f in found}


def test_a_function_that_is_called_twice_has_its_matmuls_twice():
    inner = jax.jit(lambda x, w: x @ w)

    def f(x, w):
        return lax.scan(lambda h, _: (inner(inner(h, w), w), None), x, None, length=9)[0]

    module = jax.jit(f).lower(X, W).as_text()
    assert lowering.matmuls(module) == {"float32 × float32": 2}


def test_an_unknown_platform_names_the_closest():
    with pytest.raises(ValueError, match=r"Unknown platform 'tpus'; did you mean 'tpu'\?"):
        audit(overflowing, HALF, platform="tpus")


# ------------------------------------------------------------------------------------- how it prints


def test_it_prints_modules_that_differ_in_a_number_in_one_row():
    shown = str(audit(*unpacked(train_step(BF16))))
    assert "block_*/dense (×2)" in shown
    assert "audit of step: " in shown
    assert "backward: " in shown


def test_it_prints_without_rich(monkeypatch):
    monkeypatch.setattr(report, "_rich", lambda: None)
    lines = str(audit(lambda x, w: x @ w, X, W)).splitlines()
    assert lines[1].split()[:3] == ["module", "matmuls", "FLOPs"]
    assert lines[3].split()[:5] == ["(model)", "1", "4.1", "kFLOP", "100.0"]


def test_a_finding_says_where_what_why_and_what_to_do():
    shown = str(audit(overflowing, HALF).of("mask-overflow")[0])
    assert shown.startswith("error: mask-overflow in attention, forward, ")
    assert "test_audit.py:" in shown
    for part in (
        "A constant is outside of float16, which ends at 65504.",
        "float16[4,4]",
        "Why it matters: ",
        "What to do: ",
    ):
        assert part in shown


def test_a_notebook_shows_it_as_html_with_markup_escaped():
    shown = audit(lambda x: overflowing(x), HALF)._repr_html_()
    assert shown.count("<table>") == 2
    assert "&lt;lambda&gt;" in shown
    assert "mask-overflow" in shown


def test_it_goes_to_json():
    found = audit(overflowing, HALF)
    content = json.loads(found.to_json())
    assert content == json.loads(json.dumps(found.to_dict()))
    assert content["findings"][0]["kind"] == "mask-overflow"
    assert content["operations"][0] == {"module": "attention", "phase": "forward", "count": 2}


def test_a_difference_shows_what_a_policy_changed():
    wide, narrow = (audit(*unpacked(train_step(p))) for p in ("float32", {"head": "float32", "*": BF16}))
    changed = {(c[0], c[1]): c[2:] for c in wide.diff(narrow).changes}
    assert changed["block_0/dense", "operands"] == ("f32", "bf16")
    assert ("head", "operands") not in changed
    assert changed["total", "operands"][0] == "f32"
    assert not wide.diff(wide)
    assert str(wide.diff(wide)) == "no difference"


def test_a_difference_lists_findings_that_are_gone_and_new():
    found = audit(overflowing, HALF)
    without = audit(overflowing, HALF, ignore={".*": "mask-overflow"})
    diff = found.diff(without)
    assert [f.kind for f in diff.gone] == ["mask-overflow"]
    assert not diff.new
    assert "gone: error: mask-overflow in attention" in str(diff)
    assert json.dumps(diff.to_dict())


DOCS = pathlib.Path(__file__).parent.parent.parent / "docs" / "audit.md"


@pytest.mark.usefixtures("standard_promotion")  # as users run it
def test_the_documentation_shows_what_its_code_prints(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "118")
    monkeypatch.setattr(mpjax, "audit", audit)
    monkeypatch.chdir(DOCS.parent.parent)
    linecache.clearcache()
    text, namespace = DOCS.read_text(), {}
    for block in re.finditer(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", text, re.DOTALL):
        above = "\n" * text[: block.start(1)].count("\n")
        exec(compile(above + block.group(1), "docs/audit.md", "exec"), namespace)
        printed = capsys.readouterr().out
        if block.group(2):
            assert as_documented(printed) == as_documented(block.group(2))


def as_documented(text: str) -> list[str]:
    """The lines of a text; without sizes where another version of JAX saves other bytes than that of the docs."""
    if not jax.__version__.startswith("0.10."):
        text = re.sub(r"─+", "─", re.sub(r" +", " ", re.sub(r"[\d.]+ [kM]?B\b", "size", text)))
    return [line.rstrip() for line in text.strip().splitlines()]


# ------------------------------------------------------------------------------------- bad input


def test_the_error_of_a_function_that_does_not_trace_shows_with_a_line_of_context():
    def broken(x, w):
        return x @ w.T[:3]

    with pytest.raises(TypeError, match="dot_general") as caught:
        audit(broken, X, W)
    assert caught.value.__notes__[-1] == (
        "mpjax.audit: this is the error of 'broken' itself, traced with (float32[8,16], float32[16,16])."
    )


def test_an_argument_that_holds_no_array_is_named():
    with pytest.raises(
        TypeError, match=r"Argument 1 of the function to audit holds 'mean' of type str at 'how'"
    ):
        audit(lambda x, options: x, X, {"how": "mean"})


def test_something_that_is_no_function_is_refused():
    with pytest.raises(TypeError, match="audit expects a function and its arguments, got 3 of type int"):
        audit(3, X)


def unpacked(program: tuple[Any, tuple[Any, ...]]) -> tuple[Any, ...]:
    fn, args = program
    return (fn, *args)


def test_arrays_of_numpy_and_python_numbers_are_arguments():
    assert audit(lambda x, s: (x @ x) * s, np.ones((4, 4), np.float32), 2.0).total_flops == 128


def test_a_function_in_full_precision_is_meant_to_be_above_the_policy():
    def loss(x, w):
        return jnp.mean(mpjax.full_precision(jnp.matmul)(x, w))

    assert not audit(mpjax.autocast(loss, BF16), X, W, policies=BF16).findings
