"""Jobs that level D runs on so many GPUs, what it runs on, and how commands are run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

MULTICAST_OFF = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
SIZES = {"0.3": (24, 16, 512), "1.3": (24, 32, 512), "3": (36, 40, 512), "tiny": (4, 4, 64)}
"""Billions of parameters -> layers, heads of 64, tokens a sequence."""
SPREAD_OUT = ("0.3", "tiny")
"""Sizes of which several jobs fit on a GPU."""


def gpus_here() -> int:
    """GPUs that programs see."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") is not None:
        return len(gpu_names())
    from prismreplay.collect.gpus import Nvml

    nvml = Nvml.load()
    return 0 if nvml is None else nvml.count()


def gpu_names() -> list[str]:
    """Their names in CUDA_VISIBLE_DEVICES."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is not None:
        return [token for token in shown.split(",") if token]
    return [str(number) for number in range(gpus_here())]


def layouts_of(ranks: int) -> dict[str, list[str]]:
    """Flags of examples/train_gpt.py by the layout's name."""
    found = {
        "ddp": [],
        "fsdp": ["--fsdp", str(ranks)],
        "tp": ["--tp", str(ranks)],
        "pp": ["--pp", str(ranks)],
    }
    if ranks >= 4 and ranks % 2 == 0:
        found["tp-pp"] = ["--tp", "2", "--pp", str(ranks // 2)]
    return found


def model_of(size: str, ranks: int) -> list[str]:
    """Flags of a model that all layouts of so many ranks can cut."""
    layers, heads, length = SIZES[size]
    heads = ranks * -(-heads // ranks)
    microbatches = max(4, ranks)
    width = heads * (64 if size != "tiny" else 16)
    return [
        *("--layers", str(max(layers, ranks)), "--hidden", str(width), "--heads", str(heads)),
        *("--length", str(length), "--batch-size", str(2 * microbatches)),
        *("--microbatches", str(microbatches)),
    ]


def sandbox_sizes(ranks: int, gpus: int) -> list[int]:
    """1, 2, 4 ... sandbox ranks, up to half of all; each needs a GPU."""
    most = max(1, min(ranks // 2, gpus))
    return [1 << power for power in range(most.bit_length())]


def bounded(words: Sequence[object], limit_s: float, variables: Mapping[str, str]) -> str:
    """Run a command; what it printed on stdout.

    Raises:
        RuntimeError: it failed, or was ended; with the end of what it printed.
    """
    child = subprocess.Popen(
        list(map(str, words)),
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    ended = ""
    try:
        out, err = child.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        ended = f"ended after {limit_s:.0f} s"
        os.killpg(child.pid, signal.SIGINT)
        try:
            out, err = child.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            out, err = child.communicate()
    except BaseException:
        os.killpg(child.pid, signal.SIGKILL)
        raise
    if child.returncode or ended:
        command = " ".join(map(str, words))
        ended = ended or f"exit code {child.returncode}"
        raise RuntimeError(f"{command}\n{out[-2000:]}\n{err[-6000:].strip()}\n{ended}")
    return out


def made_up(ranks: int) -> list[str]:
    """Lines of a CSV of transfers that nobody measured."""
    lines = ["kind,dtype,ranks,hosts,bytes,time_ns"]
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send")
    for kind in kinds:
        for members in range(2, ranks + 1 if kind != "send" else 3):
            for power in range(10, 31, 2):
                time_ns = 20_000 + (1 << power) // 200
                lines.append(f"{kind},float32,{members},1,{1 << power},{time_ns}")
    return lines


def machine() -> dict[str, str]:
    """What it runs on; starts CUDA in this process."""
    import torch

    cuda = torch.cuda
    gpus = [cuda.get_device_name(number) for number in range(cuda.device_count())]
    if gpus:
        torch.ones(1, device="cuda").item()
    nccl = str(cuda.nccl.version()) if gpus else "none"
    switched = " ".join(f"{name}={os.environ[name]}" for name in MULTICAST_OFF)
    return {
        "GPUs": f"{len(gpus)} {' / '.join(sorted(set(gpus)))}",
        "torch": f"{torch.__version__}, NCCL {nccl}, Python {sys.version.split()[0]}",
        "CPU cores": str(os.cpu_count()),
        "NVLink multicast": f"off, in truth and emulation: {switched}",
    }
