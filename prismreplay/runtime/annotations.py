"""Hooks that tell a graph recorder where the program is: its ranges, autograd, optimizers, pipeline.

All of them are torch's own hooks where there are some, else wrappers around Python functions
that every program passes through. What torch imports late (`torch.distributed.pipelining`) is
hooked when it is imported.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from prismreplay.runtime.cuda_streams import current_stream, watch_streams
from prismreplay.runtime.device_time import Timeline
from prismreplay.runtime.graph_recorder import GraphRecorder
from prismreplay.runtime.program_position import ProgramPosition
from prismtrace.recorder import SpanWriter

__all__ = ["make_recorder", "watch"]

_STAGES = "torch.distributed.pipelining.stage"


def make_recorder(
    writer: SpanWriter,
    *,
    clock: Callable[[], int] | None = None,
    timeline: Timeline | None = None,
    cuda: bool = False,
) -> GraphRecorder:
    """The recorder of this process, with all hooks installed.

    Args:
        writer: of this rank's spool.
        clock: now, in ns, for a graph with times; None for a bare graph.
        timeline: in place of `clock`, where devices compute.
        cuda: tell the streams of CUDA apart. Graphs with and without differ.
    """
    recorder = GraphRecorder(
        writer,
        clock=clock,
        in_backward=_in_backward,
        timeline=timeline,
        current_stream=current_stream if cuda else None,
    )
    watch(recorder.position)
    if cuda:
        watch_streams(recorder.lanes)
    return recorder


def _in_backward() -> bool:
    """Whether autograd's engine runs this thread; also when it was called directly."""
    return bool(torch._C._current_graph_task_id() != -1)  # noqa: SLF001


def watch(position: ProgramPosition) -> None:
    """Install all hooks in this process, once."""
    _watch_ranges(position)
    _watch_backward(position)
    _watch_optimizers(position)
    if _STAGES in sys.modules:
        _watch_stages(sys.modules[_STAGES], position)
    else:
        sys.meta_path.insert(0, _WhenImported(_STAGES, lambda it: _watch_stages(it, position)))


def _watch_ranges(position: ProgramPosition) -> None:
    record = torch.autograd.profiler.record_function
    enter, leave = record.__enter__, record.__exit__

    @functools.wraps(enter)
    def begin(self: Any) -> Any:
        position.begin_range(self.name)
        return enter(self)

    @functools.wraps(leave)
    def end(self: Any, *failure: Any) -> Any:
        position.end_range(self.name)
        return leave(self, *failure)

    record.__enter__, record.__exit__ = begin, end
    _watch_nvtx(position)


def _watch_nvtx(position: ProgramPosition) -> None:
    nvtx = torch.cuda.nvtx
    push, pop = nvtx.range_push, nvtx.range_pop
    names: list[str] = []

    @functools.wraps(push)
    def begin(msg: str) -> Any:
        depth = push(msg)
        names.append(msg)
        position.begin_range(msg)
        return depth

    @functools.wraps(pop)
    def end() -> Any:
        if names:
            position.end_range(names.pop())
        return pop()

    nvtx.range_push, nvtx.range_pop = begin, end


def _watch_backward(position: ProgramPosition) -> None:
    run = torch.autograd.graph._engine_run_backward  # noqa: SLF001

    @functools.wraps(run)
    def run_backward(*arguments: Any, **options: Any) -> Any:
        position.begin_backward()
        try:
            return run(*arguments, **options)
        finally:
            position.end_backward()

    torch.autograd.graph._engine_run_backward = run_backward  # noqa: SLF001
    torch.autograd._engine_run_backward = run_backward  # noqa: SLF001


def _watch_optimizers(position: ProgramPosition) -> None:
    register_optimizer_step_pre_hook(lambda optimizer, *_: position.begin_optimizer(id(optimizer)))
    register_optimizer_step_post_hook(lambda optimizer, *_: position.end_optimizer(id(optimizer)))
    make = torch.optim.Optimizer.__init__

    @functools.wraps(make)
    def made(self: Any, *arguments: Any, **options: Any) -> None:
        make(self, *arguments, **options)
        position.optimizer_made()

    torch.optim.Optimizer.__init__ = made


def _watch_stages(stages: ModuleType, position: ProgramPosition) -> None:
    """Which microbatch and chunk a pipeline's stage works on, and for which its messages are."""
    base = stages._PipelineStageBase  # noqa: SLF001
    for method, phase in (
        ("forward_one_chunk", "forward"),
        ("backward_one_chunk", "backward"),
        ("backward_weight_one_chunk", "backward"),
    ):
        if hasattr(base, method):
            setattr(base, method, _work(getattr(base, method), phase, position))
    for method, phase in (
        ("get_fwd_recv_ops", "forward"),
        ("get_fwd_send_ops", "forward"),
        ("get_bwd_recv_ops", "backward"),
        ("get_bwd_send_ops", "backward"),
    ):
        if hasattr(base, method):
            setattr(base, method, _messages(getattr(base, method), phase, position))


def _work(method: Callable[..., Any], phase: str, position: ProgramPosition) -> Callable[..., Any]:
    @functools.wraps(method)
    def work(self: Any, *arguments: Any, **options: Any) -> Any:
        microbatch = next(iter((*arguments, *options.values())))
        position.begin_chunk(microbatch, _chunk_of(self), phase)
        try:
            return method(self, *arguments, **options)
        finally:
            position.end_chunk()

    return work


def _messages(
    method: Callable[..., Any], phase: str, position: ProgramPosition
) -> Callable[..., Any]:
    @functools.wraps(method)
    def messages(self: Any, microbatch: int) -> Any:
        made = method(self, microbatch)
        for message in made:
            position.expect_message(
                message,
                message.group.group_name,
                message.peer,
                message.op is torch.distributed.isend,
                (microbatch, _chunk_of(self), phase),
            )
        return made

    return messages


def _chunk_of(stage: Any) -> int | None:
    """Which of its rank's stages it is; null where every rank has one."""
    if stage.num_stages <= stage.group_size:
        return None
    return int(stage.stage_index // stage.group_size)


class _WhenImported(importlib.abc.MetaPathFinder):
    """Calls `then` with a module right after it was imported for the first time."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> importlib.machinery.ModuleSpec | None:
        """The module's own spec, with a loader that calls `then` when it is done."""
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute, then = spec.loader.exec_module, self._then

        def exec_module(module: ModuleType) -> None:
            execute(module)
            then(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
