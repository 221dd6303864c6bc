"""JAX's private parts are where mpjax looks for them and do what it uses them for: a test for each, by name."""

import dataclasses
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from programs import trace

import mpjax
from mpjax._precision import jax_internals, regions
from mpjax._precision.jax_internals import USES

BF16 = "p=f32,c=bf16,o=f32"
X, W = jnp.ones((4, 6)), jnp.ones((6, 5))


def used(name: str) -> Any:
    part = USES[name].load()
    if part is None:
        pytest.skip(f"jax {jax.__version__} has no {name}, which is not required")
    return part


# ----------------------------------------------------------------------------------------- canaries

CANARIES: dict[str, Callable[[Any], None]] = {}


def canary(name: str) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    def add(check: Callable[[Any], None]) -> Callable[[Any], None]:
        CANARIES[name] = check
        return check

    return add


@pytest.mark.parametrize("name", USES)
def test_jax_still_has_the_part_and_it_still_does_what_it_is_used_for(name):
    part = used(name)
    CANARIES[name](part)


def test_every_use_has_a_canary_a_purpose_and_a_version():
    assert set(CANARIES) == set(USES)
    for use in USES.values():
        assert use.why.startswith("to ")
        assert use.instead
        assert re.fullmatch(r"\d+\.\d+(\.\d+)?", use.since)


@canary("jax.extend.core.Primitive.bind")
def _(bind):
    """JAX calls what stands on the instance in place of the method."""
    primitive, calls = jax_internals.primitives()["sin"], []
    assert type(primitive).bind is bind
    with pytest.MonkeyPatch.context() as patch:
        original = primitive.bind
        patch.setattr(
            primitive, "bind", lambda *args, **params: calls.append(args) or original(*args, **params)
        )
        trace(jnp.sin, X)
    assert len(calls) == 1
    assert original.__self__.name == "sin"


def _is_primitive(name: str) -> Callable[[Any], None]:
    def check(part: Any) -> None:
        assert isinstance(part, Primitive)
        assert part.name == name
        assert jax_internals.primitives()[name] is part

    return check


CANARIES |= {
    "jax._src.lax.lax.ragged_dot_general_p": _is_primitive("ragged_dot_general"),
    "jax._src.state.primitives.addupdate_p": _is_primitive("addupdate"),
    "jax._src.lax.scaled_dot.scaled_dot_p": _is_primitive("scaled_dot"),
    "jax._src.cudnn.scaled_matmul_stablehlo._scaled_matmul_p": _is_primitive("scaled_matmul"),
}


@canary("jax.extend.linear_util.transformation2")
def _(part):
    """The rules of custom_jvp and custom_vjp are wrapped functions, the first of them the function itself."""
    bound, square = [], jax.custom_jvp(lambda x: x**2)
    square.defjvps(lambda t, out, x: 2 * x * t)
    primitive = jax_internals.primitives()["custom_jvp_call"]
    with pytest.MonkeyPatch.context() as patch:
        original = primitive.bind
        patch.setattr(
            primitive, "bind", lambda *args, **params: bound.append(params) or original(*args, **params)
        )
        trace(square, X)
    _, rule = bound[0]["subfuns"]
    seen = []
    within = jax_internals.run_within(
        rule, lambda region: seen.append(region) or regions.ambient(region), None
    )
    assert type(within) is type(rule)
    assert not seen

    @jax.custom_jvp
    def probe(x):
        return x

    probe.defjvp(lambda x, t: (x[0], seen.append(regions.current()) or t[0]))
    jax.jvp(mpjax.autocast(probe, BF16), (X,), (X,))
    assert seen[0].compute_dtype == jnp.bfloat16


@canary("jax.interpreters.ad.primitive_transposes")
def _(transposes):
    """The rules of both operands are the arguments of one partial function."""
    for name in ("dot_general", "conv_general_dilated"):
        lhs, rhs = transposes[jax_internals.primitives()[name]].args
        assert callable(lhs.mpjax_wraps)
        assert callable(rhs.mpjax_wraps)


@canary("jax.interpreters.ad.defbilinear")
def _(_part):
    """The gradient of a weight is found by the rule that was registered."""
    fn = mpjax.autocast(lambda w: jnp.sum((X @ w).astype(jnp.float32)), BF16)
    matmuls = [e for e in trace(jax.grad(fn), W) if e.primitive.name == "dot_general"]
    assert matmuls[-1].outvars[0].aval.dtype == jnp.float32
    assert {v.aval.dtype.name for v in matmuls[-1].invars} == {"bfloat16"}


