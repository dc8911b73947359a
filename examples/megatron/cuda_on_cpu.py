"""Let code with hard-coded CUDA calls run without a GPU: tensors go to the CPU instead.

Megatron-core asks for `device="cuda"` in some 250 places. `install()` leaves its files alone and
changes, in this process, PyTorch:

- tensors that are asked for on `cuda` (by argument, `.cuda()` or `.to("cuda")`) stay on the CPU;
- `tensor.type()` answers as on a GPU (`torch.cuda.FloatTensor`), and these names exist;
- `torch.cuda`: streams and events do nothing, one is always current; the random state is the
  CPU's; memory statistics are zero; eight devices of capability 9.0 are said to exist;
- `Module.cuda()` leaves the module where it is.

and two functions of Megatron-core, through which it gets and sets the random state.
`torch.cuda.is_available()` still answers False.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["install"]


class _Nothing:
    """Stands for a stream, an event, or a `with torch.cuda.stream(...)`."""

    cuda_stream = 0

    def __init__(self, *_args: Any, **_options: Any) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def query(self) -> bool:
        """Everything is done always."""
        return True

    def elapsed_time(self, _other: object) -> float:
        """No time passes on a GPU that is not there."""
        return 0.0

    def record_event(self, event: Any = None) -> Any:
        """Give back the event."""
        return event or _Nothing()

    def wait(self, *_: object) -> None:
        """Wait for nothing."""

    record = synchronize = wait_stream = wait_event = wait


def _is_cuda(device: Any) -> bool:
    if isinstance(device, bool):
        return False
    if isinstance(device, int):
        return True
    return isinstance(device, (str, torch.device)) and torch.device(device).type == "cuda"


class _CpuInstead(TorchFunctionMode):
    """Sees every call of PyTorch and replaces the device in it."""

    def __torch_function__(
        self, function: Callable[..., Any], _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], "cpu", *args[2:])
        if function is torch.Tensor.type and len(args) == 1 and not kwargs:
            return function(*args).replace("torch.", "torch.cuda.")
        return function(*args, **kwargs)


def install() -> None:
    """Change PyTorch as the module says, until the process ends."""
    stream = _Nothing()
    answers: dict[str, Any] = {
        "current_device": torch.device("cpu"),
        "device_count": 8,
        "get_device_capability": (9, 0),
        "get_device_name": "none (CPU)",
        "current_stream": stream,
        "default_stream": stream,
        "stream": stream,
        "device": stream,
        "memory_stats": {},
    }
    answers |= dict.fromkeys(("set_device", "synchronize", "empty_cache", "manual_seed_all"))
    answers |= dict.fromkeys(
        ("max_memory_allocated", "memory_allocated", "max_memory_reserved", "memory_reserved"), 0
    )
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_args, _answer=answer, **_options: _answer)
    torch.cuda.Stream = torch.cuda.Event = _Nothing
    torch.cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed))
    torch.cuda.get_rng_state = lambda *_: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, *_: torch.set_rng_state(state)
    for name in ("FloatTensor", "HalfTensor", "BFloat16Tensor"):
        setattr(torch.cuda, name, getattr(torch, name))
    torch.nn.Module.cuda = lambda module, *_: module
    _CpuInstead().__enter__()  # until the process ends

    from megatron.core.tensor_parallel import random

    vars(random)["_get_cuda_rng_state"] = lambda *_args, **_options: torch.get_rng_state()
    vars(random)["_set_cuda_rng_state"] = lambda state, *_, **_options: torch.set_rng_state(state)
