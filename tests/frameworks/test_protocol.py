"""The protocol of module frameworks: who knows whom, and what a further framework takes."""

import ast
import contextlib
import os
import pathlib
import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from programs import operand_dtypes

import mpjax
from mpjax._frameworks import protocol
from mpjax._precision import module_scope

ROOT = pathlib.Path(mpjax.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
NAMES = {"flax.linen", "flax.nnx", "equinox", "haiku"}
FACES = {"nnx.py", "linen.py"}
FRAMEWORK_FILES = {f"_frameworks/{name}.py" for name in ("linen", "nnx", "equinox", "haiku")}


def relative(file: pathlib.Path) -> str:
    return file.relative_to(ROOT).as_posix()


def imports(file: pathlib.Path) -> set[str]:
    """The full names of what a file imports, submodules and members alike."""
    package = ("mpjax", *file.relative_to(ROOT).parts[:-1])
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            found.update(f"{module}.{alias.name}" for alias in node.names)
    return found


def begins(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


# ------------------------------------------------------------------------------- who knows a framework


@pytest.mark.parametrize("file", FILES, ids=relative)
def test_no_file_outside_of_the_frameworks_names_one(file: pathlib.Path) -> None:
    name = relative(file)
    if name in FACES or name in FRAMEWORK_FILES:
        pytest.skip("speaks for a framework")
    named = {x for x in imports(file) if any(begins(x, n) for n in NAMES)}
    # A layer of Flax's that is no module: what fp8 operations call their collection of variables.
    assert named <= {"flax.linen.fp8_ops.OVERWRITE_WITH_GRADIENT"}
    tree = ast.parse(file.read_text())
    attributes = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    classes = {f"{m}.Module" for m in ("nn", "nnx", "linen", "eqx", "equinox", "hk", "haiku")}
    assert not attributes & classes
    assert not attributes & {"hk.Transformed", "flax.linen", "flax.nnx"}


@pytest.mark.parametrize("name", sorted(FRAMEWORK_FILES))
def test_a_framework_s_file_knows_no_other_framework_and_no_other_file_of_one(name: str) -> None:
    own = name.removeprefix("_frameworks/").removesuffix(".py")
    others = {n for n in NAMES if not n.endswith(own)}
    other_files = {f"mpjax._frameworks.{n}" for n in ("linen", "nnx", "equinox", "haiku") if n != own}
    found = imports(ROOT / name)
    assert not {x for x in found for n in others | other_files if begins(x, n)}


def test_importing_and_using_mpjax_imports_neither_equinox_nor_haiku() -> None:
    program = (
        "import sys, jax.numpy as jnp, mpjax\n"
        "seen = lambda: sorted(m for m in sys.modules if m.split('.')[0] in ('equinox', 'haiku') "
        "or m in ('mpjax._frameworks.equinox', 'mpjax._frameworks.haiku'))\n"
        "assert not seen(), seen()\n"
        "mpjax.autocast(lambda x: x @ x, {'*': 'p=f32,c=bf16,o=f32'})(jnp.ones((2, 2)))\n"
        "mpjax.audit(lambda x: x @ x, jnp.ones((2, 2)))\n"
        "assert not seen(), seen()\n"
        "import equinox\n"
        "layer = equinox.nn.Linear(2, 2, key=__import__('jax').random.key(0))\n"
        "mpjax.apply_policy(layer, 'p=f32,c=bf16,o=f32')\n"
        "assert 'haiku' not in sys.modules and 'mpjax._frameworks.equinox' in sys.modules\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT.parent), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# --------------------------------------------------------------------------------------- import graph

# From the lowest: a package imports those before it, and itself.
LAYERS = ("_tables", "_precision", "_frameworks", "_training", "_audit", "public")


def layer(name: str) -> str:
    """The layer of a module of mpjax, by its name without the package's."""
    head = name.split(".")[0]
    return head if head in LAYERS else "public"


def modules() -> dict[str, pathlib.Path]:
    return {".".join(f.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): f for f in FILES}


def graph() -> dict[str, set[str]]:
    """From each module of mpjax to those that it imports."""
    known = modules()
    found: dict[str, set[str]] = {}
    for name, file in known.items():
        found[name] = set()
        for imported in imports(file):
            path = imported.removeprefix("mpjax.") if imported.startswith("mpjax.") else None
            while path and path not in known:
                path = path.rpartition(".")[0]
            if path and path != name:
                found[name].add(path)
    return found


@pytest.mark.parametrize("name", sorted(n for n in modules() if n not in ("__init__", "mpjax")))
def test_imports_between_packages_only_go_down(name: str) -> None:
    own = layer(name)
    for imported in graph()[name]:
        assert LAYERS.index(layer(imported)) <= LAYERS.index(own), f"{name} imports {imported}"
        assert {own, layer(imported)} != {"_training", "_audit"}, f"{name} imports {imported}"


def test_no_module_imports_itself_by_way_of_others() -> None:
    edges = {name: imported for name, imported in graph().items() if name != "__init__"}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " imports ".join((*path, name))
        if name not in done:
            for imported in sorted(edges.get(name, ())):
                visit(imported, (*path, name))
            done.add(name)

    for name in edges:
        visit(name, ())


# ------------------------------------------------------------------------------------ a new framework


class Layer:
    """A module of a toy framework: its parameters are an attribute, and an interceptor sees every call."""

    interceptors: list[Any] = []

    def __init__(self, name: str, children: "tuple[Layer, ...]" = ()) -> None:
        self.name, self.children = name, children
        self.weight = jnp.ones((4, 4))

    def __call__(self, x: jax.Array) -> jax.Array:
        call = self.forward
        for interceptor in self.interceptors:
            call = lambda x, inner=call: interceptor(self, inner, x)
        return call(x)

    def forward(self, x: jax.Array) -> jax.Array:
        x = x @ self.weight
        for child in self.children:
            x = child(x)
        return x


class Toy(protocol.Framework):
    """All that mpjax has to know of it."""

    name = "toy"
    directory = "/nowhere"

    def is_model(self, x: Any) -> bool:
        return isinstance(x, Layer)

    @contextlib.contextmanager
    def intercepted(self) -> Iterator[None]:
        Layer.interceptors.append(self.intercept)
        try:
            yield
        finally:
            Layer.interceptors.pop()

    def intercept(self, layer: Layer, call: Any, x: jax.Array) -> Any:
        with module_scope.marked(module_scope.Mark("", layer.name), Layer):
            return module_scope.call_module(call, (x,), {}, path=layer.name, cls=Layer)

    def modules(self, model: Layer, policies: Any, inputs: Any, kwargs: Any) -> Iterator[Any]:
        yield protocol.ModuleParameters(model.name, Layer, policies.resolve(model.name), [model.weight])
        for child in model.children:
            yield from self.modules(child, policies, inputs, kwargs)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Layer:
    """A model of a framework whose one file is `Toy`."""
    monkeypatch.setitem(sys.modules, "toy_framework", types.ModuleType("toy_framework"))
    file = types.ModuleType("mpjax._frameworks.toy")
    file.FRAMEWORK = Toy()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mpjax._frameworks.toy", file)
    monkeypatch.setitem(protocol._FILES, "toy_framework", "toy")
    protocol._load.cache_clear()
    return Layer("body", (Layer("body/first"), Layer("body/last")))


MAP = {"body/last": "p=f32,c=f16,o=bf16", "*": "p=f32,c=bf16,o=f32"}


def test_a_new_framework_follows_a_map_is_explained_and_audited_with_one_file(toy: Layer) -> None:
    run = mpjax.autocast(toy, MAP)
    x = jnp.ones((2, 4))
    assert operand_dtypes(run, x) == [("bfloat16",) * 2, ("bfloat16",) * 2, ("float16",) * 2]
    assert jax.eval_shape(run, x).dtype == "float32"
    rows = mpjax.explain(toy, MAP).rows
    assert [(row.path, row.pattern, row.parameters) for row in rows] == [
        ("body", "*", 16),
        ("body/first", "*", 16),
        ("body/last", "body/last", 16),
    ]
    text = str(mpjax.audit(run, x, policies=MAP))
    assert all(path in text for path in ("body/first", "body/last", "f16"))


def test_a_new_framework_s_patterns_are_checked(toy: Layer) -> None:
    with pytest.raises(ValueError, match=r"'body/lats' governs no module.*'body/last'"):
        mpjax.autocast(toy, {"body/lats": "bf16"})(jnp.ones((2, 4)))


def test_a_framework_whose_modules_follow_the_caller_says_so_to_apply_policy(toy: Layer) -> None:
    with pytest.raises(
        TypeError, match=r"Layer is a model of toy, whose modules follow.*mpjax\.autocast\(fn"
    ):
        mpjax.apply_policy(toy, MAP)


def test_what_belongs_to_no_framework_is_refused_with_the_way_out() -> None:
    with pytest.raises(
        TypeError, match=r"expects a module of flax.nnx or Equinox, got dict.*mpjax\.autocast"
    ):
        mpjax.apply_policy({}, MAP)
