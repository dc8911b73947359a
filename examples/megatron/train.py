"""Train a tiny GPT with Megatron-core as it comes from PyPI, its own schedules and optimizer.

    pip install --no-deps megatron-core==0.16.1
    torchrun --nproc-per-node 8 examples/megatron/train.py --tp 2 --pp 2
    prismreplay collect --world-size 8 --devices 2 -- examples/megatron/train.py --tp 2 --pp 2

Without a GPU, `cuda_on_cpu.py` beside this file stands in for CUDA; Megatron-core itself is
unchanged.
"""

import argparse
import hashlib
import json
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

warnings.filterwarnings("ignore")  # Megatron-core misses Apex and Transformer Engine, aloud
if not torch.cuda.is_available():
    import cuda_on_cpu

    cuda_on_cpu.install()

from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

VOCABULARY, LENGTH, MICROBATCH, MICROBATCHES = 64, 16, 2, 4


def make_model(args: argparse.Namespace) -> nn.Module:
    """This rank's part of the model, in Megatron's own data-parallel wrapper."""
    config = TransformerConfig(
        num_layers=4,
        hidden_size=32,
        num_attention_heads=4,
        tensor_model_parallel_size=args.tp,
        pipeline_model_parallel_size=args.pp,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        finalize_model_grads_func=finalize_model_grads,
    )
    torch.manual_seed(1234)
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True,
    )
    wrapping = DistributedDataParallelConfig(
        overlap_grad_reduce=args.distributed_optimizer,
        use_distributed_optimizer=args.distributed_optimizer,
    )
    return DistributedDataParallel(config, wrapping, model)


def draw_microbatches() -> Iterator[Tensor]:
    """Random token ids (MICROBATCH, LENGTH + 1), other ones for every replica."""
    replica = parallel_state.get_data_parallel_rank()
    generator = torch.Generator().manual_seed(10 + replica)
    while True:
        yield torch.randint(VOCABULARY, (MICROBATCH, LENGTH + 1), generator=generator)


def average_loss(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of a microbatch, and its mean over the replicas for the log."""
    loss = output.float().mean()
    mean = loss.detach().clone()
    dist.all_reduce(mean, group=parallel_state.get_data_parallel_group())
    return loss, {"loss": mean / parallel_state.get_data_parallel_world_size()}


def forward_step(data: Iterator[Tensor], model: nn.Module) -> tuple[Tensor, Callable[..., object]]:
    """What Megatron's schedules call for every microbatch."""
    tokens = next(data).to("cuda")
    places = torch.arange(LENGTH, device="cuda").expand(MICROBATCH, -1)
    hidden = torch.ones(1, 1, LENGTH, LENGTH, device="cuda").tril() < 0.5
    return model(tokens[:, :-1], places, hidden, labels=tokens[:, 1:]), partial(average_loss)


def main() -> None:
    """Join the job, train, and leave."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tp", type=int, default=2, help="tensor-parallel ranks")
    parser.add_argument("--pp", type=int, default=2, help="pipeline stages")
    parser.add_argument("--steps", type=int, default=2, help="training steps")
    parser.add_argument("--distributed-optimizer", action="store_true", help="shard its state")
    parser.add_argument("--results", help="folder for each rank's losses and parameter hash")
    args = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    parallel_state.initialize_model_parallel(args.tp, args.pp)
    tensor_parallel.model_parallel_cuda_manual_seed(123)
    model = make_model(args).cuda()
    settings = OptimizerConfig(
        lr=1e-2, clip_grad=1.0, use_distributed_optimizer=args.distributed_optimizer
    )
    optimizer = get_megatron_optimizer(settings, [model])
    run_schedule, data = get_forward_backward_func(), draw_microbatches()

    losses = []
    for step in range(args.steps):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        reports = run_schedule(
            forward_step_func=forward_step,
            data_iterator=data,
            model=[model],
            num_microbatches=MICROBATCHES,
            seq_length=LENGTH,
            micro_batch_size=MICROBATCH,
            forward_only=False,
        )
        _, norm, _ = optimizer.step()
        losses += [report["loss"].item() for report in reports]
        if dist.get_rank() == 0:
            print(f"step {step}  gradient norm {norm:.4f}", flush=True)
    if args.results:
        digest = hashlib.sha256()
        for _, value in sorted(model.named_parameters()):
            digest.update(value.detach().cpu().numpy().tobytes())
        text = json.dumps({"losses": [x.hex() for x in losses], "parameters": digest.hexdigest()})
        Path(args.results).mkdir(parents=True, exist_ok=True)
        (Path(args.results) / f"rank-{dist.get_rank():04d}.json").write_text(text)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
