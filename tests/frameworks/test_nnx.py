"""flax.nnx models under policies, and the optimizer and gradients for them."""

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from programs import exported_matmuls, operand_dtypes
from scopes import product_dtypes_by_scope

import mpjax
from mpjax import autocast, full_precision
from mpjax.nnx import apply_policy

BF16 = "p=f32,c=bf16,o=f32"
F16 = "p=f32,c=f16,o=f32"
NO_SCALE = mpjax.NoOpLossScale()


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


X = normal(2, 4, 8)


def rngs() -> nnx.Rngs:
    return nnx.Rngs(0)


def total(model: nnx.Module, *args: Any) -> jax.Array:
    return jnp.sum(jnp.sin(model(*args)))


def as_function(fn: Callable[..., Any], model: nnx.Module) -> tuple[Callable[..., Any], Any]:
    """`fn(model, *args)` as a pure function of the model's state, for tracing."""
    graphdef, state = nnx.split(model)
    return lambda state, *args: nnx.as_pure(fn(nnx.merge(graphdef, state, copy=True), *args)), state


def call(model: nnx.Module) -> tuple[Callable[..., Any], Any]:
    return as_function(lambda m, *args: m(*args), model)


def grads_inside(model: nnx.Module) -> tuple[Callable[..., Any], Any]:
    grad_fn = mpjax.nnx.value_and_grad(total)
    return as_function(lambda m, *args: grad_fn(NO_SCALE, m, *args)[1], model)


def grads_outside(model: nnx.Module) -> tuple[Callable[..., Any], Any]:
    return as_function(nnx.grad(total), model)


def product_dtypes(run: tuple[Callable[..., Any], Any], *args: Any) -> set[str]:
    fn, state = run
    return {dtype for pair in operand_dtypes(fn, state, *args) for dtype in pair}


def dtypes(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.dtype.name, nnx.as_pure(tree))


def assert_near(actual: Any, expected: Any, fraction: float = 0.03) -> None:
    """Equal up to a share of the largest entry of the whole tree."""
    actual, expected = (jax.tree.leaves(nnx.as_pure(tree)) for tree in (actual, expected))
    largest = max(float(np.abs(np.asarray(x, np.float64)).max()) for x in expected)
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(
            np.asarray(a, np.float64), np.asarray(e, np.float64), rtol=0, atol=fraction * largest
        )


# -------------------------------------------------------------------------------- models with a map


