"""Destroying everything and starting anew, under another name and address."""

import os

import torch
import torch.distributed as dist


def everything_again(rank, size):
    dist.destroy_process_group()
    port = int(os.environ["MASTER_PORT"]) + 1
    results = []
    for attempt in range(2):
        dist.init_process_group(
            "cpu:gloo",
            init_method=f"tcp://127.0.0.1:{port + attempt}",
            rank=rank,
            world_size=size,
        )
        group = dist.new_group(range(2))
        tensor = torch.arange(4.0) * (rank + 1.3)
        dist.all_reduce(tensor)
        if rank < 2:
            dist.all_reduce(tensor, group=group)
        results += [tensor, dist.get_backend(), dist.get_backend_config()]
        dist.barrier()
        dist.destroy_process_group()
    return results


FEATURES = (everything_again,)
