import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax._precision import dtypes


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("bf16", jnp.bfloat16),
        ("bfloat16", jnp.bfloat16),
        ("f16", jnp.float16),
        ("float16", jnp.float16),
        ("fp16", jnp.float16),
        ("full", jnp.float32),
        ("f32", jnp.float32),
        ("float32", jnp.float32),
        ("fp32", jnp.float32),
        ("f64", np.float64),
        ("float64", np.float64),
        ("f8_e4m3fn", jnp.float8_e4m3fn),
        ("float8_e4m3fn", jnp.float8_e4m3fn),
        ("fp8_e5m2", jnp.float8_e5m2),
        ("float8_e8m0fnu", jnp.float8_e8m0fnu),
        ("float4_e2m1fn", jnp.float4_e2m1fn),
        ("f4_e2m1fn", jnp.float4_e2m1fn),
    ],
)
def test_a_name_stands_for_its_dtype(name, dtype):
    assert dtypes.parse_dtype(name) == np.dtype(dtype)
    assert isinstance(dtypes.parse_dtype(name), np.dtype)


@pytest.mark.parametrize("name", [n for n in dir(jnp) if n.startswith(("float8_", "float4_"))])
def test_every_narrow_format_of_jax_has_a_name_that_is_printed_and_parsed(name):
    dtype = np.dtype(getattr(jnp, name))
    assert dtypes.parse_dtype(name) == dtype
    assert dtypes.parse_dtype(dtypes.dtype_name(dtype)) == dtype


@pytest.mark.parametrize("name", ["BF16", " bf16 ", "BFloat16"])
def test_case_and_surrounding_spaces_do_not_matter(name):
    assert dtypes.parse_dtype(name) == jnp.bfloat16


def test_half_is_float16_on_cpu():
    assert jax.local_devices()[0].platform == "cpu"
    assert mpjax.half_dtype() is jnp.float16
    assert dtypes.parse_dtype("half") == np.float16


def test_half_is_bfloat16_on_tpu(monkeypatch):
    class Tpu:
        platform = "tpu"

    monkeypatch.setattr(jax, "local_devices", lambda: [Tpu()])
    assert mpjax.half_dtype() is jnp.bfloat16
    assert dtypes.parse_dtype("half") == jnp.bfloat16


def test_an_argument_overrides_half_for_this_one_call_only():
    assert dtypes.parse_dtype("half", half=jnp.bfloat16) == jnp.bfloat16
    assert dtypes.parse_dtype("half") == np.float16


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (jnp.bfloat16, "bf16"),
        (np.float16, "f16"),
        (np.float32, "full"),
        (np.float64, "f64"),
        (jnp.float8_e5m2, "f8_e5m2"),
        (np.int32, "int32"),
    ],
)
def test_a_dtype_prints_as_its_short_name(dtype, name):
    assert dtypes.dtype_name(dtype) == name


def test_an_unknown_name_is_quoted_with_the_nearest_name_and_all_valid_ones():
    with pytest.raises(ValueError) as e:
        dtypes.parse_dtype("blfoat16")
    message = str(e.value)
    assert "Unknown dtype 'blfoat16'" in message
    assert "did you mean 'bfloat16'?" in message
    for name in ("half", "full", "float16", "f16", "f8_e4m3fn", "float4_e2m1fn"):
        assert name in message


def test_a_name_like_no_other_gets_no_suggestion():
    with pytest.raises(ValueError, match="Unknown dtype 'zzz'") as e:
        dtypes.parse_dtype("zzz")
    assert "did you mean" not in str(e.value)


@pytest.mark.parametrize(
    ("dtype", "floating"),
    [
        (np.float16, True),
        (jnp.bfloat16, True),
        (np.float64, True),
        (jnp.float8_e4m3fn, True),
        (jnp.float4_e2m1fn, True),
        (np.int32, False),
        (np.bool_, False),
        (np.complex64, False),
        (jax.dtypes.float0, False),
        (jnp.int4, False),
    ],
)
def test_only_real_formats_are_floating(dtype, floating):
    assert dtypes.is_floating(dtype) is floating


def test_keys_are_not_floating():
    assert not dtypes.is_floating(jax.random.key(0).dtype)


@pytest.mark.parametrize(
    ("dtype", "largest", "smallest_normal", "smallest_subnormal", "epsilon", "count"),
    [
        (np.float16, 65504.0, 2.0**-14, 2.0**-24, 2.0**-10, 2048),
        (jnp.bfloat16, 3.3895313892515355e38, 2.0**-126, 2.0**-133, 2.0**-7, 256),
        (np.float32, 3.4028234663852886e38, 2.0**-126, 2.0**-149, 2.0**-23, 2**24),
        (jnp.float8_e4m3fn, 448.0, 2.0**-6, 2.0**-9, 2.0**-3, 16),
        (jnp.float8_e5m2, 57344.0, 2.0**-14, 2.0**-16, 2.0**-2, 8),
    ],
)
def test_limits_of_each_format(dtype, largest, smallest_normal, smallest_subnormal, epsilon, count):
    assert mpjax.limits(dtype) == dtypes.Limits(largest, smallest_normal, smallest_subnormal, epsilon, count)


@pytest.mark.parametrize("name", ["float16", "bf16", "f8_e4m3fn", "float8_e5m2"])
def test_a_sum_of_ones_stops_at_the_count_of_the_format(name):
    dtype, count = dtypes.parse_dtype(name), mpjax.limits(name).count
    one, total = np.ones([], dtype), np.asarray(count, dtype)
    assert float(total) == count
    assert total + one == total
    assert np.asarray(count - 1, dtype) + one == total


def test_limits_take_a_name_or_a_dtype():
    assert mpjax.limits("bf16") == mpjax.limits(jnp.bfloat16) == mpjax.limits(np.dtype(jnp.bfloat16))


def test_limits_of_an_unknown_name_are_refused():
    with pytest.raises(ValueError, match="Unknown dtype 'int7'"):
        mpjax.limits("int7")
