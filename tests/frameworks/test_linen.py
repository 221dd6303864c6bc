"""flax.linen models under policies: which module computes in what, and what it hands over and stores."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from flax.core import FrozenDict, freeze
from jax import lax
from programs import exported_products, operand_dtypes, trace
from scopes import product_dtypes_by_scope

import mpjax
from mpjax import autocast, full_precision

BF16 = "p=f32,c=bf16,o=f32"
F16 = "p=f32,c=f16,o=f32"
NO_SCALE = mpjax.NoOpLossScale()
KEY = jax.random.key(0)


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


X = normal(2, 4, 8)


def initial(model: nn.Module, *args: Any) -> Any:
    """Variables of a model, compiled once rather than operation by operation."""
    return jax.jit(model.init)({"params": KEY, "dropout": KEY}, *(args or (X,)))


def abstract(model: nn.Module, *args: Any) -> Any:
    """Shapes of the variables, for tests that trace and run nothing."""
    return jax.eval_shape(model.init, {"params": KEY, "dropout": KEY}, *(args or (X,)))


def values(model: nn.Module, policies: Any, variables: Any, *args: Any) -> Any:
    return jax.jit(autocast(model.apply, policies))(variables, *(args or (X,)))


def loss_grads(model: nn.Module, policies: Any, *args: Any) -> Callable[..., Any]:
    """Gradients of the summed output with respect to the variables, the backward pass in the policy."""

    def loss(variables: Any) -> jax.Array:
        return jnp.sum(jnp.sin(model.apply(variables, *args)))

    return functools.partial(mpjax.value_and_grad(loss, policies), NO_SCALE)


def outside_grads(model: nn.Module, policies: Any, *args: Any) -> Callable[..., Any]:
    """The same, differentiated from outside of the policy."""
    return jax.grad(lambda variables: jnp.sum(jnp.sin(autocast(model.apply, policies)(variables, *args))))


def assert_near(actual: Any, expected: Any, fraction: float = 0.03) -> None:
    """Equal up to a share of the largest entry of the whole tree."""
    largest = max(float(np.abs(np.asarray(x, np.float64)).max()) for x in jax.tree.leaves(expected))
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(
            np.asarray(a, np.float64), np.asarray(e, np.float64), rtol=0, atol=fraction * largest
        )


def dtypes_of(tree: Any) -> set[str]:
    return {x.dtype.name for x in jax.tree.leaves(tree)}


def seen_dtypes(model: nn.Module, policies: Any, *args: Any) -> dict[str, str]:
    """What each module of a model gets as its first argument and hands over, by path."""
    variables = abstract(model, *args)
    seen: dict[str, str] = {}

    def spy(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        out = next_fun(*args, **kwargs)
        if context.method_name == "__call__":
            seen["/".join(context.module.path)] = f"{args[0].dtype.name} -> {out.dtype.name}"
        return out

    with nn.intercept_methods(spy):  # outside of mpjax's interceptor: it sees what callers see
        jax.eval_shape(autocast(model.apply, policies), variables, *args)
    return seen


# -------------------------------------------------------------------------------- models with a map


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = (nn.Dense(8, name=name)(x) for name in ("q", "k", "v"))
        weights = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k))
        return nn.Dense(8, name="out")(jnp.einsum("bqk,bkd->bqd", weights, v))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: None = None) -> tuple[jax.Array, None]:
        x = x + Attention(name="attn")(nn.LayerNorm(name="norm")(x))
        return x + nn.Dense(8, name="mlp")(x), None


class Model(nn.Module):
    """Blocks in a Python loop, in `nn.scan`, or in `nn.scan` of `nn.remat`."""

    how: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(8, name="embed")(x)
        if self.how == "loop":
            for i in range(2):
                x, _ = Block(name=f"block_{i}")(x)
        elif self.how == "remat":
            for i in range(2):
                x, _ = nn.remat(Block)(name=f"block_{i}")(x)
        else:
            block = nn.remat(Block) if self.how == "scan of remat" else Block
            scanned = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
            x, _ = scanned(name="block")(x, None)
        return nn.Dense(3, name="head")(x)


HOW = pytest.mark.parametrize("how", ["loop", "remat", "scan", "scan of remat"])
ATTENTION_FLOAT32 = {r".*attn.*": "p=f32,c=f32,o=bf16", "*": BF16}


@HOW
@pytest.mark.parametrize("grads_of", [loss_grads, outside_grads], ids=["inside", "outside"])
def test_a_map_changes_exactly_the_modules_it_names_forward_and_backward(how: str, grads_of: Any) -> None:
    model = Model(how)
    variables = abstract(model)
    found = product_dtypes_by_scope(grads_of(model, ATTENTION_FLOAT32, X), variables)
    assert {path.split("/")[-1] for path in found} == {"q", "k", "v", "out", "mlp", "embed", "head", "attn"}
    for path, dtypes in found.items():
        assert dtypes == ({"float32"} if "attn" in path else {"bfloat16"}), path


@HOW
def test_a_map_may_also_name_the_half_precision_modules(how: str) -> None:
    model = Model(how)
    policies = mpjax.PolicyMap({r"block(_\d+)?/attn": F16}, default="float32")
    found = product_dtypes_by_scope(loss_grads(model, policies, X), abstract(model))
    for path, dtypes in found.items():
        assert dtypes == ({"float16"} if "attn" in path else {"float32"}), path


@pytest.mark.parametrize("how", ["loop", "scan of remat"])
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_a_map_reaches_the_program_for_accelerators(how: str, platform: str) -> None:
    model = Model(how)
    grads, variables = loss_grads(model, ATTENTION_FLOAT32, X), abstract(model)
    exported = exported_products(grads, variables, platform=platform)
    traced = operand_dtypes(grads, variables)
    assert set(exported) == {("bf16", "bf16"), ("f32", "f32")}
    # Lowering may drop products whose result is not used, but never changes what the others take.
    for name, exported_name in (("bfloat16", "bf16"), ("float32", "f32")):
        assert 0 < exported.count((exported_name,) * 2) <= traced.count((name,) * 2)
    uniform = loss_grads(model, BF16, X)
    assert set(exported_products(uniform, variables, platform=platform)) == {("bf16", "bf16")}


def test_gradients_under_a_map_are_float32_and_near_those_of_float32() -> None:
    model = Model("scan of remat")
    variables = initial(model)
    _, grads, finite = jax.jit(loss_grads(model, ATTENTION_FLOAT32, X))(variables)
    _, expected, _ = jax.jit(loss_grads(model, "float32", X))(variables)
    assert (dtypes_of(grads), bool(finite)) == ({"float32"}, True)
    assert_near(grads, expected, 0.05)


def test_a_class_governs_its_instances_and_what_is_below_them() -> None:
    model = Model("loop")
    policies = mpjax.PolicyMap({Attention: "p=f32,c=f32,o=bf16"}, default=BF16)
    found = product_dtypes_by_scope(loss_grads(model, policies, X), abstract(model))
    for path, dtypes in found.items():
        assert dtypes == ({"float32"} if "attn" in path else {"bfloat16"}), path


def test_the_first_matching_pattern_wins() -> None:
    model = Model("loop")
    policies = {"block_0/attn/q": "p=f32,c=f16,o=bf16", r".*attn.*": "p=f32,c=f32,o=bf16", "*": BF16}
    found = product_dtypes_by_scope(autocast(model.apply, policies), abstract(model), X)
    in_half = {path for path, dtypes in found.items() if dtypes == {"float16"}}
    assert [path.split("/")[-3:] for path in in_half] == [["block_0", "attn", "q"]]


def test_a_module_that_nothing_matches_inherits_from_its_parent() -> None:
    model = Model("loop")
    policies = {"block_0": "p=f32,c=f32,o=bf16", "*": BF16}
    found = product_dtypes_by_scope(autocast(model.apply, policies), abstract(model), X)
    for path, dtypes in found.items():
        assert dtypes == ({"float32"} if "block_0" in path else {"bfloat16"}), path


@pytest.mark.parametrize("run", ["init", "apply", "jit", "grad"])
def test_a_pattern_that_governs_no_module_is_an_error_that_names_the_closest_paths(run: str) -> None:
    model = Model("loop")
    policies = {"block_0/atn": "float32", "*": BF16}
    variables = abstract(model)
    runs: dict[str, Callable[[], Any]] = {
        "init": lambda: jax.eval_shape(autocast(model.init, policies), KEY, X),
        "apply": lambda: jax.eval_shape(autocast(model.apply, policies), variables, X),
        "jit": lambda: jax.jit(autocast(model.apply, policies)).lower(variables, X),
        "grad": lambda: jax.eval_shape(loss_grads(model, policies, X), variables),
    }
    with pytest.raises(
        ValueError, match=r"'block_0/atn' governs no module.*closest paths are 'block_0/attn'"
    ):
        runs[run]()


def test_a_pattern_hidden_by_a_wider_one_is_an_error_that_says_so() -> None:
    model = Model("loop")
    policies = {r"block_0.*": "float32", "block_0/attn": F16, "*": BF16}
    with pytest.raises(ValueError, match=r"'block_0/attn' matches it, but 'block_0\.\*' comes first"):
        jax.eval_shape(autocast(model.apply, policies), abstract(model), X)


def test_patterns_are_checked_over_all_calls_of_one_wrapper_and_not_when_a_trace_is_reused() -> None:
    model = Model("loop")
    variables = initial(model)
    jitted = jax.jit(model.apply)
    run = autocast(lambda v, x: jitted(v, x), ATTENTION_FLOAT32)
    for _ in range(2):
        assert run(variables, X).dtype == jnp.float32
    assert autocast(jitted, ATTENTION_FLOAT32)(variables, X).dtype == jnp.float32


# ---------------------------------------------------------------- what modules are given and hand over


class Layers(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(8, name="first")(x)
        return nn.Dense(3, name="last")(nn.LayerNorm(name="norm")(x))


def test_activations_between_layers_are_half_and_the_logits_float32() -> None:
    assert seen_dtypes(Layers(), BF16, X) == {
        "": "float32 -> float32",
        "first": "float32 -> bfloat16",
        "norm": "bfloat16 -> bfloat16",
        "last": "bfloat16 -> bfloat16",
    }


def test_the_output_follows_the_policy_and_parameters_stay_float32() -> None:
    variables = jax.eval_shape(autocast(Layers().init, "p=f32,c=bf16,o=bf16", cast_output=False), KEY, X)
    assert dtypes_of(variables) == {"float32"}
    for policy, dtype in (("p=f32,c=bf16,o=bf16", "bfloat16"), ("bf16", "bfloat16"), (F16, "float32")):
        assert jax.eval_shape(autocast(Layers().apply, policy), variables, X).dtype == dtype


def test_a_module_of_another_region_hands_over_its_output_dtype() -> None:
    found = seen_dtypes(Layers(), {"norm": "p=f32,c=f32,o=f16", "*": BF16}, X)
    assert found["norm"] == "bfloat16 -> float16"
    assert found["last"] == "float16 -> bfloat16"


class Inputs(nn.Module):
    """Calls back with the dtypes of what it is given."""

    note: Callable[..., None]

    @nn.compact
    def __call__(self, x: jax.Array, *, time: jax.Array, ids: jax.Array) -> jax.Array:
        self.note((x.dtype.name, time.dtype.name, ids.dtype.name))
        return x


def test_inputs_are_widened_to_the_compute_dtype_and_never_narrowed() -> None:
    for policy, expected in (
        ("float32", ("float32", "float32", "int32")),
        (F16, ("float16", "float32", "int32")),
    ):
        seen: list = []
        x = jnp.ones(2, jnp.float16)
        autocast(Inputs(seen.append).apply, policy)({}, x, time=jnp.float32([999.0]), ids=jnp.arange(2))
        assert seen == [expected]


class Tree(struct.PyTreeNode):
    x: jax.Array
    none: Any
    name: str = struct.field(pytree_node=False, default="name")


class Outputs(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> Any:
        return Tree(x, None), {"loss": jnp.sum(x), "ids": jnp.array([50257])}, (x, None), True


class CallsOutputs(nn.Module):
    note: Callable[..., None]

    @nn.compact
    def __call__(self, x: jax.Array) -> Any:
        out = Outputs()(x)
        self.note(out)
        return out


def test_every_structure_comes_back_and_a_scalar_is_never_narrowed() -> None:
    inner: list = []
    tree, scalars, (x, none), flag = autocast(CallsOutputs(inner.append).apply, "bf16")({}, X)
    assert (type(tree), tree.x.dtype, tree.none, tree.name) == (Tree, jnp.bfloat16, None, "name")
    assert (scalars["loss"].dtype, scalars["ids"].tolist()) == (jnp.float32, [50257])
    assert (x.dtype, none, flag) == (jnp.bfloat16, None, True)
    assert (inner[0][0].x.dtype, inner[0][1]["loss"].dtype) == (jnp.bfloat16, jnp.float32)


class NamedParts(nn.Module):
    @nn.compact
    def __call__(self, **parts: jax.Array) -> Any:
        return {name: part + 0 for name, part in parts.items()}


class Concatenates(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.concatenate(list(NamedParts()(second=x, first=2 * x).values()))


def test_dicts_keep_the_order_of_their_keys() -> None:
    assert autocast(Concatenates().apply, BF16)({}, jnp.ones(1)).tolist() == [1.0, 2.0]


class TwoMethods(nn.Module):
    def setup(self) -> None:
        self.dense = nn.Dense(8)

    def encode(self, x: jax.Array) -> jax.Array:
        return self.helper(x)

    def helper(self, x: jax.Array) -> jax.Array:
        return self.dense(x)

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = self.helper(x)
        return lax.dot(hidden[0], hidden[0].T)


def test_methods_other_than_call_enter_the_region_and_own_methods_are_no_boundary() -> None:
    model = TwoMethods()
    variables = abstract(model)
    encode = autocast(functools.partial(model.apply, method="encode"), BF16)
    assert jax.eval_shape(encode, variables, X).dtype == jnp.float32
    assert operand_dtypes(encode, variables, X) == [("bfloat16", "bfloat16")]
    # A boundary at `helper` would hand over float16, the output dtype, and so make it twice.
    traced = trace(autocast(model.apply, "p=f32,c=bf16,o=f16"), variables, X)
    assert sum(v.aval.dtype == jnp.float16 for e in traced for v in e.outvars) == 1


def test_a_bound_module_follows_the_policy() -> None:
    bound = Layers().bind(initial(Layers()))
    assert set(operand_dtypes(autocast(lambda x: bound(x), BF16), X)) == {("bfloat16", "bfloat16")}


class Shared(nn.Module):
    dense: nn.Module

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dense(jax.nn.relu(self.dense(x)))


class SharesAModule(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dense = nn.Dense(8, name="shared")
        return Shared(dense)(x) + dense(x)


def test_a_shared_module_has_one_policy_and_one_gradient() -> None:
    model = SharesAModule()
    variables = initial(model)
    assert set(operand_dtypes(loss_grads(model, {"shared": "float32", "*": BF16}, X), variables)) == {
        ("float32", "float32")
    }
    half, full = (jax.jit(loss_grads(model, p, X))(variables)[1] for p in (BF16, "float32"))
    assert_near(half, full, 0.05)


class FullPrecisionInside(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = nn.Dense(8, name="half")(x)
        exact = full_precision(lambda h: nn.softmax(nn.Dense(8, name="exact")(h)))(hidden)
        return nn.Dense(3, name="last")(exact)


def test_full_precision_holds_for_the_modules_inside_it_forward_and_backward() -> None:
    model = FullPrecisionInside()
    found = product_dtypes_by_scope(loss_grads(model, BF16, X), abstract(model))
    assert {path.split("/")[-1]: dtypes for path, dtypes in found.items()} == {
        "half": {"bfloat16"},
        "exact": {"float32"},
        "last": {"bfloat16"},
    }


# ------------------------------------------------------------------------- transformations and recurrence


@pytest.mark.parametrize(
    "cell",
    [nn.LSTMCell, nn.OptimizedLSTMCell, nn.GRUCell, nn.SimpleCell, nn.MGUCell],
    ids=lambda c: c.__name__,
)
def test_recurrent_cells_run_in_rnn_and_take_half_operands(cell: Any) -> None:
    model = nn.Bidirectional(nn.RNN(cell(6)), nn.RNN(cell(6)))
    variables = abstract(model)
    assert jax.eval_shape(autocast(model.apply, BF16), variables, X).dtype == jnp.float32
    for grads in (loss_grads(model, BF16, X), outside_grads(model, BF16, X)):
        assert set(operand_dtypes(grads, variables)) == {("bfloat16", "bfloat16")}


@pytest.mark.parametrize(("cell", "policy"), [(nn.LSTMCell, F16), (nn.GRUCell, BF16)])
def test_a_recurrent_cell_hands_its_carry_back_in_the_dtype_it_came_in(cell: Any, policy: str) -> None:
    model = nn.RNN(cell(6), return_carry=True)
    variables = initial(model)
    found = values(model, policy, variables)
    assert dtypes_of(found) == {"float32"}
    assert_near(found, jax.jit(model.apply)(variables, X))


def test_a_cell_in_scan_keeps_its_carry_and_a_map_reaches_into_it() -> None:
    class Scanned(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            cell = nn.scan(
                nn.LSTMCell, variable_broadcast="params", split_rngs={"params": False}, in_axes=1, out_axes=1
            )(6, name="cell")
            return cell(cell.initialize_carry(KEY, x[:, 0].shape), x)[1]

    variables = abstract(Scanned())
    found = product_dtypes_by_scope(loss_grads(Scanned(), {"cell/hg": "float32", "*": BF16}, X), variables)
    for path, dtypes in found.items():
        assert dtypes == ({"float32"} if path.endswith("hg") else {"bfloat16"}), path


class Lifted(nn.Module):
    """Functions lifted over a module, which are code of the caller and not of that module."""

    how: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dense = nn.Dense(8, name="dense")

        def same_dtype(module: nn.Module, x: jax.Array) -> jax.Array:
            return module(x).astype(x.dtype)

        if self.how == "scan":
            body = nn.scan(
                lambda m, c, _: (same_dtype(m, c), None),
                variable_broadcast="params",
                length=2,
                split_rngs={"params": False},
            )
            return body(dense, x, None)[0]
        if self.how == "cond":
            return nn.cond(True, same_dtype, same_dtype, dense, x)
        if self.how == "while":
            dense(x)
            return nn.while_loop(lambda m, c: c[0, 0, 0] < 0, same_dtype, dense, jnp.abs(x))
        if self.how == "vmap":
            mapped = nn.vmap(same_dtype, variable_axes={"params": None}, split_rngs={"params": False})
            return mapped(dense, x)
        return {"remat": nn.remat, "jit": nn.jit}[self.how](same_dtype)(dense, x)


@pytest.mark.parametrize("how", ["scan", "cond", "while", "vmap", "remat", "jit"])
def test_functions_lifted_over_a_module_run(how: str) -> None:
    model = Lifted(how)
    variables = abstract(model)
    assert jax.eval_shape(autocast(model.apply, BF16), variables, X).dtype == jnp.float32
    assert set(operand_dtypes(autocast(model.apply, BF16), variables, X)) == {("bfloat16", "bfloat16")}
    mapped = autocast(model.apply, {"dense": "float32", "*": BF16})
    assert set(operand_dtypes(mapped, variables, X)) == {("float32", "float32")}


class Reuse(nn.Module):
    """One weight, used 1000 times."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        body = nn.scan(
            lambda m, c, x: (c + jnp.sum(m(x).astype(jnp.float32)), None),
            variable_broadcast="params",
            split_rngs={"params": False},
        )
        dense = nn.Dense(1, use_bias=False, kernel_init=nn.initializers.ones, name="dense")
        return body(dense, jnp.float32(0), x)[0]


