"""Ranges of the formats, and rounding to them against torch's own casts, bit for bit."""

import math
import random
import subprocess
import sys
from functools import cache

import pytest
import torch

from gradlift.formats import FORMATS, Format, get, round_to

EIGHT_BIT = ["float8_e4m3fn", "float8_e5m2"]
NARROW = [*EIGHT_BIT, "float16", "bfloat16"]
BITS = {8: torch.uint8, 16: torch.int16}


@cache
def codes(name):
    """Every value of the format, by its code, as float64."""
    bits = get(name).bits
    every = torch.arange(2**bits, dtype=torch.int32).to(BITS[bits])
    return every.view(getattr(torch, name)).to(torch.float64)


@cache
def finite(name):
    """Its finite values, ascending, each once (-0 included as 0), as float64."""
    every = codes(name)
    return torch.unique(every[every.isfinite()] + 0.0)


@cache
def between(name):
    """Midpoints of neighbours and the float32 values right beside them and beside each code."""
    values = finite(name)
    middle = (values[1:] + values[:-1]) / 2
    points = torch.cat([values, middle]).to(torch.float32)
    assert torch.equal(points.to(torch.float64), torch.cat([values, middle]))
    up, down = torch.tensor(torch.inf), torch.tensor(-torch.inf)
    return torch.cat([points, points.nextafter(up), points.nextafter(down)])


def beyond(name):
    """Around the first value that does not fit, far above it, inf and NaN."""
    format = get(name)
    last_step = 2.0 ** (format.max_exponent - format.mantissa_bits)
    tie = torch.tensor(format.max_value + last_step / 2)
    up, down = torch.tensor(torch.inf), torch.tensor(-torch.inf)
    points = [tie.nextafter(down), tie, tie.nextafter(up), tie * 1.5, tie * 1.01, up]
    points = torch.stack(points)
    return torch.cat([points, -points, torch.tensor([math.nan])])


def same_bits(a, b):
    """Equal in value, sign of zero included; any NaN equals any NaN."""
    return a.shape == b.shape and bool(
        ((a == b) & (a.signbit() == b.signbit()) | (a.isnan() & b.isnan())).all()
    )


@pytest.mark.parametrize("name", NARROW)
def test_the_numbers_are_those_of_torch(name):
    format, info = get(name), torch.finfo(getattr(torch, name))
    assert (format.name, format.bits, format.max_value) == (name, info.bits, info.max)
    assert 2.0**format.min_exponent == info.smallest_normal
    assert format.max_exponent == math.floor(math.log2(info.max))
    positive = finite(name)[finite(name) > 0]
    assert 2.0**format.min_subnormal == positive[0]
    assert format.has_inf == bool(codes(name).isinf().any())


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("saturate", [True, False])
def test_every_code_rounds_to_itself(name, saturate):
    every = codes(name)
    kept = every if not saturate else torch.where(every.isinf(), math.nan, every)
    assert same_bits(round_to(kept, name, saturate=saturate), kept)
    generator = torch.Generator().manual_seed(0)
    stochastic = round_to(kept, name, stochastic=True, saturate=saturate, generator=generator)
    assert same_bits(stochastic, kept)


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("saturate", [True, False])
def test_ties_and_their_neighbours_round_as_torchs_cast_does(name, saturate):
    x = between(name)
    # The neighbours above the largest value are the next test's.
    x = x[x.abs() <= get(name).max_value]
    cast = x.to(getattr(torch, name)).to(torch.float32)
    assert same_bits(round_to(x, name, saturate=saturate), cast)
    assert int((cast != x).sum()) > len(x) // 2


@pytest.mark.parametrize("name", ["float8_e5m2", "float16", "bfloat16"])
def test_overflow_is_torchs(name):
    x = torch.cat([beyond(name), torch.tensor([1e30, -1e30])])
    cast = x.to(getattr(torch, name)).to(torch.float32)
    assert same_bits(round_to(x, name, saturate=False), cast)
    assert cast.isinf().any()


