"""Collectives of torch.distributed: plain, coalesced, of objects, functional."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
import torch.distributed.nn.functional as dist_nn
from torch.distributed.distributed_c10d import _coalescing_manager

OPS = dist.ReduceOp


def values(rank, *shape, dtype=torch.float32):
    """Different on every rank; sums depend on the order of summation."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(rank + 17))
    return (made * 100).to(dtype) if not dtype.is_complex else torch.complex(made, -made).to(dtype)


def all_reduce_dtypes(rank, size):
    results = []
    for dtype in ("float32", "float64", "bfloat16", "float16", "int64", "int32", "int8", "uint8"):
        tensor = values(rank, 37, dtype=getattr(torch, dtype))
        dist.all_reduce(tensor)
        results.append(tensor)
    return results


def all_reduce_complex(rank, size):
    tensor = values(rank, 11, dtype=torch.complex64)
    dist.all_reduce(tensor)
    return tensor


def all_reduce_ops(rank, size):
    results = []
    for op in (OPS.MAX, OPS.MIN, OPS.PRODUCT, OPS.AVG):
        tensor = values(rank, 5) / 100
        dist.all_reduce(tensor, op)
        results.append(tensor)
    for op in (OPS.BAND, OPS.BOR, OPS.BXOR):
        tensor = values(rank, 5, dtype=torch.int64)
        dist.all_reduce(tensor, op)
        results.append(tensor)
    return results


def all_reduce_sizes(rank, size):
    results = []
    for elements in (0, 1, 3, 1000, 300_001):
        tensor = values(rank, elements)
        dist.all_reduce(tensor)
        results.append(tensor)
    scalar = values(rank)
    dist.all_reduce(scalar)
    return [*results, scalar]


def all_reduce_async(rank, size):
    first, second = values(rank, 1000), values(rank + 50, 1000)
    works = [dist.all_reduce(first, async_op=True), dist.all_reduce(second, async_op=True)]
    for work in reversed(works):
        work.wait()
    assert works[0].is_completed()
    return [first, second, works[0].result()]


def futures(rank, size):
    tensor = values(rank, 4)
    future = dist.all_reduce(tensor, async_op=True).get_future()
    doubled = future.then(lambda done: done.value()[0] * 2)
    again = doubled.then(lambda done: done.value() + 1)
    other = values(rank + 9, 4)
    second = dist.all_reduce(other, async_op=True).get_future()
    both = torch.futures.collect_all([again, second]).wait()
    waited = torch.futures.wait_all([again, second])
    return [tensor, doubled.wait(), both[0].value(), waited[1], again.done()]


def broadcast(rank, size):
    tensor = values(rank, 3)
    dist.broadcast(tensor, 1)
    flags = torch.tensor([rank % 2 == 0, True])
    dist.broadcast(flags, 0)
    return [tensor, flags]


def reduce(rank, size):
    tensor = values(rank, 500)
    dist.reduce(tensor, 2)
    return tensor if rank == 2 else None


def all_gather(rank, size):
    lists = [torch.zeros(2, 3) for _ in range(size)]
    dist.all_gather(lists, values(rank, 2, 3))
    whole = torch.zeros(2 * size)
    dist.all_gather_into_tensor(whole, values(rank, 2))
    empty = [torch.zeros(0) for _ in range(size)]
    dist.all_gather(empty, torch.zeros(0))
    return [lists, whole, empty]


def reduce_scatter(rank, size):
    part = torch.zeros(300)
    dist.reduce_scatter_tensor(part, values(rank, 300 * size))
    piece = torch.zeros(3)
    dist.reduce_scatter(piece, list(values(rank, 3 * size).chunk(size)))
    averaged = torch.zeros(2)
    dist.reduce_scatter_tensor(averaged, values(rank, 2 * size), OPS.MAX)
    return [part, piece, averaged]


def all_to_all(rank, size):
    even = torch.zeros(2 * size, 3)
    dist.all_to_all_single(even, values(rank, 2 * size, 3))
    sent = [(rank + peer) % 3 for peer in range(size)]
    got = [(peer + rank) % 3 for peer in range(size)]
    uneven = torch.zeros(sum(got), 2)
    dist.all_to_all_single(uneven, values(rank, sum(sent), 2), got, sent)
    lists = [torch.zeros(2) for _ in range(size)]
    dist.all_to_all(lists, list(values(rank, 2 * size).chunk(size)))
    work = dist.all_to_all_single(even, even.clone(), async_op=True)
    work.wait()
    return [even, uneven, lists]


