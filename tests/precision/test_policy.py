import dataclasses
import pickle

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trees import is_floating_array, same, trees

import mpjax
from mpjax._precision import dtypes
from mpjax._precision.policy import GEMM_RECIPES

BF16, F16, F32 = np.dtype(jnp.bfloat16), np.dtype(np.float16), np.dtype(np.float32)

all_dtypes = st.sampled_from(sorted(dtypes._BY_DTYPE, key=str))
policies = st.builds(mpjax.Policy, all_dtypes, all_dtypes, all_dtypes, st.sampled_from((None, *GEMM_RECIPES)))


@pytest.mark.parametrize(
    ("text", "param", "compute", "output"),
    [
        ("p=f32,c=bf16,o=f32", F32, BF16, F32),
        ("params=float32,compute=half", F32, F16, F16),
        ("bf16", BF16, BF16, BF16),
        ("full", F32, F32, F32),
        ("c=f16", F32, F16, F16),
        ("p=f16", F16, F16, F16),
        ("p=f16,c=bf16", F16, BF16, BF16),
        ("o=bf16", F32, F32, BF16),
        ("o=f32,c=bf16,p=f16", F16, BF16, F32),
        (" P = F32 , C = BF16 , output = Float32 ", F32, BF16, F32),
        ("p=fp32,c=fp16,o=fp32", F32, F16, F32),
        ("mixed_float16", F32, F16, F32),
        ("mixed_bfloat16", F32, BF16, F32),
        ("Mixed_BFloat16", F32, BF16, F32),
    ],
)
def test_a_string_names_the_three_dtypes(text, param, compute, output):
    assert mpjax.get_policy(text) == mpjax.Policy(param, compute, output)


def test_gemm_names_a_narrower_operand_format():
    policy = mpjax.get_policy("p=f32,c=bf16,o=f32,gemm=fp8")
    assert policy == mpjax.Policy(F32, BF16, F32, "fp8")
    assert policy.gemm == "fp8"


def test_gemm_is_none_unless_given():
    assert mpjax.get_policy("bf16").gemm is None


@given(policies)
def test_every_policy_is_parsed_back_from_its_string(policy):
    assert mpjax.get_policy(str(policy)) == policy


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("f32", "p=full,c=full,o=full"),
        ("p=f32,c=bf16,o=f32", "p=full,c=bf16,o=full"),
        ("p=f32,c=f16,o=float8_e4m3fn", "p=full,c=f16,o=f8_e4m3fn"),
        ("c=bf16,gemm=mxfp8", "p=full,c=bf16,o=bf16,gemm=mxfp8"),
    ],
)
def test_a_policy_prints_its_short_names(text, printed):
    assert str(mpjax.get_policy(text)) == printed


def test_half_is_resolved_when_it_is_parsed_and_prints_as_what_it_resolved_to():
    assert str(mpjax.get_policy("c=half")) == "p=full,c=f16,o=f16"
    assert str(mpjax.get_policy("c=half", half=jnp.bfloat16)) == "p=full,c=bf16,o=bf16"


def test_a_policy_once_parsed_keeps_its_half_when_another_call_chooses_another():
    before = mpjax.get_policy("half")
    assert mpjax.get_policy("half", half=jnp.bfloat16).compute_dtype == BF16
    assert before.compute_dtype == F16
    assert mpjax.get_policy("half").compute_dtype == F16
    assert mpjax.half_dtype() is jnp.float16


def test_equal_policies_hash_equal_however_their_dtypes_were_spelled():
    spelled = [
        mpjax.Policy(jnp.float32, jnp.bfloat16, jnp.float32),
        mpjax.Policy(np.dtype("float32"), np.dtype(jnp.bfloat16), np.float32),
        mpjax.Policy("float32", "bf16", "full"),
        mpjax.get_policy("c=bf16,o=f32"),
    ]
    assert len(set(spelled)) == 1


def test_policies_that_differ_in_gemm_only_are_different():
    assert mpjax.Policy(F32, BF16, F32) != mpjax.Policy(F32, BF16, F32, "fp8")


def test_dtypes_are_canonical_numpy_dtypes():
    policy = mpjax.Policy(jnp.float32, jnp.bfloat16, "f16")
    for dtype in (policy.param_dtype, policy.compute_dtype, policy.output_dtype):
        assert isinstance(dtype, np.dtype)


def test_a_policy_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        mpjax.get_policy("bf16").param_dtype = F32


def test_a_policy_is_a_policy_of_jmp():
    assert isinstance(mpjax.get_policy("bf16"), jmp.Policy)


def test_a_policy_survives_pickling():
    policy = mpjax.get_policy("p=f32,c=bf16,o=f32,gemm=fp8")
    assert pickle.loads(pickle.dumps(policy)) == policy


def test_a_policy_is_taken_as_it_is():
    policy = mpjax.get_policy("mixed_bfloat16")
    assert mpjax.get_policy(policy) is policy


def test_a_policy_of_jmp_is_taken_over():
    assert mpjax.get_policy(jmp.get_policy("p=f32,c=bf16,o=f16")) == mpjax.Policy(F32, BF16, F16)