def test_e4m3_has_no_inf_and_overflows_to_nan():
    x = beyond("float8_e4m3fn")
    y = round_to(x, "float8_e4m3fn", saturate=False)
    assert torch.equal(y[:2], torch.tensor([448.0, 448.0]))
    assert torch.equal(y[6:8], torch.tensor([-448.0, -448.0]))
    assert y[2:6].isnan().all()
    assert y[8:].isnan().all()
    # torch before 2.12 overflows like this, later versions saturate.
    cast = x.to(torch.float8_e4m3fn).to(torch.float32)
    assert same_bits(cast, y) or same_bits(cast, round_to(x, "float8_e4m3fn"))


@pytest.mark.parametrize("name", NARROW)
def test_saturation_gives_the_largest_value_and_keeps_nan(name):
    x = beyond(name)
    largest = torch.full((6,), get(name).max_value)
    assert same_bits(round_to(x, name), torch.cat([largest, -largest, x[-1:]]))


@pytest.mark.parametrize("name", [*NARROW, "float32"])
def test_random_values_of_every_size_round_as_torchs_cast_does(name):
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**31), 2**31, (200_000,), generator=generator)
    x = bits.to(torch.int32).view(torch.float32)
    x = x[x.abs() <= get(name).max_value]
    cast = x.to(getattr(torch, name)).to(torch.float32)
    assert same_bits(round_to(x, name, saturate=False), cast)


def test_float64_is_rounded_once():
    # Through float32 this would become the tie 2**-1 steps up, and then round to even: down.
    x = torch.tensor([1.0 + 2.0**-11 + 2.0**-40], dtype=torch.float64)
    assert round_to(x, "float16").item() == 1.0 + 2.0**-10
    assert round_to(x.item(), "float16") == 1.0 + 2.0**-10
    huge = torch.tensor([1.7e308, -1.7e308, 1e39], dtype=torch.float64)
    assert torch.equal(round_to(huge, "float32", saturate=False), huge * math.inf)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", EIGHT_BIT)
def test_any_float_tensor_keeps_its_dtype_and_shape(name, dtype):
    x = finite("float16").to(dtype)[:-1].reshape(2, -1)
    y = round_to(x, name)
    expected = round_to(x.to(torch.float64), name)
    assert y.dtype == dtype
    assert same_bits(y.to(torch.float64), expected)
    assert round_to(torch.zeros(0, 3), name).shape == (0, 3)
    assert round_to(torch.tensor(3.3, requires_grad=True), name).requires_grad is False


@pytest.mark.parametrize("wide", ["float16", "bfloat16", "float8_e5m2", "float8_e4m3fn"])
@pytest.mark.parametrize("name", EIGHT_BIT)
def test_every_code_of_every_narrow_dtype_rounds_as_torchs_cast_does(name, wide):
    x = codes(wide).to(getattr(torch, wide))
    limit = get(name).max_value
    # Clamped, so that overflow, which differs between versions of torch, plays no part.
    clamped = x.to(torch.float32).clamp(-limit, limit)
    expected = clamped.to(getattr(torch, name)).to(x.dtype)
    y = round_to(x, name)
    assert y.dtype == x.dtype
    assert same_bits(y.to(torch.float64), expected.to(torch.float64))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("saturate", [True, False])
def test_python_floats_round_like_tensors(name, saturate):
    near = [] if name == "float32" else [between(name)[:: 1 if get(name).bits == 8 else 97]]
    extra = torch.tensor([0.0, -0.0, 1e-45, 1e38, math.inf, -math.inf, math.nan])
    x = torch.cat([*near, beyond(name), extra])
    y = torch.tensor([round_to(v, name, saturate=saturate) for v in x.tolist()])
    assert same_bits(y, round_to(x, name, saturate=saturate))


