"""torch's own objects tell a recorder where the program is."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import util

import pytest

pytestmark = pytest.mark.skipif(
    util.find_spec("torch") is None, reason="needs torch: pip install 'prismllm-toolkit[replay]'"
)

# In one process of their own, as hooks stay installed. Each scene gives every place it leaves.
SCENES = """
import json
import torch
from prismreplay.runtime.annotations import _in_backward, watch
from prismreplay.runtime.program_position import ProgramPosition

places = []
position = ProgramPosition(cut=places.append, in_backward=_in_backward)
watch(position)
layer = torch.nn.Linear(2, 2)
x = torch.ones(2, requires_grad=True)
scenes = {}


def scene(play):
    position.__init__(cut=places.append, in_backward=_in_backward)
    places.clear()
    said = play()
    scenes[play.__name__] = said or [*places, position.place()]


@scene
def optimizers_and_autograd():
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(x).sum().backward()
    optimizer.step()
    torch.autograd.grad(layer(x).sum(), layer.weight)


@scene
def recomputed_forward():
    from torch.utils.checkpoint import checkpoint

    said = []

    def work(x):
        said.append(position.place()[3])
        return layer(x)

    position.optimizer_made()
    checkpoint(work, x, use_reentrant=True).sum().backward()
    return said


@scene
def engine_called_directly():
    said = []

    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x

        @staticmethod
        def backward(ctx, grad):
            said.append(position.place()[3])
            return grad

    y = Seen.apply(layer(x)).sum()
    torch.autograd.Variable._execution_engine.run_backward(
        (y,), (torch.ones(()),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )
    return said


@scene
def profiler_and_ranges():
    every_step = torch.profiler.schedule(wait=0, warmup=0, active=2)
    with torch.profiler.profile(schedule=every_step) as profiler:
        for _ in range(2):
            with torch.profiler.record_function("microbatch 1"):
                pass
            profiler.step()


@scene
def stages_of_a_pipeline():
    from torch.distributed.pipelining import stage  # hooked when it is imported

    class Stage(stage._PipelineStageBase):
        def __init__(self):
            self.stage_index, self.num_stages, self.group_size = 5, 8, 4

    Stage.__abstractmethods__ = frozenset()
    try:
        Stage().forward_one_chunk(3, ())
    except AttributeError:
        pass


print(json.dumps(scenes))
"""


@pytest.fixture(scope="module")
def scenes(repo):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCENES],
        cwd=repo,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_optimizers_and_autograd(scenes):
    assert scenes["optimizers_and_autograd"] == [
        [None, None, None, "other"],
        [0, None, None, "forward"],
        [0, None, None, "backward"],
        [0, None, None, "forward"],
        [0, None, None, "optimizer"],
        [1, None, None, "forward"],
        [1, None, None, "backward"],
        [1, None, None, "forward"],
    ]


def test_recomputed_forward_is_part_of_the_backward_pass(scenes):
    assert scenes["recomputed_forward"] == ["forward", "backward"]


def test_a_backward_pass_that_no_function_of_torch_began(scenes):
    assert scenes["engine_called_directly"] == ["backward"]


def test_ranges_and_the_profiler_name_steps_and_microbatches(scenes):
    assert [0, 1, None, "forward"] in scenes["profiler_and_ranges"]
    assert [1, 1, None, "forward"] in scenes["profiler_and_ranges"]


def test_stages_of_a_pipeline_tell_microbatch_and_chunk(scenes):
    assert scenes["stages_of_a_pipeline"] == [
        [None, None, None, "other"],
        [None, 3, 1, "forward"],
        [None, None, None, "other"],
    ]
