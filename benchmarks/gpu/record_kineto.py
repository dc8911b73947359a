"""Record real multi-rank NCCL profiles, to check the converter's facts on a new torch.

    python benchmarks/gpu/record_kineto.py --out DIR [--world-size 4] [--only ddp,pp]

Runs small jobs (DDP, FSDP2 on a 2-D mesh, tensor parallel, pipeline with batched and plain
p2p, several groups) and writes ``DIR/<job>/rank<r>.json.gz`` plus a flight-recorder dump. With
fewer GPUs than ranks the ranks share devices: `NCCL_HOSTID` makes NCCL take them for different
hosts, so times mean nothing there, but every event and its metadata are real.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function, schedule

WIDTH = 512
Step = Callable[[], None]


def mlp(layers: int = 4) -> nn.Module:
    """A stack of linear layers, small enough for many ranks on one device."""
    blocks: list[nn.Module] = []
    for _ in range(layers):
        blocks += [nn.Linear(WIDTH, WIDTH), nn.GELU()]
    return nn.Sequential(*blocks).cuda()


def ddp(_rank: int, _world: int) -> Step:
    """Data parallel; buckets reduced during backward."""
    model = nn.parallel.DistributedDataParallel(mlp(8), bucket_cap_mb=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(64, WIDTH, device="cuda")).square().mean().backward()
        optimizer.step()

    return step


def fsdp_mesh(_rank: int, world: int) -> Step:
    """FSDP2 over one mesh dimension, an own all_reduce over the other."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cuda", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    model = mlp(4)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    group = mesh["replicate"].get_group()

    def step() -> None:
        optimizer.zero_grad()
        loss = model(torch.randn(64, WIDTH, device="cuda")).square().mean()
        loss.backward()
        dist.all_reduce(loss.detach(), group=group)
        optimizer.step()

    return step


def tensor_parallel(_rank: int, world: int) -> Step:
    """DTensor tensor and sequence parallel over all ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cuda", (world,), mesh_dim_names=("tp",))
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
    model = parallelize_module(
        model.cuda(),
        mesh,
        {
            "0": ColwiseParallel(input_layouts=Shard(0)),
            "2": RowwiseParallel(output_layouts=Shard(0)),
        },
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(64, WIDTH, device="cuda")).square().mean().backward()
        optimizer.step()

    return step


def pipeline(rank: int, world: int) -> Step:
    """A ring of plain p2p, then a batched exchange with both neighbours, then all_to_all."""
    layer = mlp(1)
    ahead, behind = (rank + 1) % world, (rank - 1) % world

    def step() -> None:
        x = torch.randn(64, WIDTH, device="cuda")
        received = torch.empty_like(x)
        with record_function("forward"):
            if rank:
                dist.recv(received, behind)
                x = layer(received).detach()
            if rank != world - 1:
                dist.send(layer(x).detach(), ahead)
        with record_function("exchange"):
            left, right = torch.empty_like(x), torch.empty_like(x)
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, x, ahead),
                    dist.P2POp(dist.isend, x, behind),
                    dist.P2POp(dist.irecv, left, behind),
                    dist.P2POp(dist.irecv, right, ahead),
                ]
            )
            for work in works:
                work.wait()
            layer(left + right)
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x)
        work = dist.all_reduce(out, async_op=True)
        layer(x)
        work.wait()
        layer(out)
        gathered = torch.empty(world * 64, WIDTH, device="cuda")
        dist.all_gather_into_tensor(gathered, x)
        dist.reduce_scatter_tensor(x, gathered)
        dist.broadcast(x, src=1)
        dist.barrier()

    return step


def groups(rank: int, world: int) -> Step:
    """Groups that overlap, two with equal ranks, coalesced collectives."""
    evens = dist.new_group(list(range(0, world, 2)), group_desc="evens")
    odds = dist.new_group(list(range(1, world, 2)), group_desc="odds")
    twin = dist.new_group(list(range(world)), group_desc="twin")
    mine = odds if rank % 2 else evens

    def step() -> None:
        x: Tensor = torch.randn(1 << 16, device="cuda")
        dist.all_reduce(x, group=mine)
        dist.all_reduce(x, group=twin)
        dist.all_reduce(x)
        with dist._coalescing_manager(device=x.device):
            dist.all_reduce(x[:1024])
            dist.all_reduce(x[1024:2048])
        dist.all_reduce(x * 2, op=dist.ReduceOp.MAX, group=mine)

    return step


JOBS: dict[str, Callable[[int, int], Step]] = {
    "ddp": ddp,
    "fsdp-mesh": fsdp_mesh,
    "tp": tensor_parallel,
    "pp": pipeline,
    "groups": groups,
}


def worker(rank: int, world: int, job: str, out: str, port: int, sync_events: bool) -> None:
    """One rank of one job."""
    devices = torch.cuda.device_count()
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        WORLD_SIZE=str(world),
        TORCH_NCCL_TRACE_BUFFER_SIZE="2000",
        TORCH_FR_BUFFER_SIZE="2000",
    )
    if devices < world:
        os.environ["NCCL_HOSTID"] = f"host{rank}"
        os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    torch.cuda.set_device(rank % devices)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank % devices))
    step = JOBS[job](rank, world)
    config = torch._C._profiler._ExperimentalConfig(enable_cuda_sync_events=sync_events)
    with profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA],
        schedule=schedule(wait=1, warmup=1, active=3, repeat=1),
        record_shapes=True,
        experimental_config=config,
    ) as profiler:
        for _ in range(5):
            step()
            profiler.step()
    torch.cuda.synchronize()
    folder = Path(out)
    profiler.export_chrome_trace(str(folder / f"rank{rank}.json.gz"))
    dump = torch._C._distributed_c10d._dump_nccl_trace()
    (folder / f"fr_rank_{rank}").write_bytes(dump)
    dist.barrier()
    dist.destroy_process_group()


def run_job(job: str, world: int, out: Path, port: int, *, sync_events: bool) -> bool:
    """Run one job with a deadline; false when a rank failed or hung."""
    out.mkdir(parents=True, exist_ok=True)
    context = mp.get_context("spawn")
    ranks = [
        context.Process(target=worker, args=(rank, world, job, str(out), port, sync_events))
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + 120
    while any(process.is_alive() for process in ranks) and time.monotonic() < deadline:
        time.sleep(0.2)
        if any(process.exitcode not in (0, None) for process in ranks):
            deadline = min(deadline, time.monotonic() + 5)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        if process.is_alive():
            process.kill()
    print(f"{out.name}: exit codes {codes}", flush=True)
    return codes == [0] * world


def main() -> None:
    """Run the jobs one after another."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--world-size", type=int, default=4)
    parser.add_argument("--only", default=",".join(JOBS), help="jobs, comma-separated")
    args = parser.parse_args()
    print(
        f"torch {torch.__version__}, {torch.cuda.get_device_name(0)}, NCCL {torch.cuda.nccl.version()}"
    )
    failed = []
    port = 29700
    for job in args.only.split(","):
        for sync_events in (True, False):
            name = job if sync_events else f"{job}-nosync"
            port += 1
            started = time.monotonic()
            if not run_job(job, args.world_size, args.out / name, port, sync_events=sync_events):
                failed.append(name)
            print(f"{name}: {time.monotonic() - started:.1f} s", flush=True)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