@pytest.mark.parametrize("policy", [BF16, F16])
def test_a_weight_used_1000_times_in_scan_has_gradient_1000(policy: str) -> None:
    variables = initial(Reuse(), jnp.ones((1000, 1, 2)))

    def loss(variables: Any) -> jax.Array:
        return Reuse().apply(variables, jnp.ones((1000, 1, 2)))

    _, grads, _ = jax.jit(mpjax.value_and_grad(loss, policy))(NO_SCALE, variables)
    assert grads["params"]["dense"]["kernel"].tolist() == [[1000.0], [1000.0]]


class Tied(nn.Module):
    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(4, 2, embedding_init=nn.initializers.ones, name="embed")
        return embed.attend(embed(tokens))


@pytest.mark.parametrize("policy", [BF16, F16])
def test_a_tied_embedding_adds_up_both_gradients_in_float32(policy: str) -> None:
    tokens = jnp.zeros(1000, jnp.int32)
    variables = initial(Tied(), tokens)

    def loss(variables: Any) -> jax.Array:
        return jnp.sum(Tied().apply(variables, tokens))

    _, grads, _ = jax.jit(mpjax.value_and_grad(loss, policy))(NO_SCALE, variables)
    # 1000 lookups times 4 rows of the head, and 1000 of the head itself; bfloat16 has no 5000.
    assert grads["params"]["embed"]["embedding"][:, 0].tolist() == [5000.0, 1000.0, 1000.0, 1000.0]


