"""Train a small GPT with any mix of data, sharded, tensor and pipeline parallelism.

An ordinary PyTorch program: nothing here knows that its communication can be collected.

    torchrun --nproc-per-node 8 examples/train_gpt.py --tp 2 --pp 2
    prismreplay collect --world-size 8 --devices 2 -- examples/train_gpt.py --tp 2 --pp 2

Ranks that `--fsdp`, `--tp` and `--pp` leave over hold replicas (DistributedDataParallel); with
`--fsdp` the replicas are sharded inside (HSDP). Without a GPU it trains over gloo. The model
learns to predict the next byte of this very file; the same flags give the same losses always.
"""

import argparse
import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

# The logits are a view, which FSDP mentions in case somebody writes to them.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")

VOCABULARY = 256  # bytes
SCHEDULES = {  # name -> class, model chunks a rank
    "1f1b": (Schedule1F1B, 1),
    "interleaved": (ScheduleInterleaved1F1B, 2),
    "zero-bubble": (ScheduleInterleavedZeroBubble, 2),
    "zbv": (ScheduleZBVZeroBubble, 2),
}


class Attention(nn.Module):
    """Causal self-attention. Tensor parallelism gives each rank some of the heads."""

    def __init__(self, width: int, head_width: int) -> None:
        super().__init__()
        self.head_width = head_width
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        heads = self.qkv(x).unflatten(-1, (-1, 3, self.head_width))
        query, key, value = heads.permute(3, 0, 2, 1, 4)
        attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """One transformer layer: attention, then a two-layer perceptron."""

    def __init__(self, width: int, head_width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, head_width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        x = x + self.attention(self.norm1(x))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A language model over bytes, or the part of one that a pipeline stage holds."""

    def __init__(self, args: argparse.Namespace, stage: int = 0, stages: int = 1) -> None:
        super().__init__()
        width, first, last = args.hidden, stage == 0, stage == stages - 1
        torch.manual_seed(args.seed)
        self.tokens = nn.Embedding(VOCABULARY, width) if first else None
        self.positions = nn.Embedding(args.length, width) if first else None
        self.norm = nn.LayerNorm(width) if last else None
        self.head = nn.Linear(width, VOCABULARY) if last else None
        self.blocks = nn.ModuleList()
        for layer in range(args.layers * stage // stages, args.layers * (stage + 1) // stages):
            torch.manual_seed(args.seed + 1 + layer)  # a layer starts the same in any layout
            self.blocks.append(Block(width, width // args.heads))

    def forward(self, x: Tensor) -> Tensor:
        """Map token ids (batch, length), or what the stage before sent, to this part's output."""
        if self.tokens is not None and self.positions is not None:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.head is not None and self.norm is not None else x


def make_mesh(args: argparse.Namespace, device: torch.device) -> tuple[DeviceMesh, dict[str, int]]:
    """All ranks as a grid of pipeline, replicas, shards and tensor; sides of one are left out."""
    others = args.pp * args.fsdp * args.tp
    if dist.get_world_size() % others:
        raise SystemExit(f"{dist.get_world_size()} ranks are no multiple of pp * fsdp * tp")
    sizes = {"pp": args.pp, "dp": dist.get_world_size() // others}
    sizes |= {"fsdp": args.fsdp, "tp": args.tp}
    kept = {name: size for name, size in sizes.items() if size > 1} or {"dp": 1}
    return init_device_mesh(device.type, tuple(kept.values()), mesh_dim_names=tuple(kept)), sizes


def parallelize(
    model: GPT, args: argparse.Namespace, mesh: DeviceMesh, sizes: dict[str, int]
) -> nn.Module:
    """Cut the model along the tensor axis, then shard or replicate what is left of it."""
    if sizes["tp"] > 1:
        plan = {
            "tokens": RowwiseParallel(input_layouts=Replicate()),
            "blocks.*.attention.qkv": ColwiseParallel(),
            "blocks.*.attention.out": RowwiseParallel(),
            "blocks.*.up": ColwiseParallel(),
            "blocks.*.down": RowwiseParallel(),
            "head": ColwiseParallel(output_layouts=Replicate()),
        }
        present = {
            path: style for path, style in plan.items() if "." in path or getattr(model, path)
        }
        parallelize_module(model, mesh["tp"], present)
    if sizes["fsdp"] > 1:
        shards = mesh["dp", "fsdp"] if sizes["dp"] > 1 else mesh["fsdp"]
        for block in model.blocks:
            fully_shard(block, mesh=shards)
        return fully_shard(model, mesh=shards)
    if sizes["dp"] > 1 and not averages_itself(args):
        if sizes["tp"] > 1:
            _pre_dp_module_transform(model)
        return DistributedDataParallel(model, process_group=mesh["dp"].get_group(), bucket_cap_mb=1)
    return model


def averages_itself(args: argparse.Namespace) -> bool:
    """True where DDP does not help: it fails when it sees several microbatches before backward."""
    return args.pp > 1 and args.fsdp == 1


def average_gradients(parameters: Iterable[nn.Parameter], mesh: DeviceMesh) -> None:
    """Mean of all replicas' gradients, all on their way at once."""
    gradients = [value.grad for value in parameters if value.grad is not None]
    local = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in gradients]
    group = mesh["dp"].get_group()
    for work in [dist.all_reduce(grad, group=group, async_op=True) for grad in local]:
        work.wait()
    for grad in local:
        grad.div_(mesh["dp"].size())


def compute_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean loss of logits (batch, length, VOCABULARY) against token ids (batch, length)."""
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def accumulate(model: nn.Module, inputs: Tensor, targets: Tensor, microbatches: int) -> Tensor:
    """Forward and backward without a pipeline; gradients travel with the last microbatch."""
    total = torch.zeros((), device=inputs.device)
    pairs = list(zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True))
    for number, (part, wanted) in enumerate(pairs, start=1):
        last = number == len(pairs)
        if hasattr(model, "set_requires_gradient_sync"):  # FSDP's way to say it
            model.set_requires_gradient_sync(last)
        postponed = isinstance(model, DistributedDataParallel) and not last
        with model.no_sync() if postponed else nullcontext():
            loss = compute_loss(model(part), wanted) / len(pairs)
            loss.backward()
        total += loss.detach()
    return total


def make_pipeline(
    args: argparse.Namespace, mesh: DeviceMesh, sizes: dict[str, int], device: torch.device
) -> tuple[list[nn.Module], Callable[[Tensor, Tensor], Tensor]]:
    """This rank's chunks of the model, and the function that runs one step's microbatches."""
    make_schedule, chunks = SCHEDULES[args.schedule]
    rank, count = mesh["pp"].get_local_rank(), sizes["pp"] * chunks
    numbers = (
        [rank, count - 1 - rank] if args.schedule == "zbv" else range(rank, count, sizes["pp"])
    )
    modules = [
        parallelize(GPT(args, number, count).to(device), args, mesh, sizes) for number in numbers
    ]
    stages = [
        PipelineStage(module, number, count, device, group=mesh["pp"].get_group())
        for module, number in zip(modules, numbers, strict=True)
    ]
    schedule = make_schedule(stages if chunks > 1 else stages[0], args.microbatches, compute_loss)

    def run(inputs: Tensor, targets: Tensor) -> Tensor:
        losses: list[Tensor] = []
        fed = (inputs,) if 0 in numbers else ()
        schedule.step(
            *fed, **({"target": targets, "losses": losses} if count - 1 in numbers else {})
        )
        return torch.stack(losses).mean().detach() if losses else torch.zeros((), device=device)

    return modules, run


def draw_batch(seed: int, size: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Random pieces of this file: inputs and the bytes that follow, both (size, length)."""
    corpus = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(corpus) - length - 1, (size, 1), generator=generator)
    pieces = corpus[starts + torch.arange(length + 1)].to(device)
    return pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous()


