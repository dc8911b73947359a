from __future__ import annotations

import pytest

from prismtrace.converters.kineto.names import (
    CommPatterns,
    collective_kind,
    dtype_of,
    kernel_dtype,
    kernel_kind,
    kernel_reduce_op,
    peer_in_name,
    short_name,
)
from prismtrace.errors import SourceFormatError
from prismtrace.schema import DType, Kind, ReduceOp

ARGUMENTS = "(ncclDevKernelArgsStorage<4096ul>)"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("allreduce", Kind.ALL_REDUCE),
        ("allreduce_coalesced", Kind.ALL_REDUCE),
        ("broadcast", Kind.BROADCAST),
        ("_broadcast_oop", Kind.BROADCAST),
        ("reduce", Kind.REDUCE),
        ("_reduce_oop", Kind.REDUCE),
        ("all_gather", Kind.ALL_GATHER),
        ("_allgather_base", Kind.ALL_GATHER),
        ("all_gather_into_tensor_coalesced", Kind.ALL_GATHER),
        ("reduce_scatter", Kind.REDUCE_SCATTER),
        ("_reduce_scatter_base", Kind.REDUCE_SCATTER),
        ("reduce_scatter_tensor_coalesced", Kind.REDUCE_SCATTER),
        ("all_to_all", Kind.ALL_TO_ALL),
        ("all_to_allv", Kind.ALL_TO_ALL),
        ("alltoall_base", Kind.ALL_TO_ALL),
        ("send", Kind.SEND),
        ("recv", Kind.RECV),
        ("gather", Kind.GATHER),
        ("scatter", Kind.SCATTER),
        ("barrier", Kind.BARRIER),
        ("nccl:all_reduce", Kind.ALL_REDUCE),
        ("nccl:send 0->1", Kind.SEND),
        ("nccl:recv 3<-0", Kind.RECV),
        ("gloo:all_gather", Kind.ALL_GATHER),
        ("c10d::allreduce_", Kind.ALL_REDUCE),
        ("wait", None),
        ("init", None),
        ("nccl:coalesced", None),
        ("", None),
    ],
)
def test_collectives_as_torch_names_them(name: str, kind: Kind | None) -> None:
    assert collective_kind(name) is kind


@pytest.mark.parametrize(
    ("name", "kind", "dtype", "op"),
    [
        ("ncclDevKernel_AllReduce_Sum_f16_RING_LL", Kind.ALL_REDUCE, DType.FLOAT16, ReduceOp.SUM),
        ("ncclDevKernel_AllReduce_Sum_bf16_TREE_LL", Kind.ALL_REDUCE, DType.BFLOAT16, ReduceOp.SUM),
        ("ncclDevKernel_ReduceScatter_Max_u8_RING_LL", Kind.REDUCE_SCATTER, DType.UINT8, ReduceOp.MAX),
        ("ncclDevKernel_Reduce_SumPostDiv_u32_RING_LL", Kind.REDUCE, DType.UINT32, ReduceOp.AVG),
        ("ncclKernel_AllReduce_RING_LL_Sum_float", Kind.ALL_REDUCE, DType.FLOAT32, ReduceOp.SUM),
        ("ncclKernel_AllReduce_TREE_LL128_Sum_half", Kind.ALL_REDUCE, DType.FLOAT16, ReduceOp.SUM),
        ("ncclKernel_Broadcast_RING_LL_Sum_int8_t", Kind.BROADCAST, None, None),
        ("ncclDevKernel_AllGather_RING_LL", Kind.ALL_GATHER, None, None),
        ("ncclDevKernel_SendRecv", Kind.OTHER_COMM, None, None),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t", Kind.OTHER_COMM, None, None),
        ("ncclDevKernel_Generic_4", Kind.OTHER_COMM, None, None),
        ("ncclSymDevKernel_AllGather_LL", Kind.ALL_GATHER, None, None),
        ("ncclSymkDevKernel_ReduceScatter_LD_Sum_bf16", Kind.REDUCE_SCATTER, None, None),
        ("ampere_sgemm_128x64_nn", None, None, None),
    ],
)  # fmt: skip
def test_kernels_of_nccl(
    name: str, kind: Kind | None, dtype: DType | None, op: ReduceOp | None
) -> None:
    assert kernel_kind(name + ARGUMENTS) is kind
    assert kernel_dtype(name + ARGUMENTS) is dtype
    assert kernel_reduce_op(name + ARGUMENTS) is op


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("Float", DType.FLOAT32), ("Half", DType.FLOAT16), ("BFloat16", DType.BFLOAT16),
        ("Double", DType.FLOAT64), ("Long", DType.INT64), ("Int", DType.INT32),
        ("Short", DType.INT16), ("Char", DType.INT8), ("Byte", DType.UINT8),
        ("Bool", DType.BOOL), ("Float8_e4m3fn", DType.FLOAT8_E4M3FN),
        ("c10::Half", DType.FLOAT16), ("long int", DType.INT64), ("Quaternion", None), (None, None),
    ],
)  # fmt: skip
def test_element_types(name: str | None, dtype: DType | None) -> None:
    assert dtype_of(name) is dtype


def test_partner_in_names() -> None:
    assert peer_in_name("nccl:send 0->1") == 1
    assert peer_in_name("nccl:recv 3<-12") == 12
    assert peer_in_name("nccl:all_reduce") is None


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor<float>>(int)",
         "at::native::vectorized_elementwise_kernel"),
        ("ampere_sgemm_128x64_nn", "ampere_sgemm_128x64_nn"),
        ("Memcpy HtoD (Pageable -> Device)", "Memcpy HtoD (Pageable -> Device)"),
        ("Memset (Device)", "Memset (Device)"),
        ("<odd>", "<odd>"),
        ("", ""),
    ],
)  # fmt: skip
def test_short_names(name: str, short: str) -> None:
    assert short_name(name) == short


def test_anonymous_namespaces_stay_readable() -> None:
    name = "void (anonymous namespace)::softmax_warp_forward<c10::Half>(c10::Half*)"
    assert short_name(name).endswith("::softmax_warp_forward")
    assert "anonymous" in short_name(name)


def test_own_communication_kernels() -> None:
    patterns = CommPatterns.parse([r"^moe::dispatch=all_to_all", "a=b.*=barrier"])
    assert patterns.kind("moe::dispatch<8>(int)") is Kind.ALL_TO_ALL
    assert patterns.kind("x a=b y") is Kind.BARRIER
    assert patterns.kind("gemm") is None
    assert patterns.kind("ncclDevKernel_AllGather_RING_LL") is Kind.ALL_GATHER


@pytest.mark.parametrize("rule", ["moe", "moe=compute", "=all_reduce", "moe(=all_reduce", "a=b"])
def test_rules_that_are_wrong(rule: str) -> None:
    with pytest.raises(SourceFormatError, match="communication kernel rule"):
        CommPatterns.parse([rule])
