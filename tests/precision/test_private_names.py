"""Only jax_internals.py uses private parts of JAX."""

import ast
import pathlib
import re
from collections.abc import Iterator

import pytest

import mpjax

SOURCE = pathlib.Path(mpjax.__file__).parent
PUBLIC = ("jax.extend.core", "jax.extend.source_info_util")


def private_names(tree: ast.AST) -> Iterator[str]:
    """The private parts of JAX that a module imports or names in full."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        for name in names:
            private = re.match(r"jax(lib)?\.(_\w+|interpreters|extend\.\w+)\b|jaxlib\.mlir\b", name)
            if private and not name.startswith(PUBLIC) and not name.endswith("__"):
                yield name


def test_the_search_for_private_names_finds_them_in_every_form():
    for text in (
        "import jax._src.core",
        "from jax._src import core",
        "from jax.interpreters import ad",
        "x = jax.interpreters.ad.jvp",
        "from jax.extend import linear_util",
    ):
        assert list(private_names(ast.parse(text))), text
    for text in (
        "import jax",
        "from jax.extend.core import Literal",
        "x = jax.extend.core.Primitive",
        "import jax.numpy",
    ):
        assert not list(private_names(ast.parse(text))), text


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_other_file_uses_private_parts_of_jax(path):
    found = set(private_names(ast.parse(path.read_text())))
    assert not found or path.name == "jax_internals.py", (
        f"move {sorted(found)} to _precision/jax_internals.py"
    )
