"""What this machine can do: one list of checks, each with what was found and what to do.

Torch and cuda-python are looked at only where they are installed, and only inside the
functions here. A check never raises: a broken installation is a finding.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib import metadata, util
from pathlib import Path
from typing import Any

from prismcalib.memory import available_bytes
from prismreplay.run.holding import Holder, Lateness

__all__ = ["Check", "Report", "Status", "examine"]

MIN_PYTHON = (3, 11)
MIN_TORCH = (2, 11)
GIB = 1 << 30
# Every rank is a process that loads torch (about 0.4 GiB) and its share of the model.
MIN_MEMORY_BYTES = 2 * GIB
# A run holds its ranks to points in time. On an idle core, 99 of 100 holds are met within a few
# microseconds; where they are not, step times of a run carry that error.
HOLDS = 200
HOLD_NS = 1_000_000
MOST_LATE_NS = 100_000
# NCCL and torch's data loaders allocate their buffers in shared memory; containers often
# start with 64 MiB of it.
MIN_SHM_BYTES = GIB
# The first whose checkpoints of processes `collect` can use.
MIN_MOVING_DRIVER = 570


class Status(StrEnum):
    """How a check came out."""

    OK = "ok"
    WARN = "warn"
    MISSING = "missing"


@dataclass(frozen=True)
class Check:
    """One thing looked at.

    Attributes:
        name: what it is called.
        status: how it came out.
        found: what is there, in words.
        needed_for: "cpu" when ranks on CPUs cannot run without it, "gpu" when only ranks on GPUs
            need it.
        hint: the next action; None when there is nothing to do.
    """

    name: str
    status: Status
    found: str
    needed_for: str
    hint: str | None = None


@dataclass(frozen=True)
class Report:
    """All checks of one machine, in the order they were made."""

    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """True if ranks can run on this machine's CPUs."""
        return not self._missing("cpu")

    @property
    def gpu_ok(self) -> bool:
        """True if ranks can also run on this machine's GPUs."""
        return self.ok and not self._missing("gpu")

    def _missing(self, purpose: str) -> list[str]:
        return [
            check.name
            for check in self.checks
            if check.status is Status.MISSING and check.needed_for == purpose
        ]

    def verdict(self) -> str:
        """One line for a person."""
        if not self.ok:
            return f"Ranks cannot run here yet. Missing: {', '.join(self._missing('cpu'))}."
        if not self.gpu_ok:
            return f"Ranks can run on CPUs. For GPUs missing: {', '.join(self._missing('gpu'))}."
        return "Ranks can run on CPUs and GPUs."

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON-ready data: `ok`, `gpu_ok` and the list `checks`."""
        return {
            "ok": self.ok,
            "gpu_ok": self.gpu_ok,
            "checks": [asdict(check) for check in self.checks],
        }


def examine() -> Report:
    """Look at this machine; takes a few seconds where torch is installed."""
    torch, torch_check = _check_torch()
    return Report(
        (
            _check_python(sys.version_info[:3]),
            _check_platform(platform.system(), platform.machine()),
            _check_cores(_usable_cores()),
            _check_load(_usable_cores(), os.getloadavg()[0]),
            _check_holds(_measure_holds()),
            _check_memory(available_bytes()),
            _check_shared_memory(Path("/dev/shm")),  # noqa: S108  looked at, not written
            torch_check,
            _check_backend(torch, "gloo", "cpu"),
            _check_backend(torch, "nccl", "gpu"),
            _check_driver(Path("/proc/driver/nvidia/version")),
            _check_devices(torch),
            _check_cuda_python(),
            _check_moves(Path("/proc/driver/nvidia/version"), _version_of("cuda-core")),
            _check_timed_runs(_version_of("cuda-core"), _version_of("cuda-bindings")),
        )
    )


def _check_python(version: tuple[int, ...]) -> Check:
    found = ".".join(map(str, version))
    if version[:2] >= MIN_PYTHON:
        return Check("Python", Status.OK, found, "cpu")
    return Check("Python", Status.MISSING, found, "cpu", "install Python 3.11 or newer")


def _check_platform(system: str, machine: str) -> Check:
    found = f"{system} {machine}"
    if system == "Linux":
        return Check("platform", Status.OK, found, "cpu")
    return Check(
        "platform", Status.WARN, found, "cpu", "replay is tested on Linux; analysing traces is not"
    )


def _usable_cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return os.cpu_count() or 1


def _check_cores(cores: int) -> Check:
    if cores >= 2:
        return Check("CPU cores", Status.OK, str(cores), "cpu")
    return Check("CPU cores", Status.WARN, str(cores), "cpu", "ranks will take turns on one core")


def _check_load(cores: int, load: float) -> Check:
    """A run needs a core for each sandbox rank, and one for the hub that plays the others."""
    idle = max(0, int(cores - load))
    found = f"load {load:.1f} on {cores} cores"
    if idle >= 2:
        ranks = f"{found}: room for {idle - 1} sandbox {'rank' if idle == 2 else 'ranks'} of a run"
        return Check("idle cores", Status.OK, ranks, "cpu")
    hint = "times of a run are the job's only where each sandbox rank and the hub have a core"
    return Check("idle cores", Status.WARN, found, "cpu", hint)


def _measure_holds() -> Lateness:
    holder = Holder()
    begin = time.monotonic_ns()
    for number in range(1, HOLDS + 1):
        holder.hold_until(begin + number * HOLD_NS)
    return holder.report()


def _check_holds(measured: Lateness) -> Check:
    """How well a run's ranks can be held to points in time on this machine, now."""
    median, p99, worst = (
        ns / 1000 for ns in (measured.median_ns, measured.p99_ns, measured.worst_ns)
    )
    found = f"late by {median:.0f} us (median), {p99:.0f} us (99 %), {worst:.0f} us at most"
    if measured.called_late_ns:
        # A deadline had passed before the hold of it began.
        found += f"; {measured.late_calls} of {HOLDS} missed"
    if measured.p99_ns <= MOST_LATE_NS and measured.late_calls <= HOLDS // 100:
        return Check("timed holds", Status.OK, found, "cpu")
    hint = "leave cores idle: step times of a run carry this error in each communication"
    return Check("timed holds", Status.WARN, found, "cpu", hint)


