import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import mpjax

BF16_MIXED = "p=full,c=bf16,o=full"
POLICIES = {"head": "p=bf16", "*": "p=f32,c=bf16,o=f32"}


class Linen(nn.Module):
    def setup(self):
        self.body = nn.Sequential([nn.Dense(4), nn.relu, nn.Dense(4)])
        self.head = nn.Dense(2)

    def __call__(self, x, train=True):
        return self.head(self.body(x) if train else x)


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.body = nnx.Linear(3, 4, rngs=rngs)
        self.head = nnx.Linear(4, 2, rngs=rngs)


def explain_linen():
    return mpjax.explain(Linen(), POLICIES, jnp.ones((1, 3)))


def explain_nnx():
    return mpjax.explain(Nnx(nnx.Rngs(0)), POLICIES)


@pytest.mark.parametrize("explain", [explain_linen, explain_nnx])
def test_every_module_has_a_row_with_what_governs_it(explain):
    table = explain()
    head = table["head"]
    assert (head.pattern, head.policy) == ("head", "p=bf16,c=bf16,o=bf16")
    assert (head.parameters, head.dtypes) == (4 * 2 + 2, ("bfloat16",))
    top = table[""]
    assert (top.pattern, top.policy, top.parameters, top.dtypes) == ("*", BF16_MIXED, 0, ())
    assert (table["body"].pattern, table["body"].policy) == ("*", BF16_MIXED)


def test_the_rows_of_a_linen_model_name_paths_and_classes():
    assert [(row.path, row.cls) for row in explain_linen().rows] == [
        ("", "Linen"),
        ("body", "Sequential"),
        ("body/layers_0", "Dense"),
        ("body/layers_2", "Dense"),
        ("head", "Dense"),
    ]


def test_parameters_are_counted_once_each():
    assert explain_linen().parameters == (3 * 4 + 4) + (4 * 4 + 4) + (4 * 2 + 2)
    assert explain_nnx().parameters == (3 * 4 + 4) + (4 * 2 + 2)


def test_the_table_shows_modules_patterns_policies_and_a_total():
    text = str(explain_linen())
    header, *_ = lines = text.splitlines()
    assert header.split() == ["module", "class", "decided", "by", "policy", "parameters", "stored", "in"]
    (head,) = (line for line in lines if line.startswith("head"))
    assert head.split() == ["head", "Dense", "head", "p=bf16,c=bf16,o=bf16", "10", "bfloat16"]
    assert lines[-1].split() == ["total", "46", "bfloat16,", "float32"]


def test_a_notebook_gets_the_same_cells_escaped():
    html = mpjax.explain(
        Linen(), {"(?=h)head": "p=bf16", "<?head|body": "f32"}, jnp.ones((1, 3))
    )._repr_html_()
    assert html.startswith("<table>")
    assert "<td>(?=h)head</td>" in html
    assert "<td>&lt;?head|body</td>" in html


def test_the_call_takes_shapes_and_keyword_arguments_and_computes_nothing():
    huge = jax.ShapeDtypeStruct((10**9, 3), jnp.float32)
    table = mpjax.explain(Linen(), "bf16", huge, train=False)
    assert [row.path for row in table.rows] == ["", "head"]


def test_a_pattern_that_governs_no_module_is_refused():
    for explain in (
        lambda p: mpjax.explain(Linen(), p, jnp.ones((1, 3))),
        lambda p: mpjax.explain(Nnx(nnx.Rngs(0)), p),
    ):
        with pytest.raises(ValueError, match=r"Policy pattern 'haed' governs no module.*'head'"):
            explain({"haed": "bf16"})


def test_an_unknown_path_is_refused_with_the_closest():
    with pytest.raises(KeyError, match=r"No module 'heda'; the closest are .*'head'"):
        explain_linen()["heda"]


def test_what_is_no_flax_module_is_refused():
    with pytest.raises(
        TypeError, match=r"explain expects a model of flax\.linen, flax\.nnx, equinox, haiku, got function"
    ):
        mpjax.explain(lambda x: x, "bf16")