# ------------------------------------------------------------------------------------------- state


def stored(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.dtype.name, tree)


@pytest.mark.parametrize("policy", [F16, "f16"])
def test_the_running_variance_of_large_values_is_float32_and_right(policy: str) -> None:
    model = nn.BatchNorm(use_running_average=False, momentum=0.9)
    x = jnp.array([[300.0], [-300.0]], jnp.float16)
    variables = initial(model, x)
    run = jax.jit(
        autocast(lambda v, x: model.apply(v, x, mutable=["batch_stats"]), policy, cast_output=False)
    )
    _, state = run(variables, x)
    assert stored(state) == {"batch_stats": {"mean": "float32", "var": "float32"}}
    np.testing.assert_allclose(state["batch_stats"]["var"], [9000.9], rtol=1e-6)


def test_the_layer_norm_of_large_half_values_is_right() -> None:
    x = jnp.array([[0, 300, -300, 0]], jnp.float16)
    model = nn.LayerNorm()
    out = autocast(model.apply, "f16")(initial(model, x), x)
    assert out.dtype == jnp.float16
    np.testing.assert_allclose(out[0], [0, 1.414, -1.414, 0], atol=1e-3)


class Statistics(nn.Module):
    """Keeps state of its own, computed from a product."""

    @nn.compact
    def __call__(self, x: jax.Array, _: None = None) -> Any:
        mean = self.variable("stats", "mean", jnp.zeros, (8,))
        count = self.variable("stats", "count", jnp.zeros, (), jnp.int32)
        y = nn.BatchNorm(use_running_average=False)(nn.Dense(8)(x))
        if not self.is_initializing():
            mean.value = jnp.mean(y, (0, 1))
            count.value += 1
        return (y, None) if _ is None else y


