"""A few steps of a mixture of experts on data that one rank of a group reads for all."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

WIDTH, EXPERTS, ROWS, STEPS, VOCABULARY = 8, 4, 20, 2, 64


class Layer(nn.Module):
    top_k = 1

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.expert = nn.Linear(WIDTH, WIDTH)


def dispatch(layer, tokens, group):
    x = layer.tokens(tokens)
    weight, chosen = layer.gate(x).softmax(-1).max(-1)
    order = chosen.argsort(stable=True)
    counts = torch.bincount(chosen, minlength=EXPERTS).view(group.size(), -1).sum(1)
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts, group=group)
    sent, received = counts.tolist(), arriving.tolist()
    rows = torch.empty(sum(received), WIDTH)
    dist.all_to_all_single(rows, x[order].detach(), received, sent, group=group)
    back = torch.empty(ROWS, WIDTH)
    dist.all_to_all_single(back, layer.expert(rows).detach(), sent, received, group=group)
    return (back * weight[order].unsqueeze(1) + layer.expert(x[order])).square().mean()


def main():
    results, ep = Path(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // ep, ep), mesh_dim_names=("dp", "ep"))
    dp, ep_group = mesh["dp"].get_group(), mesh["ep"].get_group()
    leader = dist.get_global_rank(ep_group, 0)
    torch.manual_seed(1)
    layer = Layer()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        status, tokens = torch.zeros(3, dtype=torch.int64), torch.zeros(ROWS, dtype=torch.int64)
        if rank == leader:
            status += 1
            generator = torch.Generator().manual_seed(100 * step + rank)
            tokens = torch.randint(VOCABULARY, (ROWS,), generator=generator)
        dist.broadcast(status, leader, group=ep_group)
        dist.broadcast(tokens, leader, group=ep_group)
        loss = dispatch(layer, tokens, ep_group)
        loss.backward()
        for value in layer.parameters():
            dist.all_reduce(value.grad, group=dp)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean)
        losses.append(mean.item())
    dist.barrier()
    results.mkdir(exist_ok=True)
    values = torch.cat([value.flatten() for value in layer.parameters()]).tolist()
    (results / f"{rank}.json").write_text(json.dumps([losses, values]))


main()