@canary("jax.interpreters.ad.UndefinedPrimal")
def _(part):
    wanted = jax_internals.wanted_operand(part(jax.typeof(X)), np.dtype(jnp.bfloat16))
    assert type(wanted) is part
    assert (wanted.aval.shape, wanted.aval.dtype) == (X.shape, jnp.bfloat16)


def _doubled() -> Primitive:
    return jax_internals.identity_to_derivatives(
        "mpjax_canary", lambda x, *, by: x * by, lambda constant, params: params["by"] == 1
    )


@canary("jax.interpreters.ad.deflinear2")
def _(_part):
    assert jax.grad(lambda x: _doubled().bind(x, by=2.0))(3.0) == 1.0
    assert jax.jvp(lambda x: _doubled().bind(x, by=2.0), (3.0,), (1.0,)) == (6.0, 2.0)


@canary("jax.interpreters.batching.defvectorized")
def _(_part):
    primitive = _doubled()
    np.testing.assert_array_equal(jax.vmap(lambda x: primitive.bind(x, by=2.0))(X), 2 * X)


@canary("jax.interpreters.mlir.register_lowering")
@canary("jax.interpreters.mlir.lower_fun")
def _(_part):
    primitive = _doubled()
    np.testing.assert_array_equal(jax.jit(lambda x: primitive.bind(x, by=2.0))(X), 2 * X)


@canary("jax._src.interpreters.partial_eval.const_fold_rules")
def _(rules):
    """JAX leaves an operation out of a jaxpr where its rule says that it changes nothing about its constant."""
    primitive = _doubled()
    assert rules[primitive]([3.0], {"by": 1}, []) == [3.0]
    assert rules[primitive]([3.0], {"by": 2}, []) is None

    def names(constant):
        return {e.primitive.name for e in trace(mpjax.autocast(lambda x: x + constant, "f16"), half)}

    half = X.astype(jnp.float16)
    assert "mpjax_saturate" not in names(-6e4)
    assert "mpjax_saturate" in names(-1e9)


@canary("jax._src.interpreters.mlir._lowerings")
def _(lowerings):
    assert callable(lowerings[jax_internals.primitives()["sin"]].rule)


@canary("jax._src.interpreters.mlir._platform_specific_lowerings")
def _(lowerings):
    """The lowering of matmuls for CPUs is ours, on top of JAX's own."""
    rule = lowerings["cpu"][jax_internals.primitives()["dot_general"]].rule
    assert callable(rule.mpjax_wraps)
    text = jax.jit(mpjax.autocast(jnp.matmul, "p=f32,c=f16,o=f32")).lower(X, W).as_text()
    assert re.search(r"dot_general.*\(tensor<4x6xf32>, tensor<6x5xf32>\) -> tensor<4x5xf32>", text)


def _lowered_weight_gradient() -> str:
    def loss(w):
        return jnp.sum((jnp.ones((2, 4, 6)) @ w).astype(jnp.float32) ** 2)

    return jax.jit(jax.grad(mpjax.autocast(loss, BF16))).lower(W).as_text()


@canary("jax.interpreters.mlir.aval_to_ir_type")
@canary("jax.interpreters.mlir.dense_int_array")
@canary("jax.extend.mlir.ir")
@canary("jax.extend.mlir.dialects.stablehlo")
def _(_part):
    """The lowering of a weight's gradient converts, transposes and fences."""
    with pytest.MonkeyPatch.context() as patch:
        for native in (False, True):
            patch.setattr("mpjax._precision.cpu_lowering.has_native_bfloat16", lambda native=native: native)
            jax.clear_caches()
            text = _lowered_weight_gradient()
            assert "stablehlo.optimization_barrier" in text
            assert "stablehlo.transpose" in text
            assert ("bitcast_convert" in text) is native
            assert "stablehlo.convert" in text
    jax.clear_caches()


@canary("jax.extend.core.JaxprEqn.source_info")
def _(_part):
    def fn(x):
        with jax.named_scope("inner"):
            return jnp.sin(x)

    (eqn,) = trace(fn, X)
    assert jax_internals.name_stack(eqn) == "inner"
    frame = next(f for f in jax_internals.frames(eqn) if f.file == __file__)
    assert frame.function.endswith("fn")
    assert frame.line == fn.__code__.co_firstlineno + 2


