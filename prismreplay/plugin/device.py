"""Kernels on a device: found, compiled, loaded once a process, and launched on torch's streams."""

from __future__ import annotations

import functools
from typing import Any

from prismreplay.errors import PluginError, PluginUnavailableError
from prismreplay.plugin.compiling import STILL_WORKS, cubin

__all__ = ["Kernel", "kernel", "require_device"]

Stream = Any
"""A torch.cuda.Stream."""


def require_device(number: int | None = None) -> int:
    """The number of a CUDA device that can be used; the current one by default.

    Raises:
        PluginUnavailableError: torch, its CUDA build, the driver or the GPU is missing.
    """
    try:
        import torch
    except ImportError as error:
        raise PluginUnavailableError(
            "torch is not installed", hint="pip install 'prismllm-toolkit[cuda]'"
        ) from error
    if torch.version.cuda is None:
        raise PluginUnavailableError(
            "this torch is built without CUDA", hint=f"install a CUDA build of torch; {STILL_WORKS}"
        )
    if not torch.cuda.is_available():
        raise PluginUnavailableError(
            "no NVIDIA GPU, or no driver for it, is found",
            hint=f"see what nvidia-smi says, and `prismreplay doctor`; {STILL_WORKS}",
        )
    if number is None:
        return int(torch.cuda.current_device())
    if number >= torch.cuda.device_count():
        raise PluginUnavailableError(
            f"no CUDA device {number}; there are {torch.cuda.device_count()}",
            hint="name one of them, or see CUDA_VISIBLE_DEVICES",
        )
    return number


class Kernel:
    """One entry of a loaded module, on one device."""

    def __init__(self, device: int, handle: Any, name: str) -> None:
        self._device, self._handle, self._name = device, handle, name

    @property
    def address(self) -> int:
        """The driver's handle of it."""
        return int(self._handle.handle)

    def launch(
        self,
        grid: tuple[int, ...],
        block: int,
        *arguments: Any,
        stream: Stream = None,
    ) -> None:
        """Start it on `stream`, a torch.cuda.Stream; by default the current one.

        `arguments` are numpy scalars, and integers for addresses.

        Raises:
            PluginError: the driver refuses; an error of an earlier kernel also shows here.
        """
        import torch
        from cuda.core import LEGACY_DEFAULT_STREAM, Device, LaunchConfig, launch

        with torch.cuda.device(self._device):
            on = torch.cuda.current_stream() if stream is None else stream
            try:
                device = Device(self._device)
                device.set_current()
                # torch says 0 where it means the legacy stream, whose handle is another.
                foreign = _Stream(int(on.cuda_stream))
                launch(
                    device.create_stream(foreign) if foreign.handle else LEGACY_DEFAULT_STREAM,
                    LaunchConfig(grid=grid, block=block),
                    self._handle,
                    *arguments,
                )
            except Exception as error:
                raise PluginError(
                    f"kernel {self._name} cannot be launched: {error}",
                    where=f"grid {grid}, {block} threads, device {self._device}",
                    hint="an error of an earlier kernel shows here, too; CUDA_LAUNCH_BLOCKING=1",
                ) from error


def kernel(name: str, entry: str, device: int, **defines: str | int) -> Kernel:
    """Entry `entry` of `<name>.cu`, compiled for a device.

    Raises:
        PluginUnavailableError: cuda-python, the driver or the GPU is missing.
        PluginError: it does not compile, or cannot be loaded.
    """
    return _kernel(name, entry, require_device(device), tuple(sorted(defines.items())))


@functools.cache
def _kernel(
    name: str, entry: str, device: int, defines: tuple[tuple[str, str | int], ...]
) -> Kernel:
    import torch

    # torch makes the device's context; cuda.core uses the same.
    torch.cuda.init()
    major, minor = torch.cuda.get_device_capability(device)
    code = cubin(name, f"sm_{major}{minor}", dict(defines))
    from cuda.core import Device, ObjectCode

    try:
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()
            Device(device).set_current()
            handle = ObjectCode.from_cubin(code, name=name).get_kernel(entry)
    except Exception as error:
        raise PluginError(
            f"{name}.cu cannot be loaded: {error}",
            where=f"device {device}, sm_{major}{minor}",
            hint="is the driver older than CUDA's compiler? See `prismreplay doctor`",
        ) from error
    return Kernel(device, handle, f"{name}.{entry}")


class _Stream:
    """torch's stream by cuda-python's protocol, which not all versions of torch know."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle
