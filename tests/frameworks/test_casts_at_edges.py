"""What modules are given and return under a policy, in every framework."""

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from frameworks import BF16, EVERY_FRAMEWORK, F16, HALF, X, assert_near, build, dtypes_of, operands
from programs import trace

import mpjax
from mpjax import full_precision


def nothing(*_: Any) -> None:
    pass


# ------------------------------------------------------------------------------------ between layers


@EVERY_FRAMEWORK
@HALF
def test_activations_between_layers_are_half_and_the_logits_float32(
    framework: str, policy: str, half: str
) -> None:
    seen: list[str] = []
    model = build(framework, "Spied", X, note=lambda x: seen.append(x.dtype.name))
    seen.clear()
    out = model.output_shape(policy)
    assert seen == ["float32", half, half]  # the input is not narrowed
    assert out.dtype == "float32"


@EVERY_FRAMEWORK
@pytest.mark.parametrize(
    ("policy", "dtype"),
    [
        (BF16, "float32"),
        (F16, "float32"),
        ("bf16", "bfloat16"),
        ("f16", "float16"),
        ("p=f32,c=bf16,o=f16", "float16"),
    ],
)
def test_the_output_follows_the_policy(framework: str, policy: str, dtype: str) -> None:
    model = build(framework, "Spied", X, note=nothing)
    assert model.output_shape(policy).dtype == dtype


@EVERY_FRAMEWORK
def test_a_module_of_another_region_returns_its_output_dtype(framework: str) -> None:
    seen: list[str] = []
    model = build(framework, "Spied", X, note=lambda x: seen.append(x.dtype.name))
    seen.clear()
    model.output_shape({model.path("norm"): "p=f32,c=f32,o=f16", "*": BF16})
    assert seen == ["float32", "bfloat16", "float16"]


@EVERY_FRAMEWORK
@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("float32", ("float32", "float32", "int32", "bool", "key<fry>")),
        (F16, ("float16", "float32", "int32", "bool", "key<fry>")),
    ],
)
def test_inputs_are_widened_to_the_compute_dtype_and_never_narrowed(
    framework: str, policy: str, expected: tuple[str, ...]
) -> None:
    seen: list[Any] = []
    time, ids, mask = jnp.float32([999.0, 2047.0]), jnp.array([2909, 50257]), jnp.array([True])
    inputs = (jnp.ones(2, jnp.float16), time, ids, mask, jax.random.key(3))
    model = build(framework, "Spy", *inputs, note=lambda *args: seen.append(args))
    seen.clear()
    model.under(policy)(model.params, model.state, *inputs)
    (args,) = seen
    assert tuple(x.dtype.name for x in args) == expected
    assert (args[1].tolist(), args[2].tolist()) == ([999.0, 2047.0], [2909, 50257])


@EVERY_FRAMEWORK
def test_token_ids_stay_exact(framework: str) -> None:
    ids = jnp.array([2909, 32001, 50257])
    model = build(framework, "Spy", ids, note=nothing)
    assert model.output(F16).tolist() == ids.tolist()


@EVERY_FRAMEWORK
def test_every_structure_comes_back_and_a_scalar_is_never_narrowed(framework: str) -> None:
    inner: list[Any] = []
    model = build(framework, "Structures", X, note=inner.append)
    inner.clear()
    for tree, scalar, ids, key, mask in (model.under("bf16")(*model.arguments())[0], inner[0]):
        assert list(tree) == ["second", "first"]  # dicts keep the order of their keys
        assert (tree["second"][0].dtype, tree["second"][1], tree["first"].dtype) == (
            "bfloat16",
            None,
            "bfloat16",
        )
        assert (scalar.dtype, ids.tolist(), mask.dtype) == ("float32", [50257], bool)
        assert jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
        assert (jax.random.key_data(key) == jax.random.key_data(jax.random.key(7))).all()


@EVERY_FRAMEWORK
@pytest.mark.parametrize("inside", [True, False], ids=["computed inside", "passed in"])
@HALF
def test_sinusoids_of_2048_positions_are_within_2_thousandths(
    framework: str, inside: bool, policy: str, half: str
) -> None:
    model = build(framework, "Sinusoids", jnp.arange(2048.0), inside=inside)
    expected = model.output("float32")
    other_region = {model.path("sinusoid"): policy, "*": "p=f32,c=f16,o=f32"}
    for policies in (policy, other_region):
        np.testing.assert_allclose(model.output(policies), expected, atol=0.002)


# ------------------------------------------------------------------------------------------ methods


@EVERY_FRAMEWORK
def test_methods_other_than_call_enter_the_region_and_own_methods_are_no_boundary(framework: str) -> None:
    model = build(framework, "Methods", X)
    args = model.arguments()
    encode = model.under("p=f32,c=bf16,o=f16", "encode")
    assert jax.eval_shape(encode, *args)[0].dtype == "float16"
    assert operands(encode, *args) == {"bfloat16"}
    # A boundary at `helper` would return float16, the output dtype, and so make it twice.
    traced = trace(model.under("p=f32,c=bf16,o=f16"), *args)
    casts = [e for e in traced if e.primitive.name == "convert_element_type"]
    assert sum(e.params["new_dtype"] == jnp.float16 for e in casts) == 1


@EVERY_FRAMEWORK
@pytest.mark.parametrize("name", ["Decorated", "Derived"])
def test_decorated_and_inherited_methods_follow_the_policy(framework: str, name: str) -> None:
    model = build(framework, name, X)
    args = model.arguments()
    assert model.output_shape(BF16).dtype == "float32"
    for fn in (model.under(BF16), model.grads(BF16), model.grads(BF16, inside=False)):
        assert operands(fn, *args) == {"bfloat16"}
    dense = {".*dense": "p=f32,c=f32,o=bf16", "*": BF16}
    assert operands(model.grads(dense), *args) == {"float32"}
    assert_near(model.output(BF16), model.output("float32"))


@EVERY_FRAMEWORK
def test_a_shared_module_stays_shared_with_one_policy_and_one_gradient(framework: str) -> None:
    model = build(framework, "Shared", X)
    args = model.arguments()
    assert len(jax.tree.leaves(model.params)) == len(jax.tree.leaves(model.params_under(BF16))) == 2
    shared = {model.path("shared"): "float32", "*": BF16}
    if framework == "nnx":  # which knows a shared module by the first path to it
        shared = {".*(shared|layer)": "float32", "*": BF16}
    assert operands(model.grads(shared), *args) == {"float32"}
    assert_near(jax.jit(model.grads(BF16))(*args), jax.jit(model.grads("float32"))(*args), 0.05)


# ------------------------------------------------------------------------------------ full precision


@EVERY_FRAMEWORK
def test_full_precision_holds_for_the_modules_inside_it_forward_and_backward(framework: str) -> None:
    model = build(framework, "FullPrecisionInside", X)
    found = model.matmuls(model.grads(BF16))
    expected = {"half": {"bfloat16"}, "exact": {"float32"}, "last": {"bfloat16"}}
    assert found == {model.path(name): dtypes for name, dtypes in expected.items()}


@EVERY_FRAMEWORK
def test_full_precision_around_a_model_holds_for_all_of_it(framework: str) -> None:
    model = build(framework, "Spied", X, note=nothing)
    run = model.call(BF16)
    inside = mpjax.autocast(lambda *args: full_precision(run)(*args), BF16, cast_output=False)
    assert operands(inside, *model.arguments()) == {"float32"}


# --------------------------------------------------------------------------- exceptions and threads


@EVERY_FRAMEWORK
def test_an_exception_leaves_no_region_behind(framework: str) -> None:
    fail = False

    def note(x: jax.Array) -> None:
        if fail and x.dtype == jnp.bfloat16:
            raise RuntimeError("in the middle")

    model = build(framework, "Spied", X, note=note)
    args, expected = model.arguments(), build(framework, "Spied", X, note=nothing).output_shape(F16)
    fail = True
    with pytest.raises(RuntimeError, match="in the middle"):
        model.under(BF16)(*args)
    assert mpjax._precision.regions.current() is None
    assert mpjax._precision.module_scope.running() is None
    assert operands(lambda a, b: a @ b, X[0], X[0].T) == {"float32"}
    assert operands(model.call("float32"), *args) == {"float32"}
    assert model.output_shape(F16).dtype == expected.dtype
    assert operands(model.under(F16), *args) == {"float16"}


@EVERY_FRAMEWORK
def test_threads_do_not_see_each_others_policies(framework: str) -> None:
    meet = threading.Barrier(2, timeout=60)
    waits = False
    seen: dict[str, set[str]] = {}

    def note(x: jax.Array) -> None:
        if waits:
            meet.wait()  # both threads are in a module
            seen.setdefault(threading.current_thread().name, set()).add(x.dtype.name)

    model = build(framework, "Spied", X, note=note)
    waits = True
    runs = {"bfloat16": model.under(BF16), "float16": model.under(F16)}
    threads = [
        threading.Thread(target=jax.eval_shape, args=(run, *model.arguments()), name=name)
        for name, run in runs.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {name: {"float32", name} for name in runs}


@EVERY_FRAMEWORK
def test_a_model_outside_of_policies_is_what_it_was(framework: str) -> None:
    model = build(framework, "Spied", X, note=nothing)
    model.under(BF16)(*model.arguments())
    assert dtypes_of(model.params) == {"float32"}
    assert operands(model.call("float32"), *model.arguments()) == {"float32"}
