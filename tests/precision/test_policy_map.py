import json
import pickle

import flax.linen as nn
import jax.numpy as jnp
import jmp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import mpjax
from mpjax._precision.policy_map import DEFAULT_ENTRY, ancestors

BF16_MIXED, F32 = mpjax.get_policy("p=f32,c=bf16,o=f32"), mpjax.get_policy("f32")


class Attention(nn.Module):
    pass


class CausalAttention(Attention):
    pass


# --------------------------------------------------------------------------------------------- matching


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("attn", "attn", True),
        ("attn", "block/attn", False),
        ("attn", "attn/query", False),
        (".*attn", "block/attn", True),
        (".*attn.*", "block/attn/query", True),
        (r"block_\d+/attn", "block_12/attn", True),
        (r"block_\d+/attn", "block_a/attn", False),
        ("blocks/0/attn", "blocks/0/attn", True),
        ("a|b", "b", True),
        ("a|b", "ab", False),
        ("", "", True),
        (".*", "", True),
        ("ATTN", "attn", False),
    ],
)
def test_a_pattern_must_match_the_whole_path(pattern, path, matches):
    assert mpjax.PolicyMap({pattern: "bf16"}).match(path) == (0 if matches else None)


def test_the_first_match_wins():
    policies = mpjax.PolicyMap({"a/b": "f16", "a/.*": "bf16", ".*": "f32"})
    assert [policies.match(path) for path in ("a/b", "a/c", "d")] == [0, 1, 2]


def test_a_class_governs_its_instances_and_those_of_its_subclasses():
    policies = mpjax.PolicyMap({Attention: "bf16"})
    assert policies.match("x", Attention) == 0
    assert policies.match("x", CausalAttention) == 0
    assert policies.match("x", nn.Dense) is None
    assert policies.match("x") is None


def test_a_subclass_does_not_govern_its_base():
    assert mpjax.PolicyMap({CausalAttention: "bf16"}).match("x", Attention) is None


def test_patterns_and_classes_are_tried_in_the_order_written():
    by_class = mpjax.PolicyMap({Attention: "bf16", "head": "f16"})
    by_path = mpjax.PolicyMap({"head": "f16", Attention: "bf16"})
    assert str(by_class.policy(by_class.match("head", Attention))) == "p=bf16,c=bf16,o=bf16"
    assert str(by_path.policy(by_path.match("head", Attention))) == "p=f16,c=f16,o=f16"


def test_what_nothing_matches_inherits_from_its_nearest_matching_ancestor():
    policies = mpjax.PolicyMap({"a": "bf16", "a/b/c": "f16"}, default="f32")
    resolved = {path: policies.resolve(path) for path in ("", "a", "a/b", "a/b/c", "a/b/c/d", "ab", "z/a")}
    assert resolved == {
        "": DEFAULT_ENTRY,
        "a": 0,
        "a/b": 0,
        "a/b/c": 1,
        "a/b/c/d": 1,
        "ab": DEFAULT_ENTRY,
        "z/a": DEFAULT_ENTRY,
    }


def test_an_ancestor_may_be_matched_by_its_class():
    policies = mpjax.PolicyMap({Attention: "bf16"})
    assert policies.resolve("block/attn/query", {"block/attn": CausalAttention}) == 0
    assert policies.resolve("block/attn/query") == DEFAULT_ENTRY


def test_a_pattern_for_the_top_module_is_inherited_by_all():
    assert mpjax.PolicyMap({"": "bf16"}).resolve("a/b/c") == 0


@pytest.mark.parametrize(
    ("path", "expected"), [("a/b/c", ["a/b/c", "a/b", "a", ""]), ("a", ["a", ""]), ("", [""])]
)
def test_the_ancestors_of_a_path_go_from_itself_to_the_top(path, expected):
    assert list(ancestors(path)) == expected


# --------------------------------------------------------------------------------------------- default, equality


def test_the_default_is_float32_throughout():
    assert mpjax.PolicyMap().default == F32
    assert mpjax.PolicyMap({"a": "bf16"}).default == F32


def test_the_default_is_given_as_an_argument_or_under_the_star():
    assert mpjax.PolicyMap({"a": "f16", "*": "bf16"}) == mpjax.PolicyMap({"a": "f16"}, default="bf16")


def test_the_star_may_stand_anywhere_and_is_no_pattern():
    policies = mpjax.PolicyMap({"*": "bf16", "a": "f16"})
    assert policies.match("a") == 0
    assert policies.match("b") is None
    assert policies.policy(policies.resolve("b")) == mpjax.get_policy("bf16")


