"""Process groups and device meshes: made, asked about, used side by side, destroyed."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


def numbers(rank, count=4):
    return torch.arange(float(count)) * 1.1 + rank


def total(rank, group):
    tensor = numbers(rank)
    dist.all_reduce(tensor, group=group)
    return tensor


def halves(rank, size):
    made = [dist.new_group(range(size // 2)), dist.new_group(range(size // 2, size))]
    mine = made[rank >= size // 2]
    tensor = numbers(rank)
    dist.broadcast(tensor, dist.get_global_rank(mine, 0), group=mine)
    dist.barrier(mine)
    return [
        total(rank, mine),
        tensor,
        dist.get_rank(mine),
        dist.get_process_group_ranks(mine),
        dist.get_backend(mine),
        made[rank < size // 2] is dist.GroupMember.NON_GROUP_MEMBER,
    ]


def only_members_call(rank, size):
    ranks = [peer for peer in range(size) if peer % 2 == rank % 2]
    return total(rank, dist.new_group(ranks, use_local_synchronization=True))


def named_subgroups(rank, size):
    mine, _ = dist.new_subgroups(2)
    other, _ = dist.new_subgroups_by_enumeration([[0, size - 1], list(range(1, size - 1))])
    return [total(rank, mine), total(rank, other)]


def reversed_order(rank, size):
    """torch sorts the ranks of a group."""
    group = dist.new_group(list(reversed(range(size))))
    whole = torch.zeros(size)
    dist.all_gather_into_tensor(whole, torch.tensor([float(rank)]), group=group)
    return [whole, dist.get_rank(group)]


def of_one(rank, size):
    groups = [dist.new_group([peer]) for peer in range(size)]
    return total(rank, groups[rank])


def in_any_order(rank, size):
    """Two groups of the same ranks, used in different orders by different ranks."""
    one, two = dist.new_group(), dist.new_group()
    first, second = numbers(rank), numbers(rank + 7)
    calls = [(first, one), (second, two)]
    for tensor, group in calls if rank % 2 else reversed(calls):
        calls.append(dist.all_reduce(tensor, group=group, async_op=True))
        if len(calls) == 4:
            break
    for work in calls[2:]:
        work.wait()
    return [first, second]


def meshes(rank, size):
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
    whole = mesh["dp", "tp"]._flatten("all")
    return [
        total(rank, mesh["tp"].get_group()),
        total(rank, mesh["dp"].get_group()),
        total(rank, whole.get_group()),
        mesh.get_coordinate(),
        mesh["tp"].get_local_rank(),
    ]


def through_methods(rank, size):
    """The methods of a group, as C++-minded programs call them."""
    world = dist.group.WORLD
    tensor = numbers(rank)
    world.allreduce(tensor).wait()
    world.allreduce([tensor], dist.ReduceOp.MAX).wait()
    world.broadcast(tensor, 0).wait()
    lists = [torch.zeros(4) for _ in range(size)]
    world.allgather(lists, tensor).wait()
    world.barrier().wait()
    return [tensor, lists, world.size(), world.rank()]


def destroyed(rank, size):
    group = dist.new_group()
    result = total(rank, group)
    dist.destroy_process_group(group)
    return [result, total(rank, dist.new_group())]


def stores(rank, size):
    store = dist.distributed_c10d._get_default_store()
    store.set(f"key {rank}", f"value {rank}")
    store.wait([f"key {peer}" for peer in range(size)])
    count = store.add("count", 1)
    own = dist.PrefixStore("own", store)
    own.set(f"key {rank}", "mine")
    dist.barrier()
    return [
        store.get(f"key {(rank + 1) % size}"),
        own.get(f"key {(rank + 1) % size}"),
        store.check(["no such key"]),
        1 <= count <= size,
        store.add("count", 0),
        store.compare_set("key 0", "value 0", "value 0"),
        store.multi_get(["key 0", "key 1"]),
    ]


FEATURES = (
    halves,
    only_members_call,
    named_subgroups,
    reversed_order,
    of_one,
    in_any_order,
    meshes,
    through_methods,
    destroyed,
    stores,
)
