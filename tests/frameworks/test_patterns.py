"""Which policy governs which module of a model, in every framework."""

from typing import Any

import jax
import pytest
from frameworks import BF16, EVERY_FRAMEWORK, F16, Model, X, build, dtypes_of, operands
from in_equinox import Attention as EquinoxAttention
from in_haiku import Attention as HaikuAttention
from in_linen import Attention as LinenAttention
from in_nnx import Attention as NnxAttention
from programs import exported_matmuls, operand_dtypes

import mpjax

HOW = pytest.mark.parametrize("how", ["loop", "remat", "scan", "scan of remat"])
INSIDE = pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
FLOAT32 = "p=f32,c=f32,o=bf16"
ATTENTION_FLOAT32 = {r".*attn.*": FLOAT32, "*": BF16}
ATTENTION = {
    "linen": LinenAttention,
    "nnx": NnxAttention,
    "equinox": EquinoxAttention,
    "haiku": HaikuAttention,
}


def in_attention(path: str) -> bool:
    return "attn" in path.split("/")


# ------------------------------------------------------------------------------------------------ paths


@EVERY_FRAMEWORK
@HOW
@INSIDE
def test_a_map_changes_exactly_the_modules_it_names_forward_and_backward(
    framework: str, how: str, inside: bool
) -> None:
    model = build(framework, "Blocks", X, how=how)
    found = model.matmuls(model.grads(ATTENTION_FLOAT32, inside=inside))
    assert {path.split("/")[-1] for path in found} == {"q", "k", "v", "out", "attn", "mlp", "embed", "head"}
    for path, dtypes in found.items():
        assert dtypes == ({"float32"} if in_attention(path) else {"bfloat16"}), path


@EVERY_FRAMEWORK
@HOW
def test_a_map_may_also_name_the_half_precision_modules(framework: str, how: str) -> None:
    model = build(framework, "Blocks", X, how=how)
    blocks = model.stacked if "scan" in how else model.path(r"block_\d")
    policies = mpjax.PolicyMap({f"{blocks}/attn": F16}, default="float32")
    for path, dtypes in model.matmuls(model.grads(policies)).items():
        assert dtypes == ({"float16"} if in_attention(path) else {"float32"}), path


@EVERY_FRAMEWORK
@pytest.mark.parametrize("how", ["loop", "scan of remat"])
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_a_map_reaches_the_program_for_accelerators(framework: str, how: str, platform: str) -> None:
    model = build(framework, "Blocks", X, how=how)
    grads, args = model.grads(ATTENTION_FLOAT32), model.arguments()
    exported = exported_matmuls(grads, *args, platform=platform)
    traced = operand_dtypes(grads, *args)
    assert set(exported) == {("bf16", "bf16"), ("f32", "f32")}
    # Lowering may drop matmuls whose result is not used, but never changes what the others take.
    for name, exported_name in (("bfloat16", "bf16"), ("float32", "f32")):
        assert 0 < exported.count((exported_name,) * 2) <= traced.count((name,) * 2)
    assert set(exported_matmuls(model.grads(BF16), *args, platform=platform)) == {("bf16", "bf16")}


@EVERY_FRAMEWORK
def test_a_class_governs_its_instances_and_what_is_below_them(framework: str) -> None:
    model = build(framework, "Blocks", X)
    policies = mpjax.PolicyMap({ATTENTION[framework]: FLOAT32}, default=BF16)
    found = model.matmuls(model.grads(policies))
    assert any(map(in_attention, found))
    for path, dtypes in found.items():
        assert dtypes == ({"float32"} if in_attention(path) else {"bfloat16"}), path


@EVERY_FRAMEWORK
def test_a_class_governs_the_instances_of_its_subclasses(framework: str) -> None:
    module = __import__(f"in_{framework}")
    model = build(framework, "Blocks", X, attention=module.WideAttention)
    policies = mpjax.PolicyMap({ATTENTION[framework]: FLOAT32}, default=BF16)
    found = model.matmuls(model.under(policies))
    assert {path for path, dtypes in found.items() if dtypes == {"float32"}} == set(
        filter(in_attention, found)
    )
    other = mpjax.PolicyMap({module.WideAttention: FLOAT32}, default=BF16)
    plain = build(framework, "Blocks", X)
    with pytest.raises(ValueError, match="governs no module"):
        plain.output_shape(other)


@EVERY_FRAMEWORK
def test_a_class_may_be_named_in_a_config(framework: str) -> None:
    model = build(framework, "Blocks", X)
    policies = {f"class:in_{framework}.Attention": FLOAT32, "*": BF16}
    found = model.matmuls(model.under(policies))
    assert {path for path, dtypes in found.items() if dtypes == {"float32"}} == set(
        filter(in_attention, found)
    )