def test_with_output_dtype_changes_nothing_else():
    policy = mpjax.Policy(F32, BF16, F32, "fp8")
    assert policy.with_output_dtype(jnp.float16) == mpjax.Policy(F32, BF16, F16, "fp8")


def test_with_output_dtype_takes_a_name():
    assert mpjax.get_policy("f32").with_output_dtype("bf16").output_dtype == BF16


@given(trees())
def test_casting_by_a_policy_changes_floating_arrays_and_nothing_else(tree):
    policy = mpjax.get_policy("p=f16,c=bf16,o=f32")
    for cast, dtype in (
        (policy.cast_to_param, policy.param_dtype),
        (policy.cast_to_compute, policy.compute_dtype),
        (policy.cast_to_output, policy.output_dtype),
    ):
        out = cast(tree)
        assert jax.tree.structure(out) == jax.tree.structure(tree)
        for before, after in zip(jax.tree.leaves(tree), jax.tree.leaves(out), strict=True):
            if is_floating_array(before):
                assert after.dtype == dtype
                assert same(after, before.astype(dtype))
            else:
                assert after is before


@pytest.mark.parametrize(
    ("text", "quoted", "way_out"),
    [
        ("p=f32,c=bf61", "Unknown dtype 'bf61'", "did you mean 'bf16'?"),
        ("flaot16", "Unknown dtype 'flaot16'", "did you mean 'float16'?"),
        ("mixed_blfoat16", "In policy 'mixed_blfoat16'", "mixed_bfloat16, mixed_float16"),
        ("p=f32,compuet=bf16", "Unknown key 'compuet'", "did you mean 'compute'?"),
        ("q=f32", "Unknown key 'q' in 'q=f32'", "should be 'params', 'compute' or 'output'"),
        ("p=f32,p=bf16", "'p=bf16' in policy 'p=f32,p=bf16' repeats 'p=f32'", "give each key once"),
        ("p=f32,params=f32", "repeats 'p=f32'", "give each key once"),
        ("p=f32,c=", "'c=' in policy 'p=f32,c=' has no value", "expected key=dtype"),
        ("p=f32,", "has no value", "expected key=dtype, as in 'p=f32,c=bf16,o=f32'"),
        ("p=f32,bf16", "'bf16' in policy 'p=f32,bf16' has no value", "expected key=dtype"),
        ("p=f32=f16", "Unknown dtype 'f32=f16'", "A dtype must be half, full"),
        ("", "Unknown dtype ''", "A dtype must be half, full"),
        ("c=bf16,gemm=fp7", "Unknown gemm recipe 'fp7'", "did you mean 'fp8'?"),
        ("c=bf16,gemm=int2", "Unknown gemm recipe 'int2'", "fp8, mxfp8, mxfp4, nvfp4"),
    ],
)
def test_a_wrong_string_is_quoted_with_the_way_out(text, quoted, way_out):
    with pytest.raises(ValueError) as e:
        mpjax.get_policy(text)
    assert quoted in str(e.value)
    assert way_out in str(e.value)


@pytest.mark.parametrize("value", [None, 16, np.float16, ["bf16"]])
def test_what_is_neither_string_nor_policy_is_refused(value):
    with pytest.raises(TypeError) as e:
        mpjax.get_policy(value)
    assert repr(value) in str(e.value)
    assert "Expected a policy string such as 'p=f32,c=bf16,o=f32' or a Policy" in str(e.value)


@pytest.mark.parametrize("field", ["param_dtype", "compute_dtype", "output_dtype"])
@pytest.mark.parametrize("value", [np.int32, bool, 7, None])
def test_a_dtype_that_is_not_floating_is_refused_with_its_field(field, value):
    given = {"param_dtype": F32, "compute_dtype": F32, "output_dtype": F32} | {field: value}
    with pytest.raises(ValueError) as e:
        mpjax.Policy(**given)
    assert f"{field} must be a floating dtype such as jnp.bfloat16 or 'bf16', got {value!r}" in str(e.value)


def test_the_default_policy_computes_in_bfloat16_on_cpu():
    assert mpjax.default_policy() == mpjax.get_policy("p=f32,c=bf16,o=f32")


@pytest.mark.parametrize(
    ("platform", "capability", "compute"),
    [
        ("tpu", None, BF16),
        ("gpu", "9.0", BF16),
        ("gpu", "8.0", BF16),
        ("gpu", "10.0", BF16),
        ("gpu", "12.0", BF16),
        ("gpu", "7.5", F16),
        ("gpu", "6.1", F16),
        ("gpu", "gfx90a", BF16),
        ("gpu", None, BF16),
    ],
)
def test_the_default_policy_follows_the_backend(monkeypatch, platform, capability, compute):
    class Device:
        pass

    Device.platform = platform
    if capability:
        Device.compute_capability = capability
    monkeypatch.setattr(jax, "local_devices", lambda: [Device()])
    assert mpjax.default_policy() == mpjax.Policy(F32, compute, F32)