class InScan(nn.Module):
    how: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(8)(x)
        if self.how == "plain":
            return Statistics()(x)[0]
        if self.how == "remat":
            return nn.remat(Statistics)()(x)[0]
        axes = {"params": 0, "stats": 0, "batch_stats": 0}
        scanned = nn.scan(Statistics, variable_axes=axes, split_rngs={"params": True}, length=2)
        return scanned()(x, None)[0]


@pytest.mark.parametrize("how", ["plain", "remat", "scan"])
def test_state_keeps_its_stored_dtype(how: str) -> None:
    model = InScan(how)
    variables = initial(model)
    state = {k: v for k, v in variables.items() if k != "params"}
    mutable = ["stats", "batch_stats"]

    def update(state: Any) -> Any:
        return model.apply({"params": variables["params"], **state}, X, mutable=mutable)[1]

    new = jax.jit(autocast(update, BF16))(state)
    assert stored(new) == stored(state)
    assert_near(new, jax.jit(update)(state))


def test_a_decoding_cache_keeps_its_dtype_and_decodes_as_in_float32() -> None:
    model = nn.MultiHeadDotProductAttention(2, decode=True)
    variables = initial(model)

    def decode(variables: Any) -> Any:
        def step(cache: Any, x: jax.Array) -> Any:
            y, new = model.apply(
                {"params": variables["params"], "cache": cache}, x[:, None], mutable=["cache"]
            )
            return new["cache"], y

        return lax.scan(step, variables["cache"], jnp.swapaxes(X, 0, 1))

    cache, outputs = jax.jit(autocast(decode, BF16))(variables)
    assert stored(cache) == stored(variables["cache"])
    assert_near(outputs, jax.jit(decode)(variables)[1])


