"""Train a tiny language model with DistributedDataParallel and profile it, one file per rank.

An ordinary PyTorch job: nothing here knows that its traces will be read by this toolkit.

    python examples/train_ddp.py --world-size 4 --trace-dir traces

Every rank is a process of this machine; gradients travel over gloo, so no GPU is needed. The
model learns to predict the next byte of this very file. With `--long-rank R` the sequences of
rank R are twice as long as the others', the kind of imbalance that real data has.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule

VOCABULARY = 256  # bytes


class Block(nn.Module):
    """One transformer layer: causal attention, then a two-layer perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        batch, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class TinyGPT(nn.Module):
    """A language model over bytes."""

    def __init__(self, length: int, width: int = 128, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map token ids (batch, length) to logits (batch, length, VOCABULARY)."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(places)
        return self.head(self.norm(self.blocks(x)))


def draw_batch(corpus: Tensor, size: int, length: int) -> tuple[Tensor, Tensor]:
    """Random pieces of `corpus`: inputs and the bytes that follow, both (size, length)."""
    starts = torch.randint(len(corpus) - length - 1, (size, 1))
    pieces = corpus[starts + torch.arange(length + 1)]
    return pieces[:, :-1], pieces[:, 1:]


def train(rank: int, args: argparse.Namespace, store: str) -> None:
    """What one rank does, from joining the group to writing its trace."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=args.world_size
    )
    torch.manual_seed(rank)  # data differ per rank; DDP spreads rank 0's weights
    model = DistributedDataParallel(TinyGPT(2 * args.length), bucket_cap_mb=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    corpus = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    length = 2 * args.length if rank == args.long_rank else args.length

    steps = args.warmup_steps + args.steps
    plan = schedule(wait=args.warmup_steps - 1, warmup=1, active=args.steps, repeat=1)
    with profile(activities=[ProfilerActivity.CPU], schedule=plan, record_shapes=True) as profiler:
        for step in range(steps):
            inputs, targets = draw_batch(corpus, args.batch_size, length)
            loss = cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mean = loss.detach()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step:2d}  loss {mean.item() / args.world_size:.3f}", flush=True)
            profiler.step()
    profiler.export_chrome_trace(str(Path(args.trace_dir) / f"rank{rank}.json.gz"))
    dist.destroy_process_group()


def parse_arguments() -> argparse.Namespace:
    """The command line; wrong values end with exit code 2."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--world-size", type=int, default=4, help="ranks (processes)")
    parser.add_argument("--trace-dir", required=True, help="folder for rank<r>.json.gz")
    parser.add_argument("--steps", type=int, default=3, help="steps to profile")
    parser.add_argument("--warmup-steps", type=int, default=3, help="steps before that")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences a rank and step")
    parser.add_argument("--length", type=int, default=128, help="bytes a sequence")
    parser.add_argument("--long-rank", type=int, help="rank whose sequences are twice as long")
    args = parser.parse_args()
    if min(args.world_size, args.steps, args.warmup_steps, args.batch_size, args.length) < 1:
        parser.error("counts and sizes must be at least 1")
    if args.long_rank is not None and not 0 <= args.long_rank < args.world_size:
        parser.error("--long-rank must be one of the ranks")
    return args


def main() -> None:
    """Start one process per rank and wait for all of them."""
    args = parse_arguments()
    Path(args.trace_dir).mkdir(parents=True, exist_ok=True)
    # One thread a rank, and gloo on the loopback device whatever the host's name resolves to.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "rendezvous")
        mp.spawn(train, args=(args, store), nprocs=args.world_size)


if __name__ == "__main__":
    main()