def _check_memory(free_bytes: int | None) -> Check:
    if free_bytes is None:
        return Check("memory", Status.WARN, "unknown", "cpu", "check by hand that 2 GiB are free")
    found = f"{free_bytes / GIB:.1f} GiB free"
    if free_bytes >= MIN_MEMORY_BYTES:
        return Check("memory", Status.OK, found, "cpu")
    return Check("memory", Status.WARN, found, "cpu", "free some: each rank needs about 0.5 GiB")


def _check_shared_memory(path: Path) -> Check:
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return Check(
            "shared memory", Status.WARN, f"no {path}", "gpu", "mount a tmpfs there for NCCL"
        )
    found = f"{usage.total / GIB:.1f} GiB, {usage.free / GIB:.1f} GiB free"
    if usage.free >= MIN_SHM_BYTES:
        return Check("shared memory", Status.OK, found, "gpu")
    return Check(
        "shared memory", Status.WARN, found, "gpu", "start the container with --shm-size=1g or more"
    )


def _check_torch() -> tuple[Any | None, Check]:
    """The imported torch module (None if unusable) and what to say about it."""
    install = "pip install 'prismllm-toolkit[replay]'"
    if util.find_spec("torch") is None:
        return None, Check("torch", Status.MISSING, "not installed", "cpu", install)
    try:
        import torch
    except Exception as error:  # noqa: BLE001  a broken wheel fails in many ways; all are findings
        found = f"does not import: {error}"
        return None, Check("torch", Status.MISSING, found, "cpu", f"reinstall it: {install}")
    version = str(torch.__version__)
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers < MIN_TORCH:
        wanted = ".".join(map(str, MIN_TORCH))
        return None, Check("torch", Status.MISSING, version, "cpu", f"needs {wanted}: {install}")
    return torch, Check("torch", Status.OK, version, "cpu")