@pytest.mark.parametrize("policy", ["f16"])
def test_attention_to_nothing_is_finite_and_so_is_its_gradient(policy: str) -> None:
    model = nn.MultiHeadDotProductAttention(2)
    variables = initial(model)

    def loss(variables: Any) -> jax.Array:
        return jnp.sum(model.apply(variables, X, mask=jnp.zeros((2, 1, 4, 4), bool)).astype(jnp.float32))

    value, _, finite = jax.jit(mpjax.value_and_grad(loss, policy))(NO_SCALE, variables)
    assert (bool(jnp.isfinite(value)), bool(finite)) == (True, True)


@pytest.mark.parametrize("policy", [F16, "bf16"])
def test_dropout_masks_do_not_depend_on_the_policy(policy: str) -> None:
    model = nn.Sequential([nn.Dense(64), nn.Dropout(0.5, deterministic=False)])
    variables = initial(model)
    run = functools.partial(model.apply, rngs={"dropout": jax.random.key(1)})
    kept = np.asarray(jax.jit(run)(variables, X) != 0)
    assert 0.3 < kept.mean() < 0.7
    np.testing.assert_array_equal(jax.jit(autocast(run, policy))(variables, X) != 0, kept)


# -------------------------------------------------------------------------------------- initialisation


def test_init_under_a_policy_stores_parameters_in_their_param_dtype_with_the_same_values() -> None:
    plain = initial(Model("scan"))
    for policy, dtype in ((F16, "float32"), ("bf16", "bfloat16")):
        keys = {"params": KEY, "dropout": KEY}
        variables = jax.jit(autocast(Model("scan").init, policy))(keys, X)
        assert dtypes_of(variables) == {dtype}
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype(dtype)), variables, plain)


