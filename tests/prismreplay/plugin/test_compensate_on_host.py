"""The compensation kernel's own source, run on the host, against `prismreplay.run.compensation`."""

from __future__ import annotations

import ctypes

import pytest

torch = pytest.importorskip("torch")

from prismreplay.plugin.compensating import _head, _mode  # noqa: E402
from prismreplay.plugin.elements import element_of, identity_bits  # noqa: E402
from prismreplay.run.compensation import contribution  # noqa: E402
from prismtrace.schema import ReduceOp  # noqa: E402

FLOATS = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]


def host_compensate(host_kernel, full, inputs, op=ReduceOp.SUM, group_size=1, factor=1.0):
    out = torch.empty_like(full)
    mode, scale, own = _mode(op, group_size, factor)
    library = host_kernel(
        "compensate", ELEMENT=element_of(full.dtype), INPUTS=len(inputs), MODE=mode
    )
    addresses = [one.data_ptr() for one in (out, full, *inputs)]
    of = (ctypes.c_void_p * 8)(*addresses[2:])
    head = _head(addresses, full.numel(), full.element_size())
    library.run(
        2,
        ctypes.c_void_p(addresses[0]),
        ctypes.c_void_p(addresses[1]),
        of,
        ctypes.c_longlong(full.numel()),
        ctypes.c_longlong(head),
        ctypes.c_double(scale),
        ctypes.c_double(own),
    )
    return out


def bits(tensor):
    """As integers, all NaN alike."""
    wide = tensor.to(torch.float64) if tensor.is_floating_point() else tensor
    same = tensor.view(torch.uint8).reshape(len(tensor), tensor.element_size()).to(torch.int64)
    return torch.where(wide.isnan()[..., None], -1, same) if wide.is_floating_point() else same


def expected_pairs(full, own):
    """Differences; too large ones of e4m3 are the largest value in any version of torch."""
    exact = contribution(full, [own], ReduceOp.SUM, group_size=8)
    if full.dtype is not torch.float8_e4m3fn:
        return exact
    wide = full.to(torch.float64) - own.to(torch.float64)
    return torch.where(wide.abs() > 448, wide.clamp(-448, 448), exact.to(torch.float64)).to(
        full.dtype
    )


def values(count, dtype, seed, scale=1.0):
    made = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return (torch.randn(count, generator=made, dtype=torch.float64) * scale).to(dtype)
    limits = torch.iinfo(dtype)
    return torch.randint(
        max(limits.min, -(2**40)), min(limits.max, 2**40), (count,), generator=made
    ).to(dtype)


@pytest.mark.parametrize(
    ("dtype", "inputs"),
    [(dtype, 1) for dtype in FLOATS + INTEGERS]
    + [(dtype, 3) for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8)],
    ids=str,
)
def test_differences_have_the_bits_of_the_cpu(host_kernel, dtype, inputs):
    for count in (0, 1, 15, 1037):
        full = values(count, dtype, 1, 30.0)
        own = [values(count, dtype, 2 + number, 10.0**-number) for number in range(inputs)]
        found = host_compensate(host_kernel, full, own)
        exact = contribution(full, own, ReduceOp.SUM, group_size=8)
        assert torch.equal(bits(found), bits(exact))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_all_pairs_of_8_bit_values(host_kernel, dtype):
    every = torch.arange(256, dtype=torch.uint8)
    full = every.repeat(256).view(dtype)
    own = every.repeat_interleave(256).view(dtype)
    found = host_compensate(host_kernel, full, [own])
    assert torch.equal(bits(found), bits(expected_pairs(full, own)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_pairs_of_16_bit_values_of_all_magnitudes(host_kernel, dtype):
    made = torch.Generator().manual_seed(5)
    full, own = (
        torch.randint(-(2**15), 2**15, (1 << 18,), generator=made).to(torch.int16).view(dtype)
        for _ in range(2)
    )
    found = host_compensate(host_kernel, full, [own])
    exact = contribution(full, [own], ReduceOp.SUM, group_size=8)
    assert torch.equal(bits(found), bits(exact))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32], ids=str)
@pytest.mark.parametrize("op", [ReduceOp.AVG, ReduceOp.PREMUL_SUM, ReduceOp.PRODUCT])
def test_scaled_sums_and_products(host_kernel, dtype, op):
    if op is ReduceOp.PREMUL_SUM and dtype is torch.int32:
        pytest.skip("whole numbers are not scaled")
    full, own = values(999, dtype, 1), [values(999, dtype, 2), values(999, dtype, 3)]
    if op is ReduceOp.PRODUCT:
        own = [(one.to(torch.float64).abs() % 7).to(dtype) for one in own]
        full = (own[0].to(torch.float64) * own[1].to(torch.float64) * 3).to(dtype)
    found = host_compensate(host_kernel, full, own, op, 12, 0.3)
    exact = contribution(full, own, op, group_size=12, factor=0.3)
    assert torch.equal(bits(found), bits(exact))


def test_exclusive_or(host_kernel):
    full, own = values(77, torch.int32, 1), [values(77, torch.int32, 2)]
    found = host_compensate(host_kernel, full, own, ReduceOp.BXOR)
    assert torch.equal(found, contribution(full, own, ReduceOp.BXOR, group_size=4))


@pytest.mark.parametrize("shifts", [(0, 0, 0), (1, 1, 1), (3, 3, 3), (0, 1, 2)])
def test_tensors_beside_vectors(host_kernel, shifts):
    count = 501
    out, full, own = (
        values(count + 8, torch.bfloat16, seed)[shift:][:count]
        for seed, shift in zip((9, 1, 2), shifts, strict=True)
    )
    library = host_kernel("compensate", ELEMENT="bf16", INPUTS=1, MODE=0)
    addresses = [one.data_ptr() for one in (out, full, own)]
    library.run(
        1,
        ctypes.c_void_p(addresses[0]),
        ctypes.c_void_p(addresses[1]),
        (ctypes.c_void_p * 8)(addresses[2]),
        ctypes.c_longlong(count),
        ctypes.c_longlong(_head(addresses, count, 2)),
        ctypes.c_double(1),
        ctypes.c_double(1),
    )
    assert torch.equal(out, contribution(full, [own], ReduceOp.SUM, group_size=2))


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MAX, ReduceOp.MIN, ReduceOp.PRODUCT])
def test_the_identity_changes_nothing(dtype, op):
    raw = identity_bits(op, dtype).to_bytes(dtype.itemsize, "little")
    identity = torch.tensor(list(raw), dtype=torch.uint8).view(dtype)
    own = values(50, dtype, 4)
    apply = {
        ReduceOp.SUM: torch.add,
        ReduceOp.MAX: torch.maximum,
        ReduceOp.MIN: torch.minimum,
        ReduceOp.PRODUCT: torch.mul,
    }[op]
    wide = torch.float64 if dtype.is_floating_point else torch.int64
    assert torch.equal(apply(own.to(wide), identity.to(wide)), own.to(wide))
