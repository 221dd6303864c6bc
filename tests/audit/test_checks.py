"""The checks of an audit tell a defect from what looks like one, in code as people write it."""

from typing import Any

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax import lax

from mpjax._audit.audit import audit

B16, HALF, F32 = jnp.bfloat16, jnp.float16, jnp.float32
EPSILON, MASKED = 1e-8, -1e9


def array(*shape: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def found(fn, *args, kind=None, severity="warning"):
    """Kind, severity and number of operations of the findings."""
    findings = audit(fn, *args).at_least(severity)
    return [(f.kind, f.severity, f.count) for f in findings if kind in (None, f.kind)]


X = array(4, 4, dtype=HALF)

# ------------------------------------------------------------------------------------------ constants


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x / (jnp.abs(x) + EPSILON),
        lambda x: jnp.maximum(x, 0) + EPSILON,
        lambda x: jnp.maximum(x, EPSILON),
        lambda x: jnp.clip(x, 1e-8, 1),
        lambda x: x + jnp.float32(1e-8).astype(HALF),
    ],
)
def test_a_constant_that_becomes_zero_is_found_wherever_it_was_written(fn):
    assert found(fn, X) == [("vanishing-constant", "error", 1)]


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: nn.relu(
            nn.LayerNorm(epsilon=1e-8, dtype=HALF, use_bias=False, use_scale=False).apply({}, x)
        ),
        lambda x: jnp.maximum(x, 0),  # no need of 1e-8
        lambda x: jnp.maximum(x * 1e-6, 0.0),  # small, but not zero
        lambda x: jnp.minimum(x, jnp.inf)[:100000],
        lambda x, scale=1e9: jnp.where(x > 0, x, -jnp.inf),
    ],
)
@pytest.mark.usefixtures("standard_promotion")  # Flax's norms promote dtypes
def test_a_number_that_only_stands_on_the_line_is_no_constant_of_the_operation(fn):
    assert not found(fn, X)


def test_a_function_that_was_traced_before_has_the_same_findings_again():
    norm = jax.jit(lambda x: x / (jnp.abs(x) + EPSILON))
    norm(jnp.ones((4, 4), HALF))
    assert found(norm, X) == found(norm, X) == [("vanishing-constant", "error", 1)]


def test_each_use_of_a_constant_on_a_line_counts():
    assert found(lambda x: x * MASKED + x * MASKED, X) == [("mask-overflow", "error", 2)]


@pytest.mark.parametrize(
    ("fn", "times"),
    [
        (lambda x: x * 0.0 + x * 1e-6, 0),
        (lambda x: jnp.clip(x, 0.0, 1e-6), 0),
        (lambda x: x * 0.0 + x * 1e-8, 1),
        (lambda x: (lambda y: y * 1e-8)(x * 0.0), 1),
        (lambda x: jnp.where(x > 0, -jnp.inf, x * 1e9), 1),
    ],
    ids=["coarse", "coarse in one call", "with a zero", "in a call", "with an infinity"],
)
def test_of_two_constants_on_a_line_the_one_that_was_lost_is_found(fn, times):
    assert [count for _, _, count in found(fn, X)] == [1] * times


@pytest.mark.parametrize(
    "mask",
    [
        lambda m: ((1 - m.astype(F32)) * -1e9).astype(HALF),
        lambda m: jnp.where(m > 0, 0.0, -1e9).astype(HALF),
        lambda m: jnp.where(m > 0, 0.0, MASKED).astype(HALF),
    ],
)
def test_a_mask_built_in_float32_overflows_when_it_is_cast(mask):
    assert found(lambda m, x: x + mask(m), array(4, 4, dtype=jnp.int32), X) == [("mask-overflow", "error", 1)]


@pytest.mark.parametrize("fill", [-1e4, -jnp.inf])
def test_a_mask_that_the_format_holds_or_that_is_meant_to_be_infinite_is_right(fill):
    assert not found(lambda m, x: x + jnp.where(m, 0.0, fill).astype(HALF), array(4, 4, dtype=jnp.bool_), X)


@pytest.mark.parametrize(
    "fn",
    [optax.tree.norm, lambda g: optax.clip_by_global_norm(1.0).update(g, optax.EmptyState())[0]],
    ids=["norm", "clip"],
)
def test_the_norm_of_float16_gradients_takes_its_squares_in_float16(fn):
    assert [kind for kind, _, _ in found(fn, {"w": array(300, dtype=HALF)})] == ["half-range"]


# ----------------------------------------------------------------------------------------------- sums


def gradient(fn):
    return jax.grad(lambda x, *args: fn(x, *args).astype(F32).sum())


ROW = array(4096, dtype=B16)
OFFSETS = np.arange(64)[:, None] - np.arange(64) + 63


