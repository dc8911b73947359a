"""Point-to-point messages: blocking or not, in batches, with tags, from anyone, of objects."""

import torch
import torch.distributed as dist


def numbers(rank, count=4):
    return torch.arange(float(count)) + 10 * rank


def send_and_recv(rank, size):
    got = torch.zeros(4)
    if rank % 2 == 0:
        dist.send(numbers(rank), rank + 1)
        dist.recv(got, rank + 1)
    else:
        dist.recv(got, rank - 1)
        dist.send(numbers(rank), rank - 1)
    return got


def without_blocking(rank, size):
    got = [torch.zeros(4) for _ in range(3)]
    sends = [dist.isend(numbers(rank + 100 * i), (rank + 1) % size) for i in range(3)]
    receives = [dist.irecv(each, (rank - 1) % size) for each in got]
    for work in reversed([*sends, *receives]):
        work.wait()
    return got


def tags_overtake(rank, size):
    first, second = torch.zeros(4), torch.zeros(4)
    peer = rank ^ 1
    sends = [dist.isend(numbers(rank), peer, tag=5), dist.isend(numbers(rank + 50), peer, tag=6)]
    late = dist.irecv(second, peer, tag=6)
    early = dist.irecv(first, peer, tag=5)
    late.wait()
    early.wait()
    for work in sends:
        work.wait()
    return [first, second]


def from_anyone(rank, size):
    found = {}
    if rank:
        dist.send(numbers(rank), 0)
    else:
        for _ in range(size - 1):
            got = torch.zeros(4)
            found[dist.recv(got)] = got.tolist()
    dist.barrier()  # what comes later is meant for others
    return sorted(found.items())


def batches(rank, size):
    """A ring, both ways at once, without parity tricks."""
    right, left = (rank + 1) % size, (rank - 1) % size
    from_left, from_right = torch.zeros(4), torch.zeros(2, 2)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.irecv, from_left, left),
            dist.P2POp(dist.isend, numbers(rank), right),
            dist.P2POp(dist.isend, numbers(rank).view(2, 2), left),
            dist.P2POp(dist.irecv, from_right, right),
        ]
    )
    for work in works:
        work.wait()
    return [from_left, from_right]


def empty_ones(rank, size):
    got = torch.ones(0)
    work = dist.isend(torch.ones(0), rank ^ 1)
    dist.recv(got, rank ^ 1)
    work.wait()
    return got


def of_objects(rank, size):
    if rank == 0:
        dist.send_object_list([{"a": 1}, "text"], 1)
    if rank != 1:
        return None
    got = [None, None]
    dist.recv_object_list(got, 0)
    return got


def to_oneself(rank, size):
    try:
        dist.send(numbers(rank), rank)
    except ValueError as error:
        return str(error)
    return "accepted"


FEATURES = (
    send_and_recv,
    without_blocking,
    tags_overtake,
    from_anyone,
    batches,
    empty_ones,
    of_objects,
    to_oneself,
)