def test_init_under_a_map_stores_each_module_in_its_own_param_dtype() -> None:
    policies = {"head": "p=f32,c=f32,o=f32", "*": "p=bf16,c=bf16,o=f32"}
    params = dict(jax.eval_shape(autocast(Model("loop").init, policies, cast_output=False), KEY, X)["params"])
    assert dtypes_of(params.pop("head")) == {"float32"}
    assert dtypes_of(params) == {"bfloat16"}


def test_partitioned_parameters_keep_their_partitioning() -> None:
    init = nn.with_partitioning(nn.initializers.ones, ("rows", "columns"))
    model = nn.Dense(3, kernel_init=init)
    variables = autocast(model.init, "p=bf16,c=bf16,o=f32", cast_output=False)(KEY, X)
    kernel = variables["params"]["kernel"]
    assert (kernel.names, kernel.value.dtype) == (("rows", "columns"), jnp.bfloat16)
    assert autocast(model.apply, BF16)(variables, X).dtype == jnp.float32


def test_frozen_and_plain_dicts_come_back_as_they_went_in() -> None:
    variables = abstract(Layers())
    for container in (freeze(variables), dict(variables)):
        _, grads, _ = jax.eval_shape(loss_grads(Layers(), BF16, X), container)
        assert jax.tree.structure(grads) == jax.tree.structure(container)
        assert isinstance(autocast(lambda v: v, BF16)(container), type(container))
    assert isinstance(freeze(variables), FrozenDict)


