"""Where the audit says that an operation is: the module that `mpjax.explain` lists, and the user's own line."""

import linecache
import pathlib
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import mpjax
from mpjax._precision import module_scope

BF16 = "p=f32,c=bf16,o=f32"
X = jax.ShapeDtypeStruct((4, 8), jnp.float32)


# ------------------------------------------------------------------------------------- modules of linen


class Coder(nn.Module):
    """Calls its own methods."""

    def setup(self):
        self.enc = nn.Dense(8)
        self.dec = nn.Dense(4)

    def encode(self, x):
        return nn.tanh(self.enc(x))

    def __call__(self, x):
        return self.dec(self.encode(x))


class Outer(nn.Module):
    """Calls a method of a submodule, and the submodule in one of its own."""

    def setup(self):
        self.coder = Coder()

    def coded(self, x):
        return self.coder(x)

    def __call__(self, x):
        return self.coded(self.coder.encode(x))


class Ensemble(nn.Module):
    @nn.compact
    def __call__(self, x):
        members = nn.vmap(
            Coder, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=None, axis_size=3
        )
        return members(name="ens")(x)


class Residual(nn.Module):
    inner: nn.Module

    @nn.compact
    def __call__(self, x, _=None):
        return x + self.inner(x)


class Net(nn.Module):
    """Hands a module over to another as an attribute."""

    @nn.compact
    def __call__(self, x):
        x = Residual(nn.Dense(8, name="proj"), name="res")(x)
        return nn.Dense(3, name="head")(x)


class Step(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return Residual(nn.Dense(8, name="proj"), name="res")(x), None


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8, name="embed")(x)
        split = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        return nn.scan(nn.remat(Step), length=3, **split)(name="blocks")(x, None)[0]