@pytest.mark.parametrize(
    ("fn", "x"),
    [
        (jnp.sort, ROW),
        (lambda x: lax.top_k(x, 512)[0], ROW),
        (lambda x: lax.top_k(x, 512)[0], array(8, 4096, dtype=B16)),
        (lambda x: x[jnp.argsort(lax.stop_gradient(x))], ROW),
        (lambda x: x[np.triu_indices(64)], array(64, 64, dtype=B16)),
        (lambda x: x[np.arange(4096)], array(5000, dtype=B16)),
        (lambda x: x[OFFSETS], array(127, 8, dtype=B16)),
        (lambda x: jnp.max(x), ROW),
    ],
    ids=[
        "sort",
        "top_k",
        "top_k of rows",
        "argsort",
        "triangle",
        "slice",
        "relative positions",
        "ties of max",
    ],
)
def test_a_scatter_whose_updates_seldom_meet_is_no_long_sum(fn, x):
    assert not found(gradient(fn), x)


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (lambda x: x[np.zeros(3000, int)], (ROW,)),
        (lambda x, i: x[i], (ROW, array(4000, dtype=jnp.int32))),
        (lambda x: x[np.concatenate([OFFSETS] * 9)], (array(127, 8, dtype=B16),)),
    ],
    ids=["constant", "unknown", "repeated"],
)
def test_a_scatter_whose_updates_meet_often_is_a_long_sum(fn, args):
    assert found(gradient(fn), *args) == [("half-accumulation", "error", 1)]


def nested(start):
    def inner(total, x):
        return lax.scan(lambda t, _: (t + x, None), total, None, length=100)[0]

    def outer(x):
        def body(total, _):
            return inner(total if start is None else start(total), x), None

        return lax.scan(body, jnp.zeros(4, B16), None, length=100)[0]

    return outer


def test_loops_in_loops_add_to_one_carry_as_often_as_all_of_them_run():
    (finding,) = audit(nested(None), array(4, dtype=B16)).findings
    assert finding.message == ("A loop adds to its bfloat16 carry in 10,000 steps; the format counts to 256.")


def test_a_carry_that_each_outer_step_starts_anew_counts_the_inner_steps():
    assert not found(nested(lambda total: jnp.zeros(4, B16) * total.shape[0]), array(4, dtype=B16))


# ---------------------------------------------------------------------------------------------- casts


IDS = array(4, dtype=jnp.int32)


@pytest.mark.parametrize(
    ("fn", "args", "severity"),
    [
        (lambda w, i: w[i.astype(B16).astype(jnp.int32)], (array(4, 4), IDS), "error"),
        (lambda x, i: x * i.astype(B16), (array(4, dtype=B16), np.full(4, 3000)), "error"),
        (lambda x, i: jnp.sin(i.astype(B16)[:, None] * x), (array(4, 4, dtype=B16), IDS), "warning"),
        (lambda x, i: x + (1.0 - i.astype(B16)) * -1e4, (array(4, dtype=B16), IDS), "note"),
        (lambda x, i: x + (1.0 - i.astype(B16)) * -1e4, (array(4, dtype=B16), np.ones(4, int)), "note"),
    ],
    ids=["index", "known to be large", "position", "mask", "known to be a mask"],
)
def test_how_severe_the_cast_of_an_integer_is_depends_on_what_becomes_of_it(fn, args, severity):
    assert found(fn, *args, severity="note") == [("integer-cast", severity, 1)]


def test_pairs_of_words_are_no_keys_unless_they_are_used_as_one():
    coordinates = array(100, 2, dtype=jnp.uint32)
    assert not found(lambda c: c.astype(HALF) * 2, coordinates)
    assert not found(lambda k: jax.random.bits(k, (8, 2)).astype(F32), jax.random.key(0))
    keys = array(8, 2, dtype=jnp.uint32)

    def rounded(keys):
        keys = keys.astype(F32).astype(jnp.uint32)
        return jax.vmap(lambda k: jax.random.normal(k, (3,)))(keys)

    assert found(rounded, keys) == [("key-cast", "error", 1)]


def test_a_batch_that_is_cast_where_parameters_are_is_no_parameter():
    def loss(params, x):
        params, x = jmp.get_policy("p=f32,c=bf16,o=f32").cast_to_compute((params, x))
        h = jnp.tanh(x @ params["w"])
        return sum((jnp.tanh(h + x) * x for _ in range(6)), start=x).astype(F32).mean()

    assert not found(jax.value_and_grad(loss), {"w": array(16, 16)}, array(16, 16))


def test_the_residual_of_a_split_weight_is_what_the_rounding_is_for():
    assert not found(lambda w: (w.astype(B16), w - w.astype(B16).astype(F32)), array(8, 8))


# --------------------------------------------------------------------------------------------- states


def squared(params, x):
    return jnp.mean((x @ params["w"]).astype(F32) ** 2)


