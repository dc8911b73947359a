"""Moving the whole GPU state of a process away from its GPU, and back.

The driver does it (`cuCheckpointProcess*`, called through `cuda.core.checkpoint`): it lets the
process's running kernels end, blocks its calls, copies its memory into the host memory of that very
process, and frees the GPU. Nothing in the process notices; addresses stay. It is the only way that
asks nothing of the program: tensors that only C++ knows (saved for backward, reducers' buckets,
libraries' workspaces) are moved, too. It does not move memory that processes share (CUDA IPC,
NCCL's), of which ranks that are collected have none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from prismreplay.errors import PluginUnavailableError, SwapError

__all__ = ["Checkpoints", "Swapper", "load_checkpoints"]

LOCK_TIMEOUT_MS = 10_000
"""How long a process's running kernels may take to end."""
OLDEST_DRIVER = (12, 8)
_WITHOUT = "without it, collect only programs all of whose ranks fit on the GPUs together"


class Swapper(Protocol):
    """Moves the GPU memory of processes. Calls take seconds; made from one thread a GPU."""

    def move_out(self, pid: int) -> None:
        """To the host's memory.

        Raises:
            SwapError: it stayed where it is (`usable`), or the process is lost.
        """

    def move_in(self, pid: int) -> None:
        """Back to its GPU.

        Raises:
            SwapError: it could not be brought back.
        """


class Checkpoints:
    """Moves processes by the driver's checkpoints.

    Args:
        process: `cuda.core.checkpoint.Process`.
    """

    def __init__(self, process: Callable[[int], Any]) -> None:
        self._process = process

    def move_out(self, pid: int) -> None:
        """See `Swapper`."""
        try:
            process = self._process(pid)
            process.lock(timeout_ms=LOCK_TIMEOUT_MS)
        except Exception as error:
            raise SwapError(
                f"the driver cannot stop the GPU work of process {pid}: {error}",
                hint="is a kernel still running after 10 s? See `prismreplay doctor`",
                usable=True,
            ) from error
        try:
            process.checkpoint()
        except Exception as error:
            usable = _unlock(process)
            raise SwapError(
                f"the driver cannot move process {pid} to host memory: {error}",
                hint="memory that processes share (CUDA IPC, NCCL, managed memory) cannot be moved; "
                f"the host needs as much free memory as the process has on the GPU; {_WITHOUT}",
                usable=usable,
            ) from error

    def move_in(self, pid: int) -> None:
        """See `Swapper`."""
        try:
            process = self._process(pid)
            process.restore()
            process.unlock()
        except Exception as error:
            raise SwapError(
                f"the driver cannot bring process {pid} back to its GPU: {error}",
                where=f"it is {_state(pid, self._process)}",
                hint="did another program take the GPU's memory meanwhile? See nvidia-smi",
            ) from error


def _unlock(process: Any) -> bool:
    """Whether the process can go on."""
    try:
        process.unlock()
    except Exception:  # noqa: BLE001  then it is lost; what comes first is what has to be told
        return False
    return True


def _state(pid: int, process: Callable[[int], Any]) -> str:
    try:
        return str(process(pid).state)
    except Exception as error:  # noqa: BLE001  only to say more
        return f"in an unknown state ({error})"


def load_checkpoints() -> Checkpoints:
    """The driver's checkpoints. Starts CUDA in this process: fork before.

    Raises:
        PluginUnavailableError: cuda-python or the driver is missing or too old.
    """
    try:
        from cuda.bindings import driver
        from cuda.core import checkpoint
    except ImportError as error:
        raise PluginUnavailableError(
            f"cuda-python cannot move ranks off the GPU: {error}",
            hint=f"pip install 'cuda-core>=1.0' cuda-bindings; {_WITHOUT}",
        ) from error
    _check_driver(driver)
    return Checkpoints(checkpoint.Process)


def _check_driver(driver: Any) -> None:
    """Start CUDA, which restoring needs, and see whether it is new enough."""
    (code,) = driver.cuInit(0)
    if int(code) != 0:
        raise PluginUnavailableError(
            f"CUDA does not start: {code}", hint="see what nvidia-smi says"
        )
    code, version = driver.cuDriverGetVersion()
    found = (version // 1000, version % 1000 // 10)
    if int(code) != 0 or found < OLDEST_DRIVER:
        raise PluginUnavailableError(
            f"the driver knows CUDA {found[0]}.{found[1]}; moving ranks off the GPU needs "
            f"{OLDEST_DRIVER[0]}.{OLDEST_DRIVER[1]}",
            hint=f"install driver 570 or newer; {_WITHOUT}",
        )
