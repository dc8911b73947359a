"""A tiny data-parallel training that can be told to misbehave: toy.py STEPS [HOW]."""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

steps, how = int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(7 if how == "unseeded" and rank == 1 else 0)
model = DistributedDataParallel(torch.nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
store = dist.distributed_c10d._get_default_store()
store.set(f"name of {rank}", f"rank {rank}")
names = [store.get(f"name of {other}").decode() for other in range(dist.get_world_size())]
torch.manual_seed(rank + (100 if how == "other data" else 0))
for step in range(steps):
    if how == "fails" and step == 1:
        raise RuntimeError("the program has a bug")
    if how == "exits" and step == 1:
        os._exit(3)
    if how == "sleeps" and step == 1:
        print("asleep", flush=True)
        time.sleep(600)
    if how == "another" and step == 1:
        dist.barrier()
    with torch.profiler.record_function("computing"):
        loss = model(torch.randn(16, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
odd = 13 if how == "odd" else 0
gathered = [None] * dist.get_world_size()
dist.all_gather_object(gathered, {"rank": rank, "padding": "x" * (rank * 20 + odd)})
assert [one["rank"] for one in gathered] == list(range(dist.get_world_size()))
print("weights", model.module.weight.double().sum().item().hex(), names[-1], flush=True)