PARAMS = {"w": array(8, 8, dtype=B16), "b": array(8, dtype=B16)}
WIDE = {"w": array(8, 8), "b": array(8)}
BATCH = array(4, 8, dtype=B16)


def test_states_that_are_returned_in_another_order_are_known_by_their_dtypes():
    def step(params, average, x):
        grads = jax.grad(squared)(params, x)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return jax.tree.map(lambda e, p: 0.999 * e + 0.001 * p.astype(F32), average, params), params

    assert not found(step, PARAMS, WIDE, BATCH, kind="state-dtype")


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (
            lambda b: {"x": (b["x"] / 255).astype(B16), "y": b["y"] * 2},
            ({"x": array(4), "y": array(4)},),
        ),
        (
            lambda p, x: jax.tree.map(
                lambda g, p: g.astype(F32) + 1e-4 * p.astype(F32), jax.grad(squared)(p, x), p
            ),
            (PARAMS, BATCH),
        ),
    ],
    ids=["preprocessing", "gradients with weight decay"],
)
def test_a_result_with_the_structure_of_an_argument_need_not_be_its_next_value(fn, args):
    assert not found(fn, *args, kind="state-dtype")


def wider(state, x):
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(state["w"])
    return {"w": state["w"] - 0.1 * grad, "m": 0.9 * state["m"].astype(F32) + loss}, loss


STATE = {"w": array(8, 2), "m": array(dtype=B16)}


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (wider, (STATE, array(4, 8))),
        (lambda s, x: {"state": wider(s, x)[0], "loss": wider(s, x)[1]}, (STATE, array(4, 8))),
        (lambda c: wider(c["state"], c["x"]), ({"state": STATE, "x": array(4, 8)},)),
        (lambda s, x: {"m": 0.9 * s["m"].astype(F32) + 0.1 * x.mean()}, ({"m": array(dtype=B16)}, array(4))),
    ],
    ids=["state", "in a dict", "from a dict", "a statistic"],
)
def test_a_state_that_comes_back_wider_is_found_wherever_it_is_held(fn, args):
    assert [kind for kind, _, _ in found(fn, *args)] == ["state-dtype"]


def decayed(w, x):
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w).astype(F32) ** 2))(w)
    return loss, (1 - 1e-4) * w - 1e-3 * grad


def skipping(select):
    def step(w, x):
        loss, new = decayed(w, x)
        return select(jnp.isfinite(loss), new, w)

    return step


@pytest.mark.parametrize(
    "step",
    [
        lambda w, x: decayed(w, x)[1],
        skipping(jmp.select_tree),
        skipping(jnp.where),
        skipping(lambda ok, new, old: lax.cond(ok, lambda: new, lambda: old)),
    ],
    ids=["weight decay", "select_tree", "where", "cond"],
)
def test_an_update_of_16_bit_weights_is_found_behind_a_skip_and_a_decay(step):
    assert found(step, array(8, 8, dtype=B16), BATCH) == [("half-update", "warning", 1)]


def test_an_average_that_forgets_faster_than_the_format_rounds_may_be_stored_in_16_bits():
    adam = optax.scale_by_adam(b1=0.9, b2=0.999, mu_dtype=B16)

    def step(w, state, x):
        updates, state = adam.update(jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w), state, w)
        return w - 1e-3 * updates, state

    w = array(8, 8)
    assert not found(step, w, jax.eval_shape(adam.init, w), array(4, 8), kind="half-update")


# ------------------------------------------------------------------------------------------ arguments


def test_a_pattern_that_governs_no_module_is_refused_with_the_closest_paths():
    def fn(x, w):
        with jax.named_scope("head"):
            return x @ w

    with pytest.raises(ValueError, match=r"'haed' governs no module.*closest paths are 'head'"):
        audit(fn, array(4, 8), array(8, 2), policies={"haed": "float32", "*": "bfloat16"})


@pytest.mark.parametrize(
    ("error", "keywords", "message"),
    [
        (ValueError, {"platform": 3}, "Unknown platform '3'"),
        (
            TypeError,
            {"ignore": "half-range"},
            "dict from a pattern of module paths to kinds.*got 'half-range'",
        ),
        (TypeError, {"ignore": ["half-range"]}, r"got \['half-range'\]"),
    ],
)
def test_an_option_of_another_type_is_quoted(error, keywords, message):
    with pytest.raises(error, match=message):
        audit(jnp.sin, X, **keywords)


def test_an_array_of_text_is_no_array_of_numbers():
    with pytest.raises(TypeError, match="Argument 0 of the function to audit holds array"):
        audit(jnp.sin, np.array(["a"]))


def test_an_audit_differs_from_audits_only():
    with pytest.raises(TypeError, match="differs from another audit, got 'before' of type str"):
        audit(jnp.sin, X).diff("before")