def test_policies_lists_every_policy_with_the_default_last():
    policies = mpjax.PolicyMap({"a": "f16", "b": "bf16"}, default="f32")
    assert policies.policies == tuple(map(mpjax.get_policy, ("f16", "bf16", "f32")))


def test_values_may_be_strings_or_policies_ours_or_jmps():
    values = ("p=f32,c=bf16,o=f32", BF16_MIXED, jmp.get_policy("p=f32,c=bf16,o=f32"))
    assert len({mpjax.PolicyMap({"a": value}, default=value) for value in values}) == 1


def test_maps_compare_and_hash_by_value():
    a, b = (mpjax.PolicyMap({"a": "p=full,c=half"}, default="f32") for _ in range(2))
    assert a == b
    assert hash(a) == hash(b)


@pytest.mark.parametrize(
    "other",
    [
        mpjax.PolicyMap({"a": "f16"}, default="bf16"),
        mpjax.PolicyMap({"b": "bf16"}, default="bf16"),
        mpjax.PolicyMap({"a": "bf16"}, default="f32"),
        mpjax.PolicyMap({}, default="bf16"),
        mpjax.PolicyMap({"a": "bf16", "b": "bf16"}, default="bf16"),
    ],
)
def test_maps_that_differ_in_anything_are_not_equal(other):
    assert mpjax.PolicyMap({"a": "bf16"}, default="bf16") != other


def test_the_order_of_entries_is_part_of_a_map():
    assert mpjax.PolicyMap({"a": "f16", "b": "f16"}) != mpjax.PolicyMap({"b": "f16", "a": "f16"})


def test_a_map_cannot_be_changed():
    policies = mpjax.PolicyMap({"a": "f16"})
    with pytest.raises(AttributeError):
        policies.default = BF16_MIXED


def test_changing_the_dict_a_map_was_made_from_does_not_change_the_map():
    patterns = {"a": "f16", "*": "bf16"}
    policies = mpjax.PolicyMap(patterns)
    patterns["b"] = "f32"
    assert policies == mpjax.PolicyMap({"a": "f16"}, default="bf16")
    assert patterns["*"] == "bf16"


# --------------------------------------------------------------------------------------------- to and from dicts

policy_strings = st.sampled_from(("f32", "bf16", "c=f16", "p=f32,c=bf16,o=f32", "c=bf16,gemm=fp8"))
maps = st.builds(
    mpjax.PolicyMap,
    st.dictionaries(
        st.sampled_from((".*attn", r"block_\d+/mlp", "head", "", Attention, nn.Dense, nnx.Linear)),
        policy_strings,
        max_size=4,
    ),
    policy_strings,
)


@given(maps)
def test_every_map_goes_through_json_and_comes_back_equal(policies):
    plain = json.loads(json.dumps(policies.to_dict()))
    assert all(type(k) is type(v) is str for k, v in plain.items())
    for back in (mpjax.PolicyMap.from_dict(plain), mpjax.as_policy_map(plain), mpjax.PolicyMap(plain)):
        assert back == policies
        assert hash(back) == hash(policies)


@given(maps)
def test_every_map_survives_pickling(policies):
    assert pickle.loads(pickle.dumps(policies)) == policies


def test_the_dict_form_shows_resolved_policies_classes_by_name_and_the_default():
    policies = mpjax.PolicyMap({".*attn": "c=half", nn.Dense: "bf16"}, default="mixed_bfloat16")
    assert policies.to_dict() == {
        ".*attn": "p=full,c=f16,o=f16",
        "class:flax.linen.linear.Dense": "p=bf16,c=bf16,o=bf16",
        "*": "p=full,c=bf16,o=full",
    }


def test_a_map_from_a_dict_still_finds_classes():
    policies = mpjax.PolicyMap.from_dict(mpjax.PolicyMap({Attention: "bf16"}).to_dict())
    assert policies.match("x", CausalAttention) == 0


@pytest.mark.parametrize(
    ("policies", "printed"),
    [
        (mpjax.PolicyMap(default="bf16"), "p=bf16,c=bf16,o=bf16"),
        (mpjax.PolicyMap({"a": "f16"}), "a: p=f16,c=f16,o=f16; *: p=full,c=full,o=full"),
    ],
)
def test_a_map_prints_on_one_line(policies, printed):
    assert str(policies) == printed