def test_python_floats_of_any_size():
    assert round_to(1.7976931348623157e308, "float32", saturate=False) == math.inf
    assert round_to(-1.7976931348623157e308, "float16") == -65504.0
    assert round_to(5e-324, "float32") == 0.0
    assert round_to(3, "float8_e5m2") == 3.0


@pytest.mark.parametrize("name", EIGHT_BIT)
def test_stochastic_rounding_goes_to_one_of_two_neighbours(name):
    values = finite(name)
    x = between(name)
    x = x[x.abs() < get(name).max_value]
    generator = torch.Generator().manual_seed(2)
    y = round_to(x, name, stochastic=True, generator=generator).to(torch.float64)
    wide = x.to(torch.float64)
    above = values[torch.searchsorted(values, wide)]
    below = values[torch.searchsorted(values, wide, right=True) - 1]
    assert bool(((y == above) | (y == below)).all())
    assert int((y == above).sum()) > len(x) // 4
    assert int((y == below).sum()) > len(x) // 4


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("fraction", [0.0625, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("base", [1.0, -1.0, 0.0])
def test_stochastic_rounding_is_unbiased(name, fraction, base):
    format = get(name)
    step = 2.0 ** (format.min_subnormal if base == 0.0 else -format.mantissa_bits)
    n = 40_000
    x = torch.full((n,), base + fraction * step, dtype=torch.float64)
    generator = torch.Generator().manual_seed(3)
    up = (round_to(x, name, stochastic=True, generator=generator) - base).mean().item() / step
    four_sigma = 4 * math.sqrt(fraction * (1 - fraction) / n)
    assert abs(up - fraction) < four_sigma


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", EIGHT_BIT)
def test_stochastic_rounding_treats_both_signs_alike(name, dtype):
    """Random numbers have 24 bits: what is lost below them must not drift in one direction."""
    sizes = torch.exp2(torch.arange(-60, 12).double()).to(dtype).repeat_interleave(50)
    found = [
        round_to(sign * sizes, name, stochastic=True, generator=torch.Generator().manual_seed(5))
        for sign in (1, -1)
    ]
    assert torch.equal(found[0], -found[1])
    drawn = [
        [round_to(sign * x, name, stochastic=True, generator=source) for x in sizes.tolist()]
        for sign, source in ((1, random.Random(5)), (-1, random.Random(5)))
    ]
    assert drawn[0] == [-y for y in drawn[1]]


def test_stochastic_rounding_of_python_floats():
    source = random.Random(4)
    x, n = 1.0 + 0.3 * 2.0**-3, 20_000
    drawn = [round_to(x, "float8_e4m3fn", stochastic=True, generator=source) for _ in range(n)]
    assert set(drawn) == {1.0, 1.125}
    assert abs(drawn.count(1.125) / n - 0.3) < 4 * math.sqrt(0.21 / n)


def test_the_same_seed_gives_the_same_values():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(5))

    def draw(seed):
        generator = torch.Generator().manual_seed(seed)
        return round_to(x, "float8_e5m2", stochastic=True, generator=generator)

    assert torch.equal(draw(6), draw(6))
    assert not torch.equal(draw(6), draw(7))


def test_get_takes_names_and_formats():
    assert get("float16") is get(get("float16"))
    assert isinstance(get("bfloat16"), Format)
    for bad in ("float8", "fp16", None, 16, ["float16"]):
        with pytest.raises(ValueError, match="unknown format") as caught:
            get(bad)  # type: ignore
        assert repr(bad) in str(caught.value)
        assert "'float8_e4m3fn'" in str(caught.value)


def test_what_is_no_float_is_refused():
    for bad in (torch.ones(2, dtype=torch.int32), "1.0", None, True):
        with pytest.raises(ValueError, match="takes a float or a floating-point tensor"):
            round_to(bad, "float16")  # type: ignore


def test_python_floats_need_no_torch():
    code = (
        "import sys, gradlift.plan.planner, gradlift.formats as f; "
        "assert f.round_to(0.3, 'float8_e5m2') == 0.3125; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
