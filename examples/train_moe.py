"""Train a small mixture of experts: tokens travel to their experts and back.

    torchrun --nproc-per-node 8 examples/train_moe.py --ep 4
    prismreplay collect --world-size 8 --devices 2 -- examples/train_moe.py --ep 4

An ordinary PyTorch program. The experts of a layer are spread over `--ep` ranks; the ranks that
this leaves over hold replicas of them. Everything else is replicated on all ranks, and every
rank has data of its own. How many tokens go where is known only once the router has spoken, so
each layer first exchanges the counts, then the tokens.
"""

import argparse
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from train_gpt import VOCABULARY, Attention, compute_loss, draw_batch, write_results


class Exchange(torch.autograd.Function):
    """Send rows to the ranks of a group; the gradient takes the way back."""

    @staticmethod
    def forward(ctx, rows: Tensor, sent: list[int], received: list[int], group) -> Tensor:  # noqa: ANN001
        """`rows` in the order of the ranks they go to -> rows in the order they came from."""
        ctx.sent, ctx.received, ctx.group = sent, received, group
        result = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(result, rows.contiguous(), received, sent, group=group)
        return result

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # noqa: ANN001
        """Rows go back to where they came from."""
        return Exchange.apply(gradient, ctx.received, ctx.sent, ctx.group), None, None, None


class Experts(nn.Module):
    """This rank's experts: two-layer perceptrons whose weights lie in one tensor."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, width, 2 * width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(count, 2 * width, width) * (2 * width) ** -0.5)

    def forward(self, rows: Tensor, expert: Tensor) -> Tensor:
        """Rows (n, width) through the experts whose local numbers stand in `expert` (n,)."""
        result = torch.zeros_like(rows)
        for number in range(len(self.up)):
            mine = (expert == number).nonzero().squeeze(1)  # may be none: the graph stays whole
            hidden = nn.functional.gelu(rows[mine] @ self.up[number])
            result = result.index_add(0, mine, hidden @ self.down[number])
        return result


class MoE(nn.Module):
    """A router and its experts, of which each rank of `group` holds an equal part."""

    def __init__(self, width: int, experts: int, top_k: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, self.top_k = group, top_k
        self.local = experts // group.size()
        self.gate = nn.Linear(width, experts, bias=False)
        torch.manual_seed(torch.initial_seed() + 1000 * (1 + group.rank()))
        self.experts = Experts(self.local, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        tokens = x.flatten(0, 1)
        weight, chosen = self.gate(tokens).softmax(-1).topk(self.top_k)
        order = chosen.flatten().argsort(stable=True)  # copies of tokens, sorted by expert
        counts = torch.bincount(chosen.flatten(), minlength=self.gate.out_features)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.group)
        sent = counts.view(-1, self.local).sum(1).tolist()
        received = arriving.view(-1, self.local).sum(1).tolist()
        rows = Exchange.apply(tokens[order // self.top_k], sent, received, self.group)
        numbers = torch.arange(self.local, device=x.device).repeat(self.group.size())
        rows = self.experts(rows, numbers.repeat_interleave(arriving))
        rows = Exchange.apply(rows, received, sent, self.group)
        rows = rows * weight.flatten()[order].unsqueeze(1)
        return torch.zeros_like(tokens).index_add(0, order // self.top_k, rows).view_as(x)


class Model(nn.Module):
    """A language model over bytes whose perceptrons are mixtures of experts."""

    def __init__(self, args: argparse.Namespace, group: dist.ProcessGroup) -> None:
        super().__init__()
        width = args.hidden
        torch.manual_seed(args.seed)
        self.tokens, self.positions = (
            nn.Embedding(VOCABULARY, width),
            nn.Embedding(args.length, width),
        )
        self.head = nn.Linear(width, VOCABULARY)
        self.layers = nn.ModuleList()
        for layer in range(args.layers):
            torch.manual_seed(args.seed + 1 + layer)
            parts = [
                nn.LayerNorm(width),
                Attention(width, width // args.heads),
                nn.LayerNorm(width),
            ]
            self.layers.append(nn.ModuleList([*parts, MoE(width, args.experts, args.top_k, group)]))

    def forward(self, tokens: Tensor) -> Tensor:
        """Map token ids (batch, length) to logits (batch, length, VOCABULARY)."""
        x = self.tokens(tokens) + self.positions(
            torch.arange(tokens.shape[1], device=tokens.device)
        )
        for norm1, attention, norm2, moe in self.layers:
            x = x + attention(norm1(x))
            x = x + moe(norm2(x))
        return self.head(x)


def average(
    gradients: list[Tensor], count: int, group: dist.ProcessGroup | None
) -> Callable[[], None]:
    """Start the sum of some gradients over a group, in one buffer; `count` is what to divide by."""
    buffer = torch.cat([gradient.flatten() for gradient in gradients]) / count
    work = dist.all_reduce(buffer, group=group, async_op=True)

    def finish() -> None:
        work.wait()
        parts = buffer.split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))

    return finish


def parse_arguments() -> argparse.Namespace:
    """The command line; wrong values end with exit code 2."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ep", type=int, default=2, help="ranks that share a layer's experts")
    parser.add_argument("--experts", type=int, default=8, help="experts a layer")
    parser.add_argument("--top-k", type=int, default=2, help="experts a token goes to")
    parser.add_argument("--steps", type=int, default=3, help="training steps")
    parser.add_argument("--layers", type=int, default=2, help="transformer layers")
    parser.add_argument("--hidden", type=int, default=64, help="width of the model")
    parser.add_argument("--heads", type=int, default=4, help="attention heads a layer")
    parser.add_argument("--length", type=int, default=32, help="bytes a sequence")
    parser.add_argument("--batch-size", type=int, default=4, help="sequences a rank and step")
    parser.add_argument("--seed", type=int, default=0, help="of parameters and data")
    parser.add_argument("--results", help="folder for each rank's losses and parameter hash")
    args = parser.parse_args()
    if args.experts % args.ep or args.hidden % args.heads:
        parser.error("experts / ep and hidden / heads must be whole")
    return args


def main() -> None:
    """Join the job, train, and leave."""
    args = parse_arguments()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (world // args.ep, args.ep), mesh_dim_names=("dp", "ep"))
    model = Model(args, mesh["ep"].get_group()).to(device)
    split = [(".experts." in name, value) for name, value in model.named_parameters()]
    experts, shared = ([v for mine, v in split if mine is wanted] for wanted in (True, False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    losses = []
    for step in range(args.steps):
        inputs, targets = draw_batch(
            args.seed + step * world + rank, args.batch_size, args.length, device
        )
        loss = compute_loss(model(inputs), targets)
        loss.backward()
        finish = [
            average([value.grad for value in shared], world, None),
            average([value.grad for value in experts], world, mesh["dp"].get_group()),
        ]
        for wait in finish:
            wait()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean)
        losses.append(mean.item() / world)
        if rank == 0:
            print(f"step {step}  loss {losses[-1]:.4f}", flush=True)
    if args.results:
        write_results(args.results, losses, [model])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