@pytest.mark.parametrize(
    "given", ["p=f32,c=bf16,o=f32", BF16_MIXED, jmp.get_policy("p=f32,c=bf16,o=f32"), {"*": BF16_MIXED}]
)
def test_every_way_to_give_a_policy_stands_for_a_map(given):
    assert mpjax.as_policy_map(given) == mpjax.PolicyMap(default=BF16_MIXED)


def test_a_map_is_taken_as_it_is():
    policies = mpjax.PolicyMap({"a": "f16"})
    assert mpjax.as_policy_map(policies) is policies


# --------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("pattern", ["block_(", "[a", "*attn", "a**", "(?P<x"])
def test_a_pattern_that_does_not_compile_is_refused_when_the_map_is_made(pattern):
    with pytest.raises(ValueError) as e:
        mpjax.PolicyMap({pattern: "bf16"})
    assert f"Policy pattern '{pattern}' does not compile as a regular expression" in str(e.value)
    assert "as in '.*attn.*'; '*' alone is the key of the default" in str(e.value)


def test_a_wrong_policy_is_named_with_its_pattern():
    with pytest.raises(ValueError) as e:
        mpjax.PolicyMap({".*attn": "p=f32,c=bf61"})
    assert "Unknown dtype 'bf61'; did you mean 'bf16'?" in str(e.value)
    assert "(The policy for pattern '.*attn'.)" in str(e.value)


def test_a_value_that_is_no_policy_is_named_with_its_pattern():
    with pytest.raises(TypeError, match=r"got 16 of type int\. \(The policy for pattern 'head'\.\)"):
        mpjax.PolicyMap({"head": 16})


@pytest.mark.parametrize("key", [3, None, ("a",)])
def test_a_key_that_is_neither_pattern_nor_class_is_refused(key):
    with pytest.raises(TypeError) as e:
        mpjax.PolicyMap({key: "bf16"})
    assert "A policy pattern must be a regular expression (a string) or a module class" in str(e.value)
    assert repr(key) in str(e.value)


def test_a_default_that_is_given_twice_is_refused_with_both():
    with pytest.raises(ValueError, match=r"The default is given twice: as '\*': 'f16' and as default='bf16'"):
        mpjax.PolicyMap({"*": "f16"}, default="bf16")


@pytest.mark.parametrize("value", [None, 16, [("a", "bf16")]])
def test_what_stands_for_no_map_is_refused(value):
    with pytest.raises(TypeError, match="Expected a policy string"):
        mpjax.as_policy_map(value)


PATHS = ("", "embed", "blocks/0/attn", "blocks/0/mlp", "blocks/1/attn", "head")


def test_a_pattern_that_governs_no_module_is_refused_with_the_closest_paths():
    with pytest.raises(ValueError) as e:
        mpjax.PolicyMap({"blocks/./atn": "bf16"}).check_governs([], PATHS)
    message = str(e.value)
    assert "Policy pattern 'blocks/./atn' governs no module. It must match a module's whole path" in message
    assert "the closest paths are 'blocks/" in message
    assert message.index("'blocks/0/attn'") < message.index("'head'")
    assert "`mpjax.explain(model, policies, …)` lists them all." in message


def test_a_pattern_behind_a_wider_one_is_refused_with_the_order_to_use():
    with pytest.raises(ValueError) as e:
        mpjax.PolicyMap({"blocks/.*": "bf16", "blocks/0/attn": "f32"}).check_governs([0], PATHS)
    assert (
        "Policy pattern 'blocks/0/attn' governs no module: 'blocks/0/attn' matches it, but 'blocks/.*' comes first. "
        "Put the narrower pattern before the wider one."
    ) in str(e.value)


def test_a_class_that_no_module_has_is_refused_by_name():
    with pytest.raises(ValueError, match=r"Policy pattern 'class:.*Attention' governs no module"):
        mpjax.PolicyMap({Attention: "bf16"}).check_governs([], PATHS)


def test_a_map_whose_entries_all_govern_is_accepted():
    mpjax.PolicyMap({"embed": "bf16", "head": "f32"}).check_governs([0, 1], PATHS)


def test_a_pattern_that_governs_no_module_is_refused_when_the_map_meets_a_model():
    model = nn.Sequential([nn.Dense(2)])
    params = model.init(jnp.zeros(2, np.uint32), jnp.ones((1, 2)))
    run = mpjax.autocast(model.apply, {"layers_1": "bf16", "*": "f32"})
    with pytest.raises(ValueError, match=r"Policy pattern 'layers_1' governs no module.*'layers_0'"):
        run(params, jnp.ones((1, 2)))