def write_results(folder: str, losses: list[float], modules: Iterable[nn.Module]) -> None:
    """Leave a rank's losses, in full, and the SHA-256 of its parameters in `folder`."""
    digest = hashlib.sha256()
    for module in modules:
        for _, value in sorted(module.named_parameters()):
            local = value.to_local() if isinstance(value, DTensor) else value
            digest.update(local.detach().cpu().contiguous().numpy().tobytes())
    text = json.dumps({"losses": [x.hex() for x in losses], "parameters": digest.hexdigest()})
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / f"rank-{dist.get_rank():04d}.json").write_text(text)


def parse_arguments() -> argparse.Namespace:
    """The command line; wrong values end with exit code 2."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages")
    parser.add_argument("--fsdp", type=int, default=1, help="shards of each replica (FSDP2)")
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b", help="of the pipeline")
    parser.add_argument("--steps", type=int, default=3, help="training steps")
    parser.add_argument("--layers", type=int, default=4, help="transformer layers")
    parser.add_argument("--hidden", type=int, default=64, help="width of the model")
    parser.add_argument("--heads", type=int, default=4, help="attention heads a layer")
    parser.add_argument("--length", type=int, default=32, help="bytes a sequence")
    parser.add_argument("--microbatches", type=int, default=4, help="microbatches a step")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences a replica and step")
    parser.add_argument("--seed", type=int, default=0, help="of parameters and data")
    parser.add_argument("--results", help="folder for each rank's losses and parameter hash")
    args = parser.parse_args()
    if args.hidden % args.heads or args.heads % args.tp or args.batch_size % args.microbatches:
        parser.error("hidden / heads, heads / tp and batch size / microbatches must be whole")
    if args.layers < args.pp * (SCHEDULES[args.schedule][1] if args.pp > 1 else 1):
        parser.error("every chunk of the pipeline needs a layer")
    return args


def main() -> None:
    """Join the job, train, and leave."""
    args = parse_arguments()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    mesh, sizes = make_mesh(args, device)
    if args.pp > 1:
        modules, run = make_pipeline(args, mesh, sizes, device)
    else:
        modules = [parallelize(GPT(args).to(device), args, mesh, sizes)]

        def run(inputs: Tensor, targets: Tensor) -> Tensor:
            return accumulate(modules[0], inputs, targets, args.microbatches)

    parameters = [value for module in modules for value in module.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=3e-3, foreach=False)
    place = dict(zip(mesh.mesh_dim_names or (), mesh.get_coordinate() or (), strict=True))
    replica = place.get("dp", 0) * args.fsdp + place.get("fsdp", 0)
    replicas = sizes["dp"] * sizes["fsdp"]

    losses = []
    for step in range(args.steps):
        inputs, targets = draw_batch(
            args.seed + step * replicas + replica, args.batch_size, args.length, device
        )
        loss = run(inputs, targets)
        if averages_itself(args) and sizes["dp"] > 1:
            average_gradients(parameters, mesh)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss)  # the last stages know it; each of their tp ranks, the same
        losses.append(loss.item() / replicas / args.tp)
        if dist.get_rank() == 0:
            print(f"step {step}  loss {losses[-1]:.4f}", flush=True)
    if args.results:
        write_results(args.results, losses, modules)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