@pytest.mark.parametrize(
    ("name", "fn", "args", "expected"),
    [
        ("dot_general", jnp.matmul, (X, W), {"precision", "preferred_element_type", "dimension_numbers"}),
        (
            "conv_general_dilated",
            lambda x: lax.conv(x, x, (1, 1), "SAME"),
            (X[None, None],),
            {"precision", "preferred_element_type", "window_strides"},
        ),
        (
            "ragged_dot_general",
            lambda x, w: lax.ragged_dot(x, w[None], jnp.array([4])),
            (X, W),
            {"precision", "preferred_element_type", "ragged_dot_dimension_numbers"},
        ),
        (
            "scatter-add",
            lambda x: x.at[0].add(1.0),
            (X,),
            {"dimension_numbers", "indices_are_sorted", "unique_indices", "mode"},
        ),
        (
            "convert_element_type",
            lambda x: x.astype(jnp.bfloat16),
            (X,),
            {"new_dtype", "weak_type", "sharding"},
        ),
    ],
)
def test_the_parameters_that_rules_read_are_those_of_the_operation(name, fn, args, expected):
    eqn = next(e for e in trace(fn, *args) if e.primitive.name == name)
    assert expected <= set(eqn.params)


# ------------------------------------------------------------------------------------ a JAX that lacks one

MESSAGE = (
    "This mpjax supports jax 0.10 to 0.12.1, and jax {version} is installed, which lacks '{name}' or has changed it; "
    "mpjax uses it {why}. Install a version that is supported, 'pip install \"jax>=0.10,<=0.12.1\"', or a newer "
    "mpjax, 'pip install --upgrade mpjax'."
)


def run(script: str) -> str:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (
            "jax._src.interpreters.partial_eval.const_fold_rules",
            "from jax._src.interpreters import partial_eval; del partial_eval.const_fold_rules",
        ),
        (
            "jax.interpreters.ad.primitive_transposes",
            "from jax.interpreters import ad; import jax.extend.core.primitives as p; "
            "ad.primitive_transposes[p.dot_general_p] = lambda *args, **params: None",
        ),
        (
            "jax._src.interpreters.mlir._platform_specific_lowerings",
            "from jax._src.interpreters import mlir; mlir._platform_specific_lowerings.clear()",
        ),
    ],
    ids=["gone", "changed", "empty"],
)
def test_where_a_part_is_missing_the_import_says_which_versions_serve(name, change):
    out = run(f"""
        import jax
        {change}
        try:
            import mpjax
        except ImportError as error:
            print(error)
    """)
    assert out.strip() == MESSAGE.format(version=jax.__version__, name=name, why=USES[name].why)


def test_a_module_that_is_missing_is_named_in_full():
    use = jax_internals.Use("jax._src.nowhere.part", "to test", "none")
    with pytest.raises(ImportError, match=re.escape("lacks 'jax._src.nowhere.part' or has changed it")):
        use.load()
    assert dataclasses.replace(use, required=False).load() is None


def test_a_part_that_is_not_required_may_be_missing():
    out = run("""
        import jax
        import sys
        del sys.modules["jax._src.lax.scaled_dot"].scaled_dot_p
        import mpjax
        from mpjax._precision import jax_internals
        print("scaled_dot" in jax_internals.primitives())
    """)
    assert out.strip() == "False"


# -------------------------------------------------------------------------------------- a second import


def test_a_second_import_replaces_the_rules_of_the_first_and_wraps_nothing_twice():
    out = run("""
        import sys
        import jax, jax.numpy as jnp
        import jax.extend.core.primitives as p
        from jax.interpreters import ad
        from jax._src.interpreters import mlir

        def wrappers():
            yield from (p.exp_p.bind, p.dot_general_p.bind, *ad.primitive_transposes[p.dot_general_p].args)
            yield mlir._platform_specific_lowerings["cpu"][p.dot_general_p].rule

        plain = [*wrappers()]
        for _ in range(3):
            for name in [name for name in sys.modules if name.startswith("mpjax")]:
                del sys.modules[name]
            import mpjax
        assert [w.mpjax_wraps for w in wrappers()] == plain
        x = jnp.ones((2, 2))
        print(mpjax.autocast(jnp.matmul, "p=f32,c=f16,o=f32")(x, x * 70000.0)[0, 0])
        print("f16" in str(jax.make_jaxpr(jnp.matmul)(x, x)))
    """)
    assert out.split() == ["inf", "False"]