def test_token_ids_stay_exact() -> None:
    class Ids(nn.Module):
        @nn.compact
        def __call__(self, ids: jax.Array) -> jax.Array:
            return nn.Dropout(0.0, deterministic=True)(ids)

    assert autocast(Ids().apply, F16)({}, jnp.array([2909, 32001, 50257])).tolist() == [2909, 32001, 50257]


class Positions(nn.Module):
    inside: bool

    @nn.compact
    def __call__(self, positions: jax.Array) -> jax.Array:
        if self.inside:
            positions = jnp.arange(2048.0)
        return Sinusoid(name="sinusoid")(positions)


class Sinusoid(nn.Module):
    @nn.compact
    def __call__(self, positions: jax.Array) -> jax.Array:
        angles = positions[:, None] @ (10000.0 ** (-jnp.arange(16) / 16))[None, :]
        return jnp.sin(angles)


@pytest.mark.parametrize("inside", [True, False], ids=["computed inside", "passed in"])
def test_sinusoids_of_2048_positions_are_within_2_thousandths(inside: bool) -> None:
    model, positions = Positions(inside), jnp.arange(2048.0)
    expected = model.apply({}, positions)
    inner = {"sinusoid": "p=f32,c=bf16,o=f32", "*": BF16}
    np.testing.assert_allclose(autocast(model.apply, inner)({}, positions), expected, atol=0.002)
    rounded_once = autocast(model.apply, BF16)({}, positions)  # as bfloat16 the result itself has 8 bits
    np.testing.assert_allclose(rounded_once, expected, atol=0.002)


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential([nn.Dense(8), nn.relu, nn.GroupNorm(4), nn.RMSNorm(), nn.Dense(4)]),
        nn.Sequential([nn.Conv(8, (3,)), nn.ConvTranspose(4, (3,), (2,))]),
        nn.DenseGeneral((2, 3), axis=(-1, -2)),
        nn.Einsum((8, 3), "abc,cd->abd"),
        nn.MultiHeadDotProductAttention(2),
        nn.WeightNorm(nn.Dense(4)),
        nn.jit(nn.Dense)(4),
        nn.vmap(nn.Dense, variable_axes={"params": 0}, split_rngs={"params": True})(4),
    ],
    ids=["norms", "convolutions", "general", "einsum", "attention", "weight norm", "jit", "vmap"],
)
def test_layers_of_flax_follow_the_policy_without_a_dtype(model: nn.Module) -> None:
    variables = abstract(model)
    assert jax.eval_shape(autocast(model.apply, BF16), variables, X).dtype == jnp.float32
    for grads in (loss_grads(model, BF16, X), outside_grads(model, BF16, X)):
        assert set(operand_dtypes(grads, variables)) == {("bfloat16", "bfloat16")}
    assert dtypes_of(jax.eval_shape(loss_grads(model, BF16, X), variables)[1]) == {"float32"}