def gather_and_scatter(rank, size):
    lists = [torch.zeros(2) for _ in range(size)] if rank == 1 else None
    dist.gather(values(rank, 2), lists, dst=1)
    piece = torch.zeros(2)
    given = [values(7 + peer, 2) for peer in range(size)] if rank == 0 else None
    dist.scatter(piece, given, src=0)
    return [lists or [], piece]


def barriers(rank, size):
    dist.barrier()
    work = dist.barrier(async_op=True)
    work.wait()
    dist.monitored_barrier()


def coalesced(rank, size):
    tensors = [values(rank + index, 40) for index in range(3)]
    with _coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    whole = [torch.zeros(size), torch.zeros(2 * size)]
    with _coalescing_manager():
        for index, output in enumerate(whole):
            dist.all_gather_into_tensor(output, values(rank, index + 1))
    parts = [torch.zeros(1), torch.zeros(2)]
    with _coalescing_manager():
        for index, output in enumerate(parts):
            dist.reduce_scatter_tensor(output, values(rank, (index + 1) * size))
    pair = [values(rank, 3), values(rank + 1, 4)]
    dist.all_reduce_coalesced(pair)
    lists = [[torch.zeros(3), torch.zeros(4)] for _ in range(size)]
    dist.all_gather_coalesced(lists, pair)
    return [tensors, whole, parts, pair, lists]


def objects(rank, size):
    everyone = [None] * size
    dist.all_gather_object(everyone, {"rank": rank, "text": "x" * (rank + 1)})
    shared = [{"from": 0}, [1, 2]] if rank == 0 else [None, None]
    dist.broadcast_object_list(shared, 0)
    mine = [None]
    dist.scatter_object_list(mine, [f"for {peer}" for peer in range(size)] if rank == 0 else None)
    gathered = [None] * size if rank == 2 else None
    dist.gather_object((rank, "g"), gathered, dst=2)
    return [everyone, shared, mine, gathered]


def functional(rank, size):
    world, tensor = dist.group.WORLD, values(rank, size, 2)
    results = [
        fc.all_reduce(tensor, "sum", world),
        fc.all_gather_tensor(tensor, 0, world),
        fc.all_gather_tensor(tensor, 1, world),
        fc.reduce_scatter_tensor(tensor, "sum", 0, world),
        fc.all_to_all_single(tensor, None, None, world),
        fc.broadcast(tensor, 1, world),
    ]
    results += fc.all_reduce_coalesced([tensor, tensor[:1]], "sum", world)
    results += fc.all_gather_into_tensor_coalesced([tensor, tensor[:1]], world)
    results += fc.reduce_scatter_tensor_coalesced([tensor, tensor], "sum", [0, 0], world)
    chained = fc.all_reduce(fc.all_reduce(tensor, "sum", world), "max", world)
    dist.all_reduce(waiting := fc.all_reduce(tensor, "sum", world).clone())
    return [result + 0 for result in [*results, chained, waiting]]


def with_gradients(rank, size):
    world = dist.group.WORLD
    tensor = values(rank, size).requires_grad_()
    fc.all_gather_tensor_autograd(tensor, 0, world).pow(2).sum().backward()
    other = values(rank, size).requires_grad_()
    fc.all_to_all_single_autograd(other, [1] * size, [1] * size, world).pow(2).sum().backward()
    third = values(rank, size).requires_grad_()
    dist_nn.all_reduce(third).pow(2).sum().backward()
    fourth = values(rank, 3).requires_grad_()
    torch.cat(dist_nn.all_gather(fourth)).pow(2).sum().backward()
    return [tensor.grad, other.grad, third.grad, fourth.grad]


FEATURES = (
    all_reduce_dtypes,
    all_reduce_complex,
    all_reduce_ops,
    all_reduce_sizes,
    all_reduce_async,
    futures,
    broadcast,
    reduce,
    all_gather,
    reduce_scatter,
    all_to_all,
    gather_and_scatter,
    barriers,
    coalesced,
    objects,
    functional,
    with_gradients,
)
