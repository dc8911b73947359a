"""torch.compile around communication, with the backend that needs no compiler."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


def functional(rank, size):
    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(tensor):
        return fc.all_reduce(tensor * 2, "sum", dist.group.WORLD) + 1

    return step(torch.arange(4.0) + rank)


def plain_calls(rank, size):
    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(tensor):
        doubled = tensor * 2
        dist.all_reduce(doubled)
        whole = torch.zeros(size * 4)
        dist.all_gather_into_tensor(whole, doubled)
        return whole + 1

    return step(torch.arange(4.0) + rank)


def data_parallel(rank, size):
    torch.manual_seed(0)
    model = torch.compile(
        DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))),
        backend="aot_eager",
    )
    for step in range(2):
        torch.manual_seed(10 * rank + step)
        model(torch.randn(4, 8)).pow(2).mean().backward()
    return [parameter.grad for parameter in model.parameters()]


def sharded(rank, size):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    for layer in (model[0], model[2]):
        layer.compile(backend="aot_eager")
        fully_shard(layer)
    fully_shard(model)
    torch.manual_seed(rank)
    model(torch.randn(4, 8)).pow(2).mean().backward()
    return [parameter.grad for parameter in model.parameters()]


FEATURES = (functional, plain_calls, data_parallel, sharded)