class Attention(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.q, self.k, self.v, self.out = (nnx.Linear(8, 8, rngs=rngs) for _ in range(4))

    def __call__(self, x: jax.Array) -> jax.Array:
        weights = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", self.q(x), self.k(x)))
        return self.out(jnp.einsum("bqk,bkd->bqd", weights, self.v(x)))


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.attn = Attention(rngs)
        self.mlp = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attn(self.norm(x))
        return x + self.mlp(x)


class Model(nnx.Module):
    """Blocks in a list, or stacked in `nnx.scan`, each with and without `nnx.remat`."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.embed = nnx.Linear(8, 8, rngs=rngs())
        self.head = nnx.Linear(8, 3, rngs=rngs())
        if "scan" in how:
            self.blocks = nnx.split_rngs(splits=2)(nnx.vmap(Block))(rngs())
        else:
            self.blocks = nnx.List([Block(rngs()), Block(rngs())])

    def __call__(self, x: jax.Array) -> jax.Array:
        def run(x: jax.Array, block: Block) -> jax.Array:
            return block(x)

        if "remat" in self.how:
            run = nnx.remat(run)
        x = self.embed(x)
        if "scan" in self.how:
            x = nnx.scan(run, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)
        else:
            for block in self.blocks:
                x = run(x, block)
        return self.head(x)


HOW = pytest.mark.parametrize("how", ["loop", "remat", "scan", "scan of remat"])
ATTENTION_FLOAT32 = {r".*attn.*": "p=f32,c=f32,o=bf16", "*": BF16}


@HOW
@pytest.mark.parametrize("grads_of", [grads_inside, grads_outside], ids=["inside", "outside"])
def test_a_map_changes_exactly_the_modules_it_names_forward_and_backward(how: str, grads_of: Any) -> None:
    fn, state = grads_of(apply_policy(Model(how), ATTENTION_FLOAT32))
    found = product_dtypes_by_scope(fn, state, X)
    assert {path.split("/")[-1] for path in found} == {"q", "k", "v", "out", "attn", "mlp", "embed", "head"}
    for path, dtypes in found.items():
        assert dtypes == ({"float32"} if "attn" in path else {"bfloat16"}), path


@HOW
def test_a_map_may_also_name_the_half_precision_modules(how: str) -> None:
    policies = mpjax.PolicyMap({r"blocks(/\d)?/attn": F16}, default="float32")
    fn, state = grads_inside(apply_policy(Model(how), policies))
    for path, dtypes in product_dtypes_by_scope(fn, state, X).items():
        assert dtypes == ({"float16"} if "attn" in path else {"float32"}), path


@pytest.mark.parametrize("how", ["loop", "scan of remat"])
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_a_map_reaches_the_program_for_accelerators(how: str, platform: str) -> None:
    fn, state = grads_inside(apply_policy(Model(how), ATTENTION_FLOAT32))
    exported, traced = exported_matmuls(fn, state, X, platform=platform), operand_dtypes(fn, state, X)
    assert set(exported) == {("bf16", "bf16"), ("f32", "f32")}
    # Lowering may drop products whose result is not used, but never changes what the others take.
    for name, exported_name in (("bfloat16", "bf16"), ("float32", "f32")):
        assert 0 < exported.count((exported_name,) * 2) <= traced.count((name,) * 2)
    fn, state = grads_inside(apply_policy(Model(how), BF16))
    assert set(exported_matmuls(fn, state, X, platform=platform)) == {("bf16", "bf16")}


def test_gradients_are_float32_and_near_those_of_float32() -> None:
    found, expected = (
        jax.jit(fn)(state, X)
        for fn, state in (
            grads_inside(apply_policy(Model("scan of remat"), policies))
            for policies in (ATTENTION_FLOAT32, "float32")
        )
    )
    assert set(jax.tree.leaves(dtypes(found))) == {"float32"}
    assert_near(found, expected, 0.05)


def test_a_class_governs_its_instances_and_what_is_below_them() -> None:
    policies = mpjax.PolicyMap({Attention: "p=f32,c=f32,o=bf16"}, default=BF16)
    fn, state = grads_inside(apply_policy(Model("loop"), policies))
    for path, dtypes in product_dtypes_by_scope(fn, state, X).items():
        assert dtypes == ({"float32"} if "attn" in path else {"bfloat16"}), path


def test_a_module_that_nothing_matches_inherits_from_its_parent() -> None:
    fn, state = call(apply_policy(Model("loop"), {"blocks/0": "p=f32,c=f32,o=bf16", "*": BF16}))
    for path, dtypes in product_dtypes_by_scope(fn, state, X).items():
        assert dtypes == ({"float32"} if "blocks/0" in path else {"bfloat16"}), path


def test_a_pattern_that_governs_no_module_is_an_error_that_names_the_closest_paths() -> None:
    with pytest.raises(
        ValueError, match=r"'blocks/0/atn' governs no module.*closest paths are 'blocks/0/attn'"
    ):
        apply_policy(Model("loop"), {"blocks/0/atn": "float32", "*": BF16})


def test_a_map_with_patterns_around_a_plain_model_is_refused_rather_than_ignored() -> None:
    with pytest.raises(
        ValueError, match=r"nnx module Model does not carry them.*apply_policy\(model, policies\)"
    ):
        autocast(lambda m, x: m(x), ATTENTION_FLOAT32)(Model("loop"), X)


def test_what_is_no_nnx_module_is_refused_with_the_way_out() -> None:
    with pytest.raises(
        TypeError, match=r"expects a flax.nnx module, got Dense.*mpjax.autocast\(fn, policies\)"
    ):
        apply_policy(linen.Dense(3), BF16)


# ------------------------------------------------------------------------------------ the copied model


class Layers(nnx.Module):
    def __init__(self) -> None:
        self.first = nnx.Linear(8, 8, rngs=rngs())
        self.norm = nnx.LayerNorm(8, rngs=rngs())
        self.last = nnx.Linear(8, 3, rngs=rngs())

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(self.norm(self.first(x)))


def test_the_original_model_is_untouched() -> None:
    model = Layers()
    graphdef = nnx.graphdef(model)
    copied = apply_policy(model, "bf16")
    assert nnx.graphdef(model) == graphdef
    assert set(jax.tree.leaves(dtypes(nnx.state(model)))) == {"float32"}
    assert product_dtypes(call(model), X) == {"float32"}
    assert copied.first.kernel is not model.first.kernel
    assert type(model) is Layers


def test_the_copy_is_an_instance_of_the_same_classes_with_the_same_values() -> None:
    model = Layers()
    copied = apply_policy(model, BF16)
    assert isinstance(copied, Layers)
    assert isinstance(copied.first, nnx.Linear)
    assert type(copied).__name__ == "Layers"
    jax.tree.map(np.testing.assert_array_equal, nnx.as_pure(nnx.state(copied)), nnx.as_pure(nnx.state(model)))


def test_parameters_are_stored_in_their_param_dtype_and_what_is_no_parameter_is_not() -> None:
    model = nnx.Sequential(nnx.Linear(8, 8, rngs=rngs()), nnx.BatchNorm(8, rngs=rngs()))
    copied = apply_policy(model, "p=bf16,c=bf16,o=f32")
    assert set(jax.tree.leaves(dtypes(nnx.state(copied, nnx.Param)))) == {"bfloat16"}
    assert set(jax.tree.leaves(dtypes(nnx.state(copied, nnx.BatchStat)))) == {"float32"}


def test_parameters_in_containers_are_stored_in_their_param_dtype() -> None:
    class Contained(nnx.Module):
        def __init__(self) -> None:
            self.list = nnx.List([nnx.Param(jnp.ones((8, 8)))])
            self.dict = nnx.Dict(bias=nnx.Param(jnp.ones(8)))

    copied = apply_policy(Contained(), "bf16")
    assert set(jax.tree.leaves(dtypes(nnx.state(copied)))) == {"bfloat16"}


def test_the_parameters_of_an_abstract_model_get_their_param_dtype() -> None:
    abstract = nnx.eval_shape(Layers)
    copied = apply_policy(abstract, "bf16")
    assert {v.dtype.name for v in jax.tree.leaves(nnx.as_pure(nnx.state(copied)))} == {"bfloat16"}


def test_a_model_built_in_eval_shape_or_jit_follows_the_policy() -> None:
    assert nnx.eval_shape(lambda: apply_policy(Layers(), "bf16")).first.kernel.dtype == jnp.bfloat16
    assert product_dtypes(call(nnx.jit(lambda: apply_policy(Layers(), BF16))()), X) == {"bfloat16"}


def test_a_model_under_policies_gets_the_new_ones() -> None:
    copied = apply_policy(apply_policy(Layers(), BF16), F16)
    assert product_dtypes(call(copied), X) == {"float16"}
    assert type(copied).__mro__[1] is Layers


@pytest.mark.parametrize(
    "remade",
    [
        copy.deepcopy,
        copy.copy,
        lambda m: pickle.loads(pickle.dumps(m)),
        nnx.clone,
        lambda m: nnx.merge(*nnx.split(m)),
        lambda m: nnx.merge(nnx.graphdef(m), nnx.state(PlainLinear())),
    ],
    ids=["deepcopy", "copy", "pickle", "clone", "split and merge", "merge with a plain state"],
)
def test_copies_of_the_model_keep_the_policy(remade: Callable[[Any], Any]) -> None:
    model = apply_policy(PlainLinear(), BF16)
    again = remade(model)
    assert product_dtypes(call(again), X) == {"bfloat16"}
    assert mpjax.nnx.policies_of(again) == mpjax.nnx.policies_of(model)


class PlainLinear(nnx.Module):
    def __init__(self) -> None:
        self.kernel = nnx.Param(normal(8, 3))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.kernel


def test_graphdefs_under_equal_policies_are_equal_so_that_jit_does_not_retrace() -> None:
    a, b = (nnx.graphdef(apply_policy(Layers(), BF16)) for _ in range(2))
    assert (a, hash(a)) == (b, hash(b))
    assert a != nnx.graphdef(apply_policy(Layers(), F16))
    assert a != nnx.graphdef(Layers())


def test_the_model_prints() -> None:
    assert "Layers(" in repr(apply_policy(Layers(), BF16))
    assert "Linear(" in str(apply_policy(Layers(), BF16))


# --------------------------------------------------------------------- what modules are given and hand over


class Spy(nnx.Module):
    """Notes the dtype that it is given and hands it on."""

    seen: list = []

    def __call__(self, x: jax.Array, **others: Any) -> jax.Array:
        Spy.seen.append((x.dtype.name, *(others[name].dtype.name for name in sorted(others))))
        return x


@pytest.fixture
def seen() -> list:
    Spy.seen = []
    return Spy.seen


def test_activations_between_layers_are_half_and_the_logits_float32(seen: list) -> None:
    model = nnx.Sequential(Spy(), nnx.Linear(8, 8, rngs=rngs()), Spy(), nnx.LayerNorm(8, rngs=rngs()), Spy())
    out = jax.eval_shape(lambda x: apply_policy(model, BF16)(x), X)
    assert seen == [("float32",), ("bfloat16",), ("bfloat16",)]
    assert out.dtype == jnp.float32


@pytest.mark.parametrize(
    ("policy", "dtype"), [(BF16, "float32"), ("bf16", "bfloat16"), ("p=f32,c=bf16,o=f16", "float16")]
)
def test_the_output_follows_the_policy(policy: str, dtype: str) -> None:
    assert jax.eval_shape(lambda x: apply_policy(Layers(), policy)(x), X).dtype == dtype


def test_a_module_of_another_region_hands_over_its_output_dtype(seen: list) -> None:
    model = nnx.Sequential(nnx.LayerNorm(8, rngs=rngs()), Spy(), nnx.Linear(8, 8, rngs=rngs()))
    policies = {"layers/0": "p=f32,c=f32,o=f16", "*": BF16}
    apply_policy(model, policies)(X)
    assert seen == [("float16",)]


def test_inputs_are_widened_to_the_compute_dtype_and_never_narrowed(seen: list) -> None:
    half = jnp.ones(2, jnp.float16)
    apply_policy(Spy(), "float32")(half, time=jnp.float32([999.0]), ids=jnp.arange(2))
    apply_policy(Spy(), F16)(half, time=jnp.float32([999.0]), ids=jnp.arange(2))
    assert seen == [("float32", "int32", "float32"), ("float16", "int32", "float32")]


class Structures(nnx.Module):
    def __call__(self, x: jax.Array) -> Any:
        return {"x": (x, None)}, jnp.sum(x), jnp.array([50257]), "name"


def test_every_structure_comes_back_and_a_scalar_is_never_narrowed() -> None:
    tree, scalar, ids, name = apply_policy(Structures(), "bf16")(X)
    assert (tree["x"][0].dtype, tree["x"][1], scalar.dtype) == (jnp.bfloat16, None, jnp.float32)
    assert (ids.tolist(), name) == ([50257], "name")


class Methods(nnx.Module):
    def __init__(self) -> None:
        self.linear = nnx.Linear(8, 8, rngs=rngs())

    @staticmethod
    def double(x: jax.Array) -> jax.Array:
        return 2 * x

    @property
    def width(self) -> int:
        return self.linear.out_features

    def helper(self, x: jax.Array) -> jax.Array:
        return self.double(self.linear(x))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.helper(x) * self.width


def test_every_public_method_enters_the_region_and_own_methods_are_no_boundary() -> None:
    model = apply_policy(Methods(), "p=f32,c=bf16,o=f16")
    assert model.helper(X).dtype == jnp.float16
    fn, state = call(model)
    program = str(jax.make_jaxpr(fn)(state, X))
    assert program.count("new_dtype=float16") == 1  # a boundary at `helper` would make it twice
    assert (model.width, model.double(2)) == (8, 4)


class Decorated(nnx.Module):
    def __init__(self) -> None:
        self.linear = nnx.Linear(8, 8, rngs=rngs())

    @nnx.jit
    def __call__(self, x: jax.Array) -> jax.Array:
        return self.hidden(x)

    @nnx.remat
    def hidden(self, x: jax.Array) -> jax.Array:
        return self.linear(x)


class Derived(Decorated):
    def __call__(self, x: jax.Array) -> jax.Array:
        return super().__call__(x) + self.linear(x)


@pytest.mark.parametrize("cls", [Decorated, Derived])
def test_decorated_and_inherited_methods_follow_the_policy(cls: type) -> None:
    model = apply_policy(cls(), BF16)
    assert model(X).dtype == jnp.float32
    for run in (call(model), grads_inside(model), grads_outside(model)):
        assert product_dtypes(run, X) == {"bfloat16"}


def test_full_precision_holds_for_the_modules_inside_it() -> None:
    model = apply_policy(Layers(), BF16)
    run = as_function(lambda m, x: full_precision(lambda x: m(x))(x), model)
    assert product_dtypes(run, X) == {"float32"}


def test_a_plain_model_follows_the_policy_of_the_function_that_calls_it() -> None:
    run = as_function(autocast(lambda m, x: m(x), BF16), Layers())
    assert product_dtypes(run, X) == {"bfloat16"}


# ------------------------------------------------------------------------------ shared modules and weights


class Tied(nnx.Module):
    def __init__(self) -> None:
        self.embed = nnx.Embed(4, 2, embedding_init=nnx.initializers.ones, rngs=rngs())
        self.head = self.embed

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.head.attend(self.embed(tokens))


def test_modules_that_the_model_shares_stay_shared() -> None:
    model = apply_policy(Tied(), BF16)
    assert model.head is model.embed
    assert len(jax.tree.leaves(nnx.state(model))) == 1
    model.embed.embedding[...] = jnp.zeros((4, 2))
    assert jnp.all(model.head.embedding[...] == 0)


@pytest.mark.parametrize("policy", [BF16, F16])
def test_a_tied_embedding_adds_up_both_gradients_in_float32(policy: str) -> None:
    grad_fn = nnx.jit(mpjax.nnx.value_and_grad(lambda m, tokens: jnp.sum(m(tokens))))
    _, grads, _ = grad_fn(NO_SCALE, apply_policy(Tied(), policy), jnp.zeros(1000, jnp.int32))
    # 1000 lookups times 4 rows of the head, and 1000 of the head itself; bfloat16 has no 5000.
    assert grads["embed"]["embedding"][...][:, 0].tolist() == [5000.0, 1000.0, 1000.0, 1000.0]


@pytest.mark.parametrize("policy", [BF16, F16])
def test_a_weight_used_1000_times_in_scan_has_gradient_1000(policy: str) -> None:
    class Reuse(nnx.Module):
        def __init__(self) -> None:
            ones = nnx.initializers.ones
            self.linear = nnx.Linear(2, 1, use_bias=False, kernel_init=ones, rngs=rngs())

        def __call__(self, xs: jax.Array) -> jax.Array:
            def body(total: jax.Array, x: jax.Array, linear: nnx.Module) -> jax.Array:
                return total + jnp.sum(linear(x).astype(jnp.float32))

            scan = nnx.scan(body, in_axes=(nnx.Carry, 0, None), out_axes=nnx.Carry)
            return scan(jnp.float32(0), xs, self.linear)

    grad_fn = nnx.jit(mpjax.nnx.value_and_grad(lambda m, xs: m(xs)))
    _, grads, _ = grad_fn(NO_SCALE, apply_policy(Reuse(), policy), jnp.ones((1000, 1, 2)))
    assert grads["linear"]["kernel"][...].tolist() == [[1000.0], [1000.0]]


# ------------------------------------------------------------------------------------------- state


@pytest.mark.parametrize("policy", [F16, "f16"])
def test_the_running_variance_of_large_values_is_float32_and_right(policy: str) -> None:
    model = apply_policy(nnx.BatchNorm(1, momentum=0.9, rngs=rngs()), policy)
    nnx.jit(lambda m, x: m(x))(model, jnp.array([[300.0], [-300.0]], jnp.float16))
    assert model.var[...].dtype == jnp.float32
    np.testing.assert_allclose(model.var[...], [9000.9], rtol=1e-6)


def test_the_layer_norm_of_large_half_values_is_right() -> None:
    model = apply_policy(nnx.LayerNorm(4, rngs=rngs()), "f16")
    out = model(jnp.array([[0, 300, -300, 0]], jnp.float16))
    assert out.dtype == jnp.float16
    np.testing.assert_allclose(out[0], [0, 1.414, -1.414, 0], atol=1e-3)


class Own(nnx.Variable):
    pass


class Stateful(nnx.Module):
    """Writes state of its own, in containers, and of a child."""

    def __init__(self) -> None:
        self.linear = nnx.Linear(8, 8, rngs=rngs())
        self.mean, self.whole = Own(jnp.zeros(8)), nnx.BatchStat(jnp.zeros(8))
        self.dict, self.list = nnx.Dict(x=nnx.BatchStat(jnp.zeros(8))), nnx.List([Own(jnp.zeros(8))])
        self.child = nnx.BatchNorm(8, rngs=rngs())
        self.count = Own(jnp.array(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.linear(x)
        mean = jnp.mean(y, (0, 1))
        for variable in (self.mean, self.dict["x"], self.list[0], self.child.mean):
            variable[...] = mean
        for variable in (self.whole, self.dict["x"], self.list[0], self.child.var):
            variable.set_value(mean)
        self.count[...] += 1
        return y


@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit], ids=["eager", "jit"])
def test_state_keeps_its_stored_dtype_wherever_it_is_kept_and_whoever_writes_it(wrap: Any) -> None:
    model = apply_policy(Stateful(), "bf16")
    before = dtypes(nnx.state(model, nnx.Not(nnx.Param)))
    wrap(lambda m, x: m(x))(model, X)
    assert dtypes(nnx.state(model, nnx.Not(nnx.Param))) == before
    assert model.count[...] == 1


def test_state_that_is_the_carry_of_a_scan_keeps_its_dtype() -> None:
    model = apply_policy(nnx.Sequential(nnx.Linear(8, 8, rngs=rngs()), nnx.BatchNorm(8, rngs=rngs())), BF16)

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    def run(model: nnx.Module, x: jax.Array) -> Any:
        return model, model(x)

    nnx.jit(run)(model, X)
    assert set(jax.tree.leaves(dtypes(nnx.state(model, nnx.BatchStat)))) == {"float32"}


def test_a_decoding_cache_keeps_its_dtype_and_decodes_as_in_float32() -> None:
    def decode(model: nnx.Module) -> jax.Array:
        step = nnx.jit(lambda m, x: m(x))
        return jnp.concatenate([step(model, X[:, i : i + 1]) for i in range(3)], 1)

    plain = nnx.MultiHeadAttention(2, 8, decode=True, rngs=rngs())
    plain.init_cache((2, 4, 8))
    model = apply_policy(plain, BF16)
    assert_near(decode(model), decode(plain))
    assert dtypes(nnx.state(model, nnx.Cache)) == dtypes(nnx.state(plain, nnx.Cache))
    assert model.cached_key[...].dtype == jnp.float32


def test_attention_to_nothing_is_finite_and_so_is_its_gradient() -> None:
    model = apply_policy(nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs()), "f16")
    mask = jnp.zeros((2, 1, 4, 4), bool)

    def loss(model: nnx.Module, x: jax.Array) -> jax.Array:
        return jnp.sum(model(x, mask=mask).astype(jnp.float32))

    value, _, finite = nnx.jit(mpjax.nnx.value_and_grad(loss))(NO_SCALE, model, X)
    assert (bool(jnp.isfinite(value)), bool(finite)) == (True, True)


@pytest.mark.parametrize("policy", [F16])
def test_dropout_masks_do_not_depend_on_the_policy(policy: str) -> None:
    def model() -> nnx.Module:
        return nnx.Sequential(nnx.Linear(8, 64, rngs=rngs()), nnx.Dropout(0.5, rngs=nnx.Rngs(1)))

    run = nnx.jit(lambda m, x: m(x))
    kept = np.asarray(run(model(), X) != 0)
    assert 0.3 < kept.mean() < 0.7
    np.testing.assert_array_equal(run(apply_policy(model(), policy), X) != 0, kept)


# ------------------------------------------------------------------------- layers and transformations


@pytest.mark.parametrize("cell", [nnx.LSTMCell, nnx.OptimizedLSTMCell, nnx.GRUCell, nnx.SimpleCell])
def test_recurrent_cells_run_in_rnn_and_take_half_operands(cell: Any) -> None:
    model = apply_policy(nnx.RNN(cell(8, 6, rngs=rngs())), BF16)
    assert product_dtypes(grads_inside(model), X) == {"bfloat16"}


@pytest.mark.parametrize(("cell", "policy"), [(nnx.LSTMCell, F16), (nnx.GRUCell, BF16)])
def test_a_recurrent_cell_hands_its_carry_back_in_the_dtype_it_came_in(cell: Any, policy: str) -> None:
    plain = nnx.RNN(cell(8, 6, rngs=rngs()), return_carry=True)
    run = nnx.jit(lambda m, x: m(x))
    found, expected = run(apply_policy(plain, policy), X), run(plain, X)
    assert set(jax.tree.leaves(dtypes(found))) == {"float32"}
    assert_near(found, expected)


class Branches(nnx.Module):
    def __init__(self, how: str) -> None:
        self.how = how
        self.a, self.b = nnx.Linear(8, 8, rngs=rngs()), nnx.Linear(8, 8, rngs=rngs())

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.how == "cond":
            return nnx.cond(x[0, 0, 0] > 0, lambda m, x: m.a(x), lambda m, x: m.b(x), self, x)
        if self.how == "vmap":
            return nnx.vmap(lambda m, x: m.a(x), in_axes=(None, 0))(self, x)
        return nnx.while_loop(lambda c: c[1][0, 0, 0] > 1, lambda c: (c[0], c[0].a(c[1])), (self, self.b(x)))[
            1
        ]


@pytest.mark.parametrize("how", ["cond", "vmap", "while"])
def test_branches_and_loops_over_modules_follow_the_policy(how: str) -> None:
    model = apply_policy(Branches(how), BF16)
    assert product_dtypes(call(model), X) == {"bfloat16"}


def test_a_changing_loop_carry_is_explained_with_the_module() -> None:
    class Loop(nnx.Module):
        def __init__(self) -> None:
            self.linear = nnx.Linear(8, 8, rngs=rngs())

        def __call__(self, x: jax.Array) -> jax.Array:
            return nnx.fori_loop(0, 2, lambda i, c: (c[0], c[0](c[1])), (self.linear, x))[1]

    with pytest.raises(TypeError, match="carry") as error:
        apply_policy(nnx.Sequential(Loop()), BF16)(X)
    (note,) = [n for n in error.value.__notes__ if n.startswith("mpjax:")]
    assert "module 'layers/0' (Loop)" in note
    assert "one side is float32, the other bfloat16" in note


@pytest.mark.parametrize(
    "make",
    [
        lambda: nnx.Sequential(nnx.Linear(8, 8, rngs=rngs()), jax.nn.relu, nnx.RMSNorm(8, rngs=rngs())),
        lambda: nnx.Sequential(nnx.Conv(8, 8, (3,), rngs=rngs()), nnx.ConvTranspose(8, 4, (3,), rngs=rngs())),
        lambda: nnx.LinearGeneral((4, 8), (2, 3), axis=(-2, -1), rngs=rngs()),
        lambda: nnx.Einsum("abc,cd->abd", (8, 3), rngs=rngs()),
        lambda: nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs()),
        lambda: nnx.LoRALinear(8, 4, lora_rank=2, rngs=rngs()),
        lambda: nnx.WeightNorm(nnx.Linear(8, 4, rngs=rngs()), rngs=rngs()),
        lambda: nnx.bridge.ToNNX(linen.Dense(4), rngs=rngs()).lazy_init(X),
    ],
    ids=["norms", "convolutions", "general", "einsum", "attention", "lora", "weight norm", "bridge"],
)
def test_layers_of_flax_follow_the_policy_without_a_dtype(make: Callable[[], nnx.Module]) -> None:
    model = apply_policy(make(), BF16)
    fn, state = call(model)
    assert jax.eval_shape(fn, state, X).dtype == jnp.float32
    for run in (grads_inside(model), grads_outside(model)):
        assert product_dtypes(run, X) == {"bfloat16"}
        fn, state = run
        assert set(jax.tree.leaves(dtypes(jax.eval_shape(fn, state, X)))) == {"float32"}


@pytest.mark.parametrize("inside", [True, False], ids=["computed inside", "passed in"])
def test_sinusoids_of_2048_positions_are_within_2_thousandths(inside: bool) -> None:
    class Sinusoid(nnx.Module):
        def __call__(self, positions: jax.Array) -> jax.Array:
            if inside:
                positions = jnp.arange(2048.0)
            return jnp.sin(positions[:, None] @ (10000.0 ** (-jnp.arange(16) / 16))[None, :])

    positions = jnp.arange(2048.0)
    out = nnx.jit(lambda m, x: m(x))(apply_policy(Sinusoid(), BF16), positions)
    np.testing.assert_allclose(out, Sinusoid()(positions), atol=0.002)


# ------------------------------------------------------------------------------------------- training


def trained(policy: str, **options: Any) -> tuple[nnx.Module, Any]:
    model = apply_policy(nnx.Sequential(nnx.Linear(8, 8, rngs=rngs()), nnx.BatchNorm(8, rngs=rngs())), policy)
    return model, mpjax.nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param, **options)


@nnx.jit
def take_step(model: nnx.Module, optimizer: Any, x: jax.Array) -> Any:
    grad_fn = mpjax.nnx.value_and_grad(lambda m, x: jnp.mean(m(x) ** 2), has_aux=False)
    loss, grads, finite = grad_fn(optimizer.loss_scale, model, x)
    optimizer.apply_gradients(model, grads, finite)
    return loss, finite


def test_a_step_trains_and_the_state_of_model_and_optimizer_stays_float32() -> None:
    model, optimizer = trained(F16)
    before = nnx.as_pure(nnx.state(model, nnx.Param))
    loss, finite = take_step(model, optimizer, X)
    assert (loss.dtype, bool(finite), int(optimizer.step[...]), int(optimizer.skipped[...])) == (
        "float32",
        True,
        1,
        0,
    )
    assert set(jax.tree.leaves(dtypes(nnx.state(model)))) == {"float32"}
    assert set(jax.tree.leaves(dtypes(nnx.state(optimizer.opt_state)))) <= {
        "float32",
        "int32",
        "uint32",
    }
    after = nnx.as_pure(nnx.state(model, nnx.Param))
    assert jnp.any(after["layers"][0]["kernel"] != before["layers"][0]["kernel"])


def test_a_step_with_infinite_gradients_changes_nothing_but_scale_and_counters() -> None:
    model, optimizer = trained(F16)
    take_step(model, optimizer, X)
    before = jax.tree.map(np.asarray, nnx.as_pure((nnx.state(model), nnx.state(optimizer.opt_state))))
    _, finite = take_step(model, optimizer, X.at[0].set(jnp.inf))
    after = jax.tree.map(np.asarray, nnx.as_pure((nnx.state(model), nnx.state(optimizer.opt_state))))
    assert not bool(finite)
    jax.tree.map(np.testing.assert_array_equal, after, before)
    assert float(optimizer.loss_scale.loss_scale) == 2.0**14
    assert (int(optimizer.step[...]), int(optimizer.skipped[...])) == (2, 1)


def test_gradients_of_a_loss_that_the_optimizer_scaled_are_unscaled_by_it() -> None:
    @functools.partial(nnx.jit, static_argnums=0)
    def step(scale: float) -> Any:
        model = apply_policy(Layers(), F16)
        loss_scale = mpjax.StaticLossScale(scale)
        optimizer = mpjax.nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param, loss_scale=loss_scale)
        grads = nnx.grad(lambda m: optimizer.scale(total(m, X)))(model)
        return optimizer.update(model, grads), nnx.state(model, nnx.Param)

    (finite, scaled), (_, plain) = step(1024.0), step(1.0)
    assert bool(finite)
    assert_near(scaled, plain, 0.01)


def test_value_and_grad_returns_the_unscaled_loss_and_float32_gradients() -> None:
    model = apply_policy(Layers(), F16)
    run = mpjax.nnx.value_and_grad(lambda m, x: (total(m, x), {"n": jnp.array(3)}), has_aux=True)
    run = nnx.jit(run)
    (value, aux), grads, finite = run(mpjax.StaticLossScale(1024.0), model, X)
    (expected, _), expected_grads, _ = run(NO_SCALE, model, X)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    assert (int(aux["n"]), bool(finite)) == (3, True)
    assert set(jax.tree.leaves(dtypes(grads))) == {"float32"}
    assert_near(grads, expected_grads, 0.01)


def test_value_and_grad_of_a_model_without_a_policy_names_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"Layers carries no policy.*apply_policy\(model, policies\)"):
        mpjax.nnx.value_and_grad(total)(NO_SCALE, Layers(), X)


@pytest.mark.parametrize(
    "loss", [lambda m, x: m(x), lambda m, x: jnp.sum(m(x)).astype(jnp.bfloat16), lambda m, x: 1.0]
)
def test_a_loss_that_is_no_float32_scalar_is_refused(loss: Any) -> None:
    with pytest.raises(
        ValueError, match=r"float32 scalar, got (dtype (float32|bfloat16) and shape|float 1.0)"
    ):
        mpjax.nnx.value_and_grad(loss)(NO_SCALE, apply_policy(Layers(), BF16), X)


def test_masters_that_were_overwritten_with_cast_values_are_refused() -> None:
    model = apply_policy(Layers(), BF16)
    nnx.update(model, mpjax.cast_floating(nnx.state(model, nnx.Param), jnp.bfloat16))
    with pytest.raises(ValueError, match=r"first/(kernel|bias)' is bfloat16, its policy stores float32"):
        nnx.eval_shape(mpjax.nnx.value_and_grad(total), NO_SCALE, model, X)


def test_only_what_wrt_names_is_differentiated_and_trained() -> None:
    model = apply_policy(nnx.LoRALinear(8, 4, lora_rank=2, rngs=rngs()), "p=bf16,c=bf16,o=f32")
    base = np.asarray(model.kernel[...])
    grad_fn = functools.partial(mpjax.nnx.value_and_grad(total, wrt=nnx.LoRAParam), NO_SCALE)
    _, grads, finite = nnx.jit(grad_fn)(model, X)
    assert {path[-1] for path, _ in nnx.to_flat_state(grads)} == {"lora_a", "lora_b"}
    optimizer = mpjax.nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.LoRAParam)
    optimizer.apply_gradients(model, grads, finite)
    np.testing.assert_array_equal(model.kernel[...], base)
