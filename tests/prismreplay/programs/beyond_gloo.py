"""What works on NCCL, or on the GPUs it is made for, and not on gloo. An ordinary program.

For `prismreplay collect` on a machine without GPUs: each result is compared with what it must
be. Start it as one process a rank, four or more, an even number.
"""

import torch
import torch.distributed as dist
from torch.distributed import _make_nccl_premul_sum
from torch.distributed.distributed_c10d import _coalescing_manager

dist.init_process_group("nccl")
rank, size = dist.get_rank(), dist.get_world_size()
everyone = float(sum(range(size)))
cpu = torch.device("cpu")


def check(name, found, expected):
    expected = torch.as_tensor(expected, dtype=found.dtype)
    assert torch.equal(found, expected), f"{name}: {found} is not {expected}"


def names():
    assert dist.get_backend() == "nccl"
    assert dist.get_backend(dist.new_group(backend="cpu:gloo,cuda:nccl")) == "cpu:gloo,cuda:nccl"
    assert dist.get_backend(dist.new_group(backend="gloo")) == "gloo"


def scaled_sum():
    tensor = torch.full((3,), float(rank))
    dist.all_reduce(tensor, _make_nccl_premul_sum(0.5))
    check("premultiplied sum", tensor, [everyone / 2] * 3)
    part = torch.zeros(1)
    dist.reduce_scatter_tensor(part, torch.full((size,), float(rank)), _make_nccl_premul_sum(2.0))
    check("premultiplied reduce-scatter", part, [2 * everyone])


def uneven_all_gather():
    lists = [torch.zeros(peer + 1) for peer in range(size)]
    dist.all_gather(lists, torch.full((rank + 1,), float(rank)))
    check("uneven all-gather", torch.cat(lists), [p for p in range(size) for _ in range(p + 1)])


def parts_of_a_tensor():
    columns = torch.zeros(2, size)
    dist.broadcast(columns[:, 0], 0)
    target = torch.zeros(4, 4)[:, 1]
    source = torch.arange(4.0) if rank == 1 else target
    dist.broadcast(source, 1)
    check("strided output", source, torch.arange(4.0))


def coalesced_block():
    one, two = torch.full((2,), float(rank)), torch.full((3,), float(rank))
    with _coalescing_manager(device=cpu, async_ops=True) as manager:
        dist.broadcast(one, 1)
        dist.broadcast(two, 2)
    manager.wait()
    check("broadcasts in a block", torch.cat([one, two]), [1.0, 1.0, 2.0, 2.0, 2.0])


def batches_have_one_handle():
    got = torch.zeros(1)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.irecv, got, (rank - 1) % size),
            dist.P2POp(dist.isend, torch.tensor([float(rank)]), (rank + 1) % size),
        ]
    )
    assert len(works) == 1, works
    works[0].wait()
    check("batch", got, [(rank - 1) % size])


def tags_mean_nothing():
    got = torch.zeros(1)
    work = dist.isend(torch.tensor([float(rank)]), rank ^ 1, tag=3)
    dist.recv(got, rank ^ 1, tag=4)
    work.wait()
    check("tags", got, [rank ^ 1])


def splitting():
    half = range(size // 2) if rank < size // 2 else range(size // 2, size)
    group = dist.group.WORLD.split_group(list(half), group_name=f"half {rank < size // 2}")
    tensor = torch.ones(1)
    group.allreduce([tensor], dist.AllreduceOptions()).wait()
    check("split", tensor, [size // 2])


def what_is_not_covered():
    gloo = dist.new_group(backend="gloo")
    for name, call in {
        "sparse": lambda: dist.all_reduce(torch.ones(2).to_sparse(), group=gloo),
        "merge_remote_group": lambda: dist.group.WORLD.merge_remote_group(None, 1),
        "meta": lambda: dist.all_reduce(torch.ones(2, device="meta")),
    }.items():
        try:
            call()
        except Exception as error:
            assert name in str(error), error
        else:
            raise AssertionError(name)


def own_store():
    store = dist.TCPStore("127.0.0.1", 29123, size, rank == 0)
    store.set(f"{rank}", "here")
    store.wait([f"{peer}" for peer in range(size)])
    assert store.get("0") == b"here"
    assert isinstance(store, dist.TCPStore)


for feature in (
    names,
    scaled_sum,
    uneven_all_gather,
    parts_of_a_tensor,
    coalesced_block,
    batches_have_one_handle,
    tags_mean_nothing,
    splitting,
    what_is_not_covered,
    own_store,
):
    feature()
    print(f"rank {rank}: {feature.__name__}", flush=True)
dist.destroy_process_group()
