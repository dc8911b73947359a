"""Pipeline schedules of torch.distributed.pipelining."""

import torch
from torch import nn
from torch.distributed import pipelining

MICROBATCHES = 8
WIDTH = 8


def pipeline(schedule, rank, size, *, stages=1, order="loop"):
    """Two steps; losses and gradients of this rank's stages."""
    if order == "v":
        mine = [rank, 2 * size - 1 - rank]
    else:
        mine = [rank + size * index for index in range(stages)]
    made = []
    for number in mine:
        torch.manual_seed(number)
        made.append(
            pipelining.PipelineStage(
                nn.Linear(WIDTH, WIDTH), number, size * len(mine), torch.device("cpu")
            )
        )
    run = schedule(
        made if len(made) > 1 else made[0],
        n_microbatches=MICROBATCHES,
        loss_fn=nn.functional.mse_loss,
    )
    torch.manual_seed(9)
    inputs, target = torch.randn(2 * MICROBATCHES, WIDTH), torch.randn(2 * MICROBATCHES, WIDTH)
    losses = []
    for _ in range(2):
        arguments = [inputs] if 0 in mine else []
        last = size * len(mine) - 1 in mine
        run.step(*arguments, **({"target": target, "losses": losses} if last else {}))
    return [losses, [each.grad for stage in made for each in stage.submod.parameters()]]


def gpipe(rank, size):
    return pipeline(pipelining.ScheduleGPipe, rank, size)


def one_forward_one_backward(rank, size):
    return pipeline(pipelining.Schedule1F1B, rank, size)


def interleaved(rank, size):
    return pipeline(pipelining.ScheduleInterleaved1F1B, rank, size, stages=2)


def looped_breadth_first(rank, size):
    return pipeline(pipelining.ScheduleLoopedBFS, rank, size, stages=2)


def interleaved_zero_bubble(rank, size):
    return pipeline(pipelining.ScheduleInterleavedZeroBubble, rank, size, stages=2)


def zero_bubble_v(rank, size):
    return pipeline(pipelining.ScheduleZBVZeroBubble, rank, size, stages=2, order="v")


FEATURES = (
    gpipe,
    one_forward_one_backward,
    interleaved,
    looped_breadth_first,
    interleaved_zero_bubble,
    zero_bubble_v,
)