class Jitted(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(2):
            x = nn.jit(Net)(name=f"net_{i}")(x)
            x = nn.Dense(8, name=f"after_{i}")(x)
        return x


class Lifted(nn.Module):
    """Scans a function of its own over a module."""

    @nn.compact
    def __call__(self, x):
        def body(dense, h, _):
            return dense(h @ jnp.ones((8, 8), h.dtype)), None

        dense = nn.Dense(8, name="dense")
        return nn.scan(body, variable_broadcast="params", split_rngs={"params": False}, length=3)(
            dense, dense(x), None
        )[0]


class Recurrent(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.RNN(nn.LSTMCell(4), name="rnn")(x[:, None])


def linen_loss(model: nn.Module) -> Any:
    return lambda params, x: jnp.mean(model.apply(params, x))


@pytest.mark.parametrize(
    ("model", "full", "modules"),
    [
        (Coder(), "enc", {"enc", "dec"}),
        (Outer(), "coder/enc", {"coder/enc", "coder/dec"}),
        (Ensemble(), "ens/enc", {"ens/enc", "ens/dec"}),
        (Net(), "proj", {"proj", "head"}),
        (Scanned(), "blocks/proj", {"embed", "blocks/proj"}),
        (Jitted(), "net_1/proj", {f"{m}_{i}" for m in ("after",) for i in range(2)} | {
            f"net_{i}/{m}" for m in ("proj", "head") for i in range(2)
        }),
        (Lifted(), "dense", {"dense", ""}),
        (
            Recurrent(),
            "LSTMCell_0/i.",
            {f"LSTMCell_0/{a}{b}" for a in "ih" for b in "ifgo"},
        ),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, nn.Module) else "",
)  # fmt: skip
def test_a_program_holds_the_map_that_it_runs_under_in_the_modules_that_explain_lists(model, full, modules):
    policies = {full: "float32", "*": BF16}
    params = jax.eval_shape(model.init, jax.random.key(0), X)
    step = jax.grad(mpjax.autocast(linen_loss(model), policies))
    found = mpjax.audit(step, params, X, policies=policies)
    assert not found.at_least("warning")
    assert {p.module for p in found.products} == modules
    assert modules <= {row.path for row in mpjax.explain(model, policies, X).rows}


def test_a_scope_around_a_model_is_no_part_of_its_paths():
    model = Net()

    def loss(params, x):
        with jax.named_scope("loss"):
            return jnp.mean(model.apply(params, x) ** 2)

    policies = {"head": "float32", "*": BF16}
    params = jax.eval_shape(model.init, jax.random.key(0), X)
    found = mpjax.audit(jax.grad(mpjax.autocast(loss, policies)), params, X, policies=policies)
    assert not found.findings
    assert {p.module for p in found.products} == {"proj", "head"}
    assert "loss" in found.modules


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x):
        with jax.named_scope("scores"):
            scores = x @ x.T
        return nn.Dense(8, name="out")(scores @ x)


def test_a_scope_within_a_module_shows_but_no_pattern_matches_it():
    model = nn.Sequential([Attention()])
    params = jax.eval_shape(model.init, jax.random.key(0), X)
    policies = {".*out": "float32", "*": BF16}
    loss = mpjax.autocast(linen_loss(model), policies)
    found = mpjax.audit(loss, params, X, policies={".*(out|scores)": "float32", "*": BF16})
    assert {p.module: p.operands for p in found.products} == {
        "layers_0/scores": "bfloat16",
        "layers_0": "bfloat16",
        "layers_0/out": "float32",
    }
    assert not found.errors


def test_classes_of_a_map_are_those_of_the_modules_whatever_their_names():
    class Wide(nn.Dense):
        pass

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Wide(4, name="last")(nn.LayerNorm()(nn.DenseGeneral(8, name="first")(x)))

    policies = mpjax.PolicyMap({nn.Dense: "float32"}, default=BF16)
    params = jax.eval_shape(Model().init, jax.random.key(0), X)
    found = mpjax.audit(jax.grad(mpjax.autocast(linen_loss(Model()), policies)), params, X, policies=policies)
    assert {p.module: p.operands for p in found.products} == {"first": "bfloat16", "last": "float32"}
    assert not found.errors


def test_paths_of_several_models_start_with_their_classes_and_match_without():
    models = [Net(), Coder()]
    params = [jax.eval_shape(model.init, jax.random.key(0), X) for model in models]

    def loss(a, b, x):
        return jnp.mean(models[0].apply(a, x)) + jnp.mean(models[1].apply(b, x))

    policies = {"enc": "float32", "proj": "float32", "*": BF16}
    found = mpjax.audit(jax.grad(mpjax.autocast(loss, policies), (0, 1)), *params, X, policies=policies)
    assert not found.errors
    assert {p.module for p in found.products} == {"Net/proj", "Net/head", "Coder/enc", "Coder/dec"}


# --------------------------------------------------------------------------------------- modules of nnx


class Tied(nnx.Module):
    """Shares a module with its head, calls its own method and holds a linen model."""

    def __init__(self, rngs):
        self.embed = nnx.Linear(8, 8, rngs=rngs)
        self.head = Head(self.embed, rngs)
        self.coder = nnx.bridge.ToNNX(Coder(), rngs=rngs).lazy_init(jnp.ones((2, 8)))

    def embedded(self, x):
        return self.embed(x)

    def __call__(self, x):
        return self.coder(self.head(self.embedded(x)))


class Head(nnx.Module):
    def __init__(self, shared, rngs):
        self.shared = shared
        self.own = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return self.own(self.shared(x))


def test_modules_of_nnx_have_the_paths_that_their_policy_was_applied_by():
    policies = {"embed": "float32", "coder": "float32", "*": BF16}

    def loss(model, x):
        with jax.named_scope("loss"):
            return jnp.mean(model(x))

    model = mpjax.nnx.apply_policy(Tied(nnx.Rngs(0)), policies)
    found = mpjax.audit(nnx.grad(loss), model, X, policies=policies)
    assert not found.errors
    assert {p.module: p.operands for p in found.products} == {
        "embed": "float32",
        "head/own": "bfloat16",
        "coder/enc": "float32",
        "coder/dec": "float32",
    }


# ----------------------------------------------------------------------------------- modules of others


def test_modules_of_equinox_are_told_by_their_classes():
    import equinox as eqx

    key = jax.random.key(0)
    model = eqx.nn.Sequential(
        [eqx.nn.MLP(8, 8, 8, 1, key=key), eqx.nn.LayerNorm(8), eqx.nn.Linear(8, 2, key=key)]
    )
    arrays, static = eqx.partition(model, eqx.is_array)

    def loss(arrays, x):
        return jnp.mean(jax.vmap(eqx.combine(arrays, static))(x))

    found = mpjax.audit(jax.grad(loss), arrays, X)
    assert {p.module for p in found.products} == {"MLP/Linear", "Linear"}
    assert {"MLP", "LayerNorm"} <= set(found.modules)


# ------------------------------------------------------------------------------------------ the phases


def test_findings_of_the_forward_and_of_the_backward_pass_at_one_line_are_two():
    def loss(x, w):
        return jnp.mean(jnp.sin(x) @ jnp.sin(w))

    step = jax.value_and_grad(loss, (0, 1))
    found = mpjax.audit(step, X, jax.ShapeDtypeStruct((8, 2), jnp.float32), policies=BF16).findings
    assert {(f.kind, f.phase, f.count) for f in found} == {
        ("silent-upcast", "forward", 1),
        ("silent-upcast", "backward", 2),
    }
    assert len({f.message for f in found}) == 1
    assert sorted(f.share for f in found) == pytest.approx([1 / 3, 2 / 3])


# ------------------------------------------------------------------------------------------- the lines


def lines(fn: Any, *args: Any) -> set[tuple[str, str]]:
    """File and source of every line at which a product of `fn` is found to be wider than a policy."""
    found = mpjax.audit(fn, *args, policies=BF16).of("silent-upcast")
    return {(pathlib.Path(f.file).name, linecache.getline(f.file, f.line).strip()) for f in found}


def test_the_line_of_a_product_in_equinox_is_the_users():
    import equinox as eqx

    model = eqx.nn.Linear(8, 2, key=jax.random.key(0))
    arrays, static = eqx.partition(model, eqx.is_array)

    def loss(arrays, x):
        layer = eqx.combine(arrays, static)
        y = jax.vmap(layer)(x)
        return jnp.mean(y**2)

    assert lines(jax.grad(loss), arrays, X) == {("test_source_locations.py", "y = jax.vmap(layer)(x)")}


def test_the_line_of_a_product_in_haiku_is_the_users():
    import haiku as hk

    class Model(hk.Module):
        def __call__(self, x):
            x = hk.Linear(8)(x)
            return jnp.mean(x**2)

    model = hk.without_apply_rng(hk.transform(lambda x: Model()(x)))
    params = jax.eval_shape(model.init, jax.random.key(0), X)
    assert lines(jax.grad(model.apply), params, X) == {("test_source_locations.py", "x = hk.Linear(8)(x)")}


def installed(tmp_path: pathlib.Path, package: str, source: str, **names: Any) -> Any:
    """The function `f` of a file that lies where packages are installed."""
    file = tmp_path / "lib" / "site-packages" / package / "model.py"
    file.parent.mkdir(parents=True)
    file.write_text(source)
    namespace = {"jnp": jnp, **names}
    exec(compile(source, str(file), "exec"), namespace)
    return namespace["f"]


def test_the_line_of_a_product_in_an_installed_package_is_where_the_user_calls_it(tmp_path):
    dense = installed(tmp_path, "layers", "def f(x, w):\n    return x @ w\n")

    def loss(x, w):
        return dense(x, w)

    assert lines(loss, X, jax.ShapeDtypeStruct((8, 2), jnp.float32)) == {
        ("test_source_locations.py", "return dense(x, w)")
    }


def test_the_line_of_a_program_that_is_installed_itself_is_in_its_own_package(tmp_path):
    dense = installed(tmp_path, "layers", "def f(x, w):\n    return x @ w\n")
    program = installed(tmp_path, "company", "def f(x, w):\n    return g(x, w)\n", g=dense)
    assert lines(program, X, jax.ShapeDtypeStruct((8, 2), jnp.float32)) == {("model.py", "return g(x, w)")}


# -------------------------------------------------------------------------------------------- the marks


def test_modules_leave_no_marks_outside_of_audits():
    model = Net()
    params = model.init(jax.random.key(0), jnp.ones((4, 8)))
    mpjax.audit(model.apply, params, X)
    for eqn in jax.make_jaxpr(mpjax.autocast(model.apply, BF16))(params, jnp.ones((4, 8))).eqns:
        assert module_scope.last_mark(str(eqn.source_info.name_stack)) is None


def test_an_audit_within_an_audit_keeps_its_marks_to_itself():
    model = Coder()
    params = jax.eval_shape(model.init, jax.random.key(0), X)
    inner = []

    def outer(params, x):
        with jax.named_scope("outer"):
            inner.append(mpjax.audit(lambda x, w: x @ w, X, jax.ShapeDtypeStruct((8, 2), jnp.float32)))
        return model.apply(params, x)

    found = mpjax.audit(outer, params, X)
    assert {p.module for p in found.products} == {"enc", "dec"}
    assert {p.module for p in inner[0].products} == {""}


# ------------------------------------------------------------------------- patterns that match no module


def test_modules_that_do_not_run_are_modules_of_the_model():
    model = Coder()
    params = jax.eval_shape(model.init, jax.random.key(0), X)
    policies = {"dec": "float32", "*": BF16}
    encode = mpjax.autocast(lambda params, x: model.apply(params, x, method="encode"), policies)
    assert not mpjax.audit(encode, params, X, policies=policies).errors


def test_modules_of_nnx_that_do_not_run_are_modules_of_the_model():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.used, self.unused = (nnx.Linear(8, 8, rngs=rngs) for _ in range(2))

        def __call__(self, x):
            return self.used(x)

    policies = {"unused": "float32", "*": BF16}
    model = mpjax.nnx.apply_policy(Model(nnx.Rngs(0)), policies)
    assert not mpjax.audit(lambda model, x: model(x), model, X, policies=policies).errors


def test_a_class_that_no_module_has_is_an_error():
    model = Net()
    params = jax.eval_shape(model.init, jax.random.key(0), X)
    with pytest.raises(ValueError, match=r"Policy pattern 'class:.*Conv' governs no module"):
        mpjax.audit(linen_loss(model), params, X, policies={nn.Conv: "float32", "*": BF16})