def _check_backend(torch: Any | None, name: str, needed_for: str) -> Check:
    """Is torch.distributed built with backend `name`?"""
    label = {"gloo": "gloo", "nccl": "NCCL"}[name]
    if torch is None:
        return Check(label, Status.MISSING, "needs torch", needed_for, "install torch first")
    distributed = torch.distributed
    available: Callable[[], bool] = getattr(distributed, f"is_{name}_available", lambda: False)
    if not (distributed.is_available() and available()):
        hint = f"install a build of torch that has {label}"
        return Check(label, Status.MISSING, "not in this torch", needed_for, hint)
    found = "available"
    if name == "nccl":
        found = ".".join(map(str, torch.cuda.nccl.version()))
    return Check(label, Status.OK, found, needed_for)


def _check_driver(path: Path) -> Check:
    version = _driver_version(path)
    if version is None:
        hint = "install the NVIDIA driver, or start the container with --gpus all"
        return Check("NVIDIA driver", Status.MISSING, "not loaded", "gpu", hint)
    return Check("NVIDIA driver", Status.OK, version or "loaded", "gpu")


def _driver_version(path: Path) -> str | None:
    """Version of the loaded driver; empty if it does not say, None if there is none."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The first dotted number of the first line is the version, in both kernel-module flavours.
    match = re.search(r"\b\d+\.\d+(?:\.\d+)?\b", text)
    return match[0] if match else ""


def _check_timed_runs(cuda_core: str | None, bindings: str | None) -> Check:
    """Can streams of a GPU be held until communications end in the virtual world?"""
    label = "timed runs on GPUs"
    found = f"cuda-core {cuda_core or 'not installed'}, cuda-bindings {bindings or 'not installed'}"
    if cuda_core is None or bindings is None or cuda_core.startswith("0."):
        hint = "pip install 'prismllm-toolkit[cuda]'; collect, slice and run --early do without on GPUs"
        return Check(label, Status.WARN, found, "gpu", hint)
    return Check(label, Status.OK, found, "gpu")


def _check_moves(driver: Path, cuda_core: str | None) -> Check:
    """Can ranks that do not fit on a GPU together be moved off it in turn?"""
    label, version = "moving ranks", _driver_version(driver)
    if not version:
        hint = "with a GPU, collect needs it when ranks do not fit together"
        return Check(label, Status.WARN, "no NVIDIA driver", "gpu", hint)
    found = f"driver {version}, cuda-core {cuda_core or 'not installed'}"
    if int(version.partition(".")[0]) < MIN_MOVING_DRIVER:
        hint = f"install driver {MIN_MOVING_DRIVER} or newer, to collect ranks that do not fit"
        return Check(label, Status.WARN, found, "gpu", hint)
    if cuda_core is None or cuda_core.startswith("0."):
        hint = "pip install 'cuda-core>=1.0' cuda-bindings, to collect ranks that do not fit"
        return Check(label, Status.WARN, found, "gpu", hint)
    return Check(label, Status.OK, found, "gpu")


def _version_of(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _check_devices(torch: Any | None) -> Check:
    if torch is None:
        return Check("CUDA devices", Status.MISSING, "needs torch", "gpu", "install torch first")
    if torch.version.cuda is None:
        hint = "install a CUDA build of torch (the one here is for CPUs)"
        return Check("CUDA devices", Status.MISSING, "torch without CUDA", "gpu", hint)
    try:
        devices = [
            torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())
        ]
    except RuntimeError as error:
        found = str(error).partition("\n")[0]
        return Check("CUDA devices", Status.MISSING, found, "gpu", "check driver and torch build")
    if not devices:
        hint = "none is visible: check nvidia-smi and CUDA_VISIBLE_DEVICES"
        return Check("CUDA devices", Status.MISSING, "0", "gpu", hint)
    names = ", ".join(f"{device.name} {device.total_memory / GIB:.0f} GiB" for device in devices)
    return Check("CUDA devices", Status.OK, f"{len(devices)}: {names}", "gpu")


def _check_cuda_python() -> Check:
    version = _version_of("cuda-bindings")
    if version is None:
        hint = "pip install 'prismllm-toolkit[cuda]', only for the CUDA plugin"
        return Check("cuda-python", Status.WARN, "not installed", "gpu", hint)
    return Check("cuda-python", Status.OK, version, "gpu")
