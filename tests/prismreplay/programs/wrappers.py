"""Parallel training as torch ships it: DDP, FSDP, tensor parallelism, sharded optimizers."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

TINY_BUCKETS_MB = 0.0005


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.Linear(32, 8))


def train(wrapped, rank, steps=3, optimizer=None):
    """Losses, and all parameters afterwards."""
    optimizer = optimizer or torch.optim.AdamW(wrapped.parameters(), 0.05)
    losses = []
    for step in range(steps):
        torch.manual_seed(100 * rank + step)
        loss = wrapped(torch.randn(4, 8)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return [losses, list(wrapped.parameters())]


def ddp_buckets(rank, size):
    return train(DistributedDataParallel(model(), bucket_cap_mb=TINY_BUCKETS_MB), rank)


def ddp_bucket_views_and_buffers(rank, size):
    wrapped = nn.Sequential(model(), nn.BatchNorm1d(8))
    ddp = DistributedDataParallel(wrapped, gradient_as_bucket_view=True)
    return [train(ddp, rank), list(wrapped.buffers())]


def ddp_no_sync(rank, size):
    ddp = DistributedDataParallel(model(), bucket_cap_mb=TINY_BUCKETS_MB)
    with ddp.no_sync():
        ddp(torch.randn(4, 8)).sum().backward()
    ddp(torch.randn(4, 8)).sum().backward()
    return [parameter.grad for parameter in ddp.parameters()]


def ddp_unused_parameters(rank, size):
    class Partly(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = model(), nn.Linear(8, 8)

        def forward(self, batch):
            return self.used(batch)

    ddp = DistributedDataParallel(Partly(), find_unused_parameters=True)
    return train(ddp, rank, 2, torch.optim.SGD(ddp.module.used.parameters(), 0.1))[0]


def ddp_static_graph(rank, size):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model()

        def forward(self, batch):
            for layer in self.inner:
                batch = checkpoint(layer, batch, use_reentrant=False)
            return batch

    return train(
        DistributedDataParallel(Checkpointed(), static_graph=True, bucket_cap_mb=TINY_BUCKETS_MB),
        rank,
    )


def ddp_comm_hooks(rank, size):
    results = []
    for hook in (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook):
        ddp = DistributedDataParallel(model(), bucket_cap_mb=TINY_BUCKETS_MB)
        ddp.register_comm_hook(None, hook)
        results.append(train(ddp, rank, 2))
    ddp = DistributedDataParallel(model())
    ddp.register_comm_hook(
        powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2),
        powerSGD_hook.powerSGD_hook,
    )
    results.append(train(ddp, rank, 4))
    return results


def ddp_uneven_inputs(rank, size):
    ddp = DistributedDataParallel(model(), bucket_cap_mb=TINY_BUCKETS_MB)
    with ddp.join():
        train(ddp, rank, 2 + rank)
    return list(ddp.parameters())


def zero_redundancy(rank, size):
    ddp = DistributedDataParallel(model())
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=0.05)
    with Join([ddp, optimizer]):
        train(ddp, rank, 2 + rank % 2, optimizer)
    return list(ddp.parameters())


def shard(module, **options):
    for layer in module:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **options)
    return fully_shard(module, **options)


def fsdp(rank, size):
    return train(shard(model(), mesh=init_device_mesh("cpu", (size,))), rank)


def fsdp_mixed_precision(rank, size):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return train(shard(model(), mp_policy=policy, reshard_after_forward=False), rank)


def fsdp_hybrid(rank, size):
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    return train(shard(model(), mesh=mesh), rank)


def fsdp_gradient_accumulation(rank, size):
    sharded = shard(model())
    sharded.set_requires_gradient_sync(False)
    sharded(torch.randn(4, 8)).sum().backward()
    sharded.set_requires_gradient_sync(True)
    sharded(torch.randn(4, 8)).sum().backward()
    norm = nn.utils.clip_grad_norm_(sharded.parameters(), 1.0)
    return [norm, [parameter.grad for parameter in sharded.parameters()]]


def fsdp_first_version(rank, size):
    wrapped = FullyShardedDataParallel(model(), device_id=torch.device("cpu"))
    return train(wrapped, rank, 2)


def tensor_parallel(rank, size):
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return train(parallelize_module(model(), mesh, plan), 0)


def sequence_parallel(rank, size):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.norm = nn.LayerNorm(8)
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, batch):
            return self.down(torch.relu(self.up(self.norm(batch))))

    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    block = parallelize_module(Block(), mesh, plan)
    block = parallelize_module(
        block,
        mesh,
        PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1)),
    )
    torch.manual_seed(5)
    output = block(torch.randn(2, 2 * size, 8))
    output.pow(2).mean().backward()
    return [output, [parameter.grad for parameter in block.parameters()]]


def tensor_parallel_in_fsdp(rank, size):
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    module = parallelize_module(model(), mesh["tp"], plan)
    return train(fully_shard(module, mesh=mesh["dp"]), rank // 2)


def distributed_tensors(rank, size):
    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(64.0).view(8, 8) / 7
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    product = rows @ columns.redistribute(mesh, [Replicate()])
    uneven = distribute_tensor(torch.arange(float(size + 1)), mesh, [Shard(0)])
    return [columns.to_local(), product.full_tensor(), product.sum().full_tensor(), uneven * 2]


def sums_of_everything(rank, size):
    """Buckets, hooks and a collective of the program's own in one backward pass."""
    ddp = DistributedDataParallel(model(), bucket_cap_mb=TINY_BUCKETS_MB)
    seen = []

    def hook(grad):
        total = grad.clone()
        dist.all_reduce(total)
        seen.append(total)
        return grad

    batch = torch.randn(4, 8)
    output = ddp(batch)
    output.register_hook(hook)
    output.pow(2).sum().backward()
    return [seen, [parameter.grad for parameter in ddp.parameters()]]


FEATURES = (
    ddp_buckets,
    ddp_bucket_views_and_buffers,
    ddp_no_sync,
    ddp_unused_parameters,
    ddp_static_graph,
    ddp_comm_hooks,
    ddp_uneven_inputs,
    zero_redundancy,
    fsdp,
    fsdp_mixed_precision,
    fsdp_hybrid,
    fsdp_gradient_accumulation,
    fsdp_first_version,
    tensor_parallel,
    sequence_parallel,
    tensor_parallel_in_fsdp,
    distributed_tensors,
    sums_of_everything,
)