@EVERY_FRAMEWORK
def test_the_first_matching_pattern_wins(framework: str) -> None:
    model = build(framework, "Blocks", X)
    first = model.path("block_0/attn/q")
    found = model.matmuls(
        model.under({first: "p=f32,c=f16,o=bf16", r".*attn.*": "p=f32,c=f32,o=bf16", "*": BF16})
    )
    assert [path for path, dtypes in found.items() if dtypes == {"float16"}] == [first]


@EVERY_FRAMEWORK
def test_a_module_that_nothing_matches_inherits_from_its_parent(framework: str) -> None:
    model = build(framework, "Blocks", X)
    parent = model.path("block_0")
    found = model.matmuls(model.under({parent: FLOAT32, "*": BF16}))
    assert any(path.startswith(parent) for path in found)
    for path, dtypes in found.items():
        assert dtypes == ({"float32"} if path.startswith(parent) else {"bfloat16"}), path


@EVERY_FRAMEWORK
def test_the_default_governs_what_nothing_reaches_and_is_float32_if_left_out(framework: str) -> None:
    model = build(framework, "Blocks", X)
    head = model.path("head")
    found = model.matmuls(model.under(mpjax.PolicyMap({head: BF16})))
    for path, dtypes in found.items():
        assert dtypes == ({"bfloat16"} if path == head else {"float32"}), path


# ------------------------------------------------------------------------------------------------ errors


def runs(model: Model, policies: Any) -> dict[str, Any]:
    args = model.arguments()
    return {
        "apply": lambda: jax.eval_shape(model.under(policies), *args),
        "jit": lambda: jax.jit(model.under(policies)).lower(*args),
        "gradient": lambda: jax.eval_shape(model.grads(policies), *args),
        "parameters": lambda: jax.eval_shape(lambda: model.params_under(policies)),
        "explain": lambda: model.explain(policies),
    }


@EVERY_FRAMEWORK
@pytest.mark.parametrize("run", ["apply", "jit", "gradient", "parameters", "explain"])
def test_a_pattern_that_governs_no_module_is_an_error_that_names_the_closest_paths(
    framework: str, run: str
) -> None:
    model = build(framework, "Blocks", X)
    wrong, right = model.path("block_0/atn"), model.path("block_0/attn")
    with pytest.raises(
        ValueError,
        match=rf"Policy pattern '{wrong}' governs no module\. It must match a module's whole path; the "
        rf"closest paths are '{right}'.*`mpjax\.explain\(model, policies, …\)` lists them all",
    ):
        runs(model, {wrong: "float32", "*": BF16})[run]()


@EVERY_FRAMEWORK
@pytest.mark.parametrize("run", ["apply", "gradient", "explain"])
def test_a_pattern_hidden_by_a_wider_one_is_an_error_that_says_so(framework: str, run: str) -> None:
    model = build(framework, "Blocks", X)
    wide, narrow = model.path("block_0") + ".*", model.path("block_0/attn")
    with pytest.raises(
        ValueError,
        match=rf"Policy pattern '{narrow}' governs no module: '{narrow}' matches it, but '{wide}' comes first\. "
        "Put the narrower pattern before the wider one",
    ):
        runs(model, {wide: "float32", narrow: F16, "*": BF16})[run]()


@EVERY_FRAMEWORK
@pytest.mark.parametrize("policy", ["p=f32,c=f8_e4m3fn,o=f32", "p=f32,c=bf16,o=f8_e4m3fn"])
def test_a_policy_that_cannot_be_run_is_refused(framework: str, policy: str) -> None:
    model = build(framework, "Blocks", X)
    with pytest.raises(
        ValueError, match=r"to which mpjax does not cast without a scale.*'p=f32,c=bf16,o=f32'"
    ):
        jax.eval_shape(model.under({model.path("head"): policy, "*": BF16}), *model.arguments())


# --------------------------------------------------------------------------- nothing is remembered


@EVERY_FRAMEWORK
def test_a_second_call_gives_the_same_and_no_false_error(framework: str) -> None:
    model = build(framework, "Blocks", X)
    run, args = model.under(ATTENTION_FLOAT32), model.arguments()
    once, jitted = run(*args)[0], jax.jit(run)
    for again in (run, jitted, jitted, model.under(ATTENTION_FLOAT32)):
        out = again(*args)[0]
        assert out.dtype == once.dtype == "float32"
        assert abs(out - once).max() < 0.05


