"""The GPUs that a rank's program sees: as many as its host on the cluster has, all of them one.

On the cluster, local rank i computes on GPU i of its host. Here all ranks that share a GPU see
only that one (CUDA_VISIBLE_DEVICES). So that `torch.cuda.set_device(LOCAL_RANK)`, `device_count()`
and `torch.device("cuda", LOCAL_RANK)` work nevertheless, every number that torch is given means
the one GPU. Tensors say that they are on cuda:0.

What cannot be made to work: a rank that computes on several GPUs; code that looks for a tensor's
device number, or that gives numbers to CUDA past torch; Python threads that the program starts and
that name a device by number. With one rank a host nothing is replaced.

There are two ways to do it. Where times do not matter, torch shows us every operator (a function
mode), which costs the host some microseconds each. Where they do, only what makes devices and
takes them is replaced: `torch.device`, the functions that make tensors, and the methods that move
them. Names of devices that are given to other operators are then not seen.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["VirtualGpus", "show_gpus"]

_DEVICE: Any = torch.device
_MAKERS = (
    *("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace"),
    *("logspace", "ones", "rand", "randint", "randn", "randperm", "scalar_tensor", "tensor"),
    *("zeros",),
)
_LIKE = (
    *("empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like"),
    "zeros_like",
)
_NEW = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")
_NUMBERED = frozenset({torch.Tensor.cuda, torch.Tensor.to})
"""Methods that take a device as a plain number."""


def show_gpus(count: int, token: str, *, timed: bool = False) -> VirtualGpus:
    """From now on this process sees `count` GPUs, all of which are the one that `token` names.

    Call it before the process uses CUDA, and before the program runs. `timed`: what operators cost
    the host matters.
    """
    shown = VirtualGpus(count, token, timed=timed)
    if count > 1:
        shown.install()
    return shown


class VirtualGpus(TorchFunctionMode):  # type: ignore[misc]
    """What was replaced in torch. As a function mode, it maps devices that operators are given.

    Args:
        count: GPUs to be seen.
        token: the real one, as CUDA_VISIBLE_DEVICES names it.
        real: what devices of any number mean.
        timed: do without a function mode.
    """

    def __init__(self, count: int, token: str, real: Any = None, *, timed: bool = False) -> None:
        super().__init__()
        self._timed = timed
        self._count = count
        self._token = token
        self._real = torch.device("cuda", 0) if real is None else real
        self._undo: list[Callable[[], None]] = []

    def install(self) -> None:
        """Replace what is given numbers of devices."""
        self._replace(torch.cuda.device_count, self._device_count)
        accelerator = getattr(torch, "accelerator", None)
        if accelerator is not None:
            self._replace(accelerator.device_count, self._device_count)
        for find in self._index_functions():
            self._replace(find, self._mapped_index(find))
        start = getattr(torch._C, "_cuda_init", None)  # noqa: SLF001  builds for CPUs have none
        if start is not None:
            self._replace(start, self._started(start))
        self._replace(torch.load, self._mapped_load(torch.load))
        self._undo.append(functools.partial(setattr, torch, "Generator", torch.Generator))
        torch.Generator = self._generator_class()
        if self._timed:
            self._replace_operators()
            return
        self.__enter__()
        self._undo.append(lambda: self.__exit__(None, None, None))

    def remove(self) -> None:
        """Put everything back."""
        while self._undo:
            self._undo.pop()()

    def __torch_function__(
        self,
        function: Any,
        types: Any,
        arguments: tuple[Any, ...] = (),
        keywords: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call an operator with the real device in place of others."""
        given = dict(keywords) if keywords else {}
        if "device" in given:
            given["device"] = self.translate(given["device"])
        if function in _NUMBERED:
            mapped = (self.translate(one) for one in arguments[1:])
            return function(*arguments[:1], *mapped, **given)
        return function(*(self._translated_device(one) for one in arguments), **given)

    def translate(self, device: Any) -> Any:
        """The real device, if `device` is one by number, name or object; else what it is."""
        if isinstance(device, str) and device.startswith("cuda:"):
            return self._real
        if isinstance(device, int) and not isinstance(device, bool):
            return self._real
        return self._translated_device(device)

    def _translated_device(self, one: Any) -> Any:
        if isinstance(one, _DEVICE) and one.type == "cuda" and one.index:
            return self._real
        return one

    # --- replacements -----------------------------------------------------------------

    def _replace_operators(self) -> None:
        """Those that take devices most; `torch.device` gives the real one for others."""
        for name in (*_MAKERS, *_LIKE):
            if hasattr(torch, name):
                self._set(torch, name, self._translating(getattr(torch, name)))
        for name in _NEW:
            self._set(torch.Tensor, name, self._translating(getattr(torch.Tensor, name)))
        for name in ("to", "cuda"):
            self._set(torch.Tensor, name, self._moving(getattr(torch.Tensor, name)))
        self._set(torch, "device", self._device_class())

    def _translating(self, operator: Callable[..., Any]) -> Callable[..., Any]:
        translate = self.translate

        @functools.wraps(operator)
        def translated(*arguments: Any, **keywords: Any) -> Any:
            if "device" in keywords:
                keywords["device"] = translate(keywords["device"])
            return operator(*arguments, **keywords)

        return translated

    def _moving(self, method: Callable[..., Any]) -> Callable[..., Any]:
        translate = self.translate

        @functools.wraps(method)
        def moved(tensor: Any, *arguments: Any, **keywords: Any) -> Any:
            if arguments:
                arguments = (translate(arguments[0]), *arguments[1:])
            if "device" in keywords:
                keywords["device"] = translate(keywords["device"])
            return method(tensor, *arguments, **keywords)

        return moved

    def _device_class(self) -> Any:
        real, translated = torch.device, self._translated_device

        class AnyDevice(type):
            """Torch's own devices are instances, too."""

            def __instancecheck__(cls, instance: Any) -> bool:
                return isinstance(instance, real)

        class device(metaclass=AnyDevice):  # noqa: N801  pickles name it
            """A device; of GPUs, the real one."""

            def __new__(cls, *arguments: Any, **keywords: Any) -> Any:
                return translated(real(*arguments, **keywords))

        device.__module__, device.__qualname__ = "torch", "device"
        return device

    def _set(self, owner: Any, name: str, new: Any) -> None:
        self._undo.append(functools.partial(setattr, owner, name, getattr(owner, name)))
        setattr(owner, name, new)

    def _device_count(self) -> int:
        return self._count

    def _index_functions(self) -> list[Callable[..., int]]:
        """Torch's functions that turn whatever names a device into its number."""
        name = "_get_device_index"
        found = [sys.modules.get(module) for module in _INDEX_MODULES]
        return [vars(module)[name] for module in found if module and name in vars(module)]

    def _mapped_index(self, find: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(find)
        def mapped(*arguments: Any, **keywords: Any) -> Any:
            index = find(*arguments, **keywords)
            # Negative: a CPU, or no device at all.
            return min(index, 0)

        return mapped

    def _started(self, start: Callable[[], None]) -> Callable[[], None]:
        """Start CUDA on the real GPU, whatever the program has made of the environment."""
        name = "CUDA_VISIBLE_DEVICES"

        @functools.wraps(start)
        def started() -> None:
            before = os.environ.get(name)
            os.environ[name] = self._token
            try:
                start()
            finally:
                if before is not None:
                    os.environ[name] = before
            # What the program has asked for before, such as manual_seed_all, comes next.
            self._repeat_generators()

        return started

    def _repeat_generators(self) -> None:
        """One generator of random numbers, found under every number."""
        known = torch.cuda.default_generators
        if known and len(known) < self._count:
            torch.cuda.default_generators = tuple(known[:1]) * self._count

    def _mapped_load(self, load: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(load)
        def mapped(file: Any, map_location: Any = None, *rest: Any, **keywords: Any) -> Any:
            where = map_location if callable(map_location) else self.translate(map_location)
            return load(file, where, *rest, **keywords)

        return mapped

    def _generator_class(self) -> Any:
        real, translate = torch.Generator, self.translate

        class AnyGenerator(type(real)):  # type: ignore[misc]
            """Torch's own generators are instances, too."""

            def __instancecheck__(cls, instance: Any) -> bool:
                return isinstance(instance, real)

        class Generator(real, metaclass=AnyGenerator):  # type: ignore[misc, valid-type]
            """A generator of random numbers on the real device."""

            def __new__(cls, device: Any = "cpu") -> Any:
                return real(device=translate(device))

        return Generator

    def _replace(self, old: Any, new: Any) -> None:
        """In every module of torch that has it under its name."""
        name = old.__name__
        for module in list(sys.modules.values()):
            of_torch = getattr(module, "__name__", "").partition(".")[0] == "torch"
            if of_torch and vars(module).get(name) is old:
                self._undo.append(functools.partial(setattr, module, name, old))
                setattr(module, name, new)


_INDEX_MODULES = ("torch._utils", "torch.cuda._utils", "torch.accelerator._utils")