@EVERY_FRAMEWORK
def test_an_inner_jit_whose_trace_is_reused_gives_the_same_and_no_false_error(framework: str) -> None:
    model = build(framework, "Jitted", X)
    policies = {r".*first": "p=f32,c=f32,o=bf16", "*": BF16}
    run, args = model.under(policies), model.arguments()
    first, second, third = (run(*args)[0], run(*args)[0], model.under(policies)(*args)[0])
    assert first.dtype == second.dtype == third.dtype == "float32"
    assert first.tolist() == second.tolist() == third.tolist()
    assert set(operand_dtypes(run, *args)) == {("float32", "float32"), ("bfloat16", "bfloat16")}
    # The same inner jit under other policies, and under none, is traced anew.
    assert operands(model.under(F16), *args) == {"float16"}
    assert operands(model.call("float32"), *args) == {"float32"}
    assert set(operand_dtypes(run, *args)) == {("float32", "float32"), ("bfloat16", "bfloat16")}


@EVERY_FRAMEWORK
def test_calls_of_other_models_through_one_function_do_not_influence_each_other(framework: str) -> None:
    with_attention, without = (
        build(framework, "Blocks", X),
        build(framework, "Spied", X, note=lambda *_: None),
    )
    policies = {with_attention.path("head"): FLOAT32, "*": BF16}
    run = mpjax.autocast(lambda which: which(), mpjax.PolicyMap(policies))

    def call(model: Model) -> Any:
        return lambda: model.call(policies)(*model.arguments())[0]

    for _ in range(2):
        assert run(call(with_attention)).dtype == "float32"
        with pytest.raises(ValueError, match=r"'(model/)?head' governs no module"):
            run(call(without))
    assert dtypes_of(run(lambda: X.astype("bfloat16"))) == {"float32"}


# ----------------------------------------------------------------------------- explain and audit


@EVERY_FRAMEWORK
def test_explain_names_each_module_its_class_what_decided_and_what_it_stores(framework: str) -> None:
    model = build(framework, "Blocks", X)
    head = model.path("head")
    table = model.explain({head: "p=bf16", r".*attn": FLOAT32, "*": BF16})
    rows = {row.path: row for row in table.rows}
    expected = {"": "Blocks", "embed": None, "head": None}
    for i in range(2):
        expected |= {f"block_{i}": "Block", f"block_{i}/attn": "Attention", f"block_{i}/norm": "LayerNorm"}
        expected |= {f"block_{i}/{name}": None for name in ("mlp", "attn/q", "attn/k", "attn/v", "attn/out")}
    containers = {"blocks"} if framework == "nnx" else set()  # an nnx.List is a module, too
    assert {model.path(name) for name in expected} | containers == set(rows)
    for name, cls in expected.items():
        row = rows[model.path(name)]
        is_dense, in_attn = cls is None, "attn" in name
        assert row.cls == (cls or __import__(f"in_{framework}").Dense.__name__)
        assert row.pattern == (head if name == "head" else r".*attn" if in_attn else "*")
        policy = "p=bf16" if name == "head" else FLOAT32 if in_attn else BF16
        assert row.policy == str(mpjax.get_policy(policy))
        count = (8 * 3 + 3 if name == "head" else 8 * 8 + 8) if is_dense else 16 if "norm" in name else 0
        assert row.parameters == count
        assert row.dtypes == (() if not count else ("bfloat16",) if name == "head" else ("float32",))
    assert table.parameters == sum(x.size for x in jax.tree.leaves(model.params))


@EVERY_FRAMEWORK
@HOW
def test_explain_and_the_audit_agree(framework: str, how: str) -> None:
    model = build(framework, "Blocks", X, how=how)
    table = model.explain(ATTENTION_FLOAT32)
    found = model.matmuls(model.grads(ATTENTION_FLOAT32))
    for path, dtypes in found.items():
        assert dtypes == {mpjax.get_policy(table[path].policy).compute_dtype.name}
    audit = mpjax.audit(model.grads(ATTENTION_FLOAT32), *model.arguments(), policies=ATTENTION_FLOAT32)
    assert {row.module for row in audit.matmuls} <= {row.path for row in table.rows}
    assert not audit.of("precision"), audit.findings


@EVERY_FRAMEWORK
def test_the_audit_compares_a_model_without_a_policy_with_the_map_by_path(framework: str) -> None:
    model = build(framework, "Blocks", X)
    policies = {model.path("head"): BF16, "*": "float32"}
    audit = mpjax.audit(model.under("float32"), *model.arguments(), policies=policies)
    assert {finding.module for finding in audit.errors} == {model.path("head")}
