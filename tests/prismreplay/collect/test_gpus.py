from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from prismreplay.collect.gpu_room import Room, find_room
from prismreplay.collect.gpus import Gpu, Nvml, find_gpus, require_cuda_asleep
from prismreplay.errors import SwapError

GIB = 1 << 30


class Library:
    """libnvidia-ml of a machine with three GPUs, as ctypes calls it."""

    uuids = (b"GPU-aa11", b"GPU-bb22", b"GPU-cc33")

    def __init__(self, processes=()) -> None:
        self._processes = processes

    def nvmlInit_v2(self):  # noqa: N802
        return 0

    def nvmlDeviceGetCount_v2(self, count):  # noqa: N802
        count._obj.value = len(self.uuids)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle):  # noqa: N802
        if index >= len(self.uuids):
            return 6
        handle._obj.value = index + 1
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid, handle):  # noqa: N802
        if uuid not in self.uuids:
            return 6
        handle._obj.value = self.uuids.index(uuid) + 1
        return 0

    def nvmlDeviceGetUUID(self, handle, name, length):  # noqa: N802
        assert length >= 80
        name.value = self.uuids[handle.value - 1]
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle, memory):  # noqa: N802
        found = memory._obj
        found.total, found.used = 100 * GIB, handle.value * GIB
        return 0

    def nvmlDeviceGetComputeRunningProcesses_v3(self, _handle, count, found):  # noqa: N802
        room = count._obj.value
        count._obj.value = len(self._processes)
        if room < len(self._processes):
            return 7
        for place, (pid, used) in enumerate(self._processes):
            found[place].pid, found[place].used = pid, used
        return 0


@pytest.fixture
def nvml():
    return Nvml(Library())


@pytest.mark.parametrize(
    ("visible", "tokens"),
    [
        (None, ["0", "1", "2"]),
        ("2,0", ["2", "0"]),
        ("", []),
        ("-1", []),
        ("0,9,1", ["0"]),
        ("1,1", []),
        ("GPU-bb22, 0", ["GPU-bb22", "0"]),
        ("GPU-cc", ["GPU-cc"]),
        ("GPU-none", []),
    ],
)
def test_visible_gpus_are_those_that_cuda_shows(nvml, visible, tokens):
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    found = find_gpus(nvml, environment)
    assert [gpu.token for gpu in found] == tokens


def test_memory_of_a_gpu(nvml):
    assert find_gpus(nvml, {"CUDA_VISIBLE_DEVICES": "GPU-bb"}) == (
        Gpu("GPU-bb", 100 * GIB, 2 * GIB),
    )
    assert find_gpus(None, {}) == ()


def test_processes_however_many_and_only_with_known_sizes():
    many = [(pid, pid * 10) for pid in range(1, 200)] + [(500, (1 << 64) - 1)]
    found = Nvml(Library(many)).processes("0")
    assert found == {pid: pid * 10 for pid in range(1, 200)}
    assert Nvml(Library()).processes("7") == {}


def test_ranks_take_gpus_in_turn_and_most_of_their_memory():
    room = Room([Gpu("0", 100 * GIB, 20 * GIB), Gpu("1", 100 * GIB)])
    assert [room.home(rank) for rank in range(5)] == [0, 1, 0, 1, 0]
    assert room.budget(0) == int(80 * GIB * 0.85)
    assert Room(room.gpus, 90 * GIB).budget(0) == 80 * GIB
    assert Room(room.gpus, 9 * GIB).budget(0) == 9 * GIB


def test_without_a_gpu_there_is_no_room_to_share(monkeypatch):
    monkeypatch.setattr("prismreplay.collect.gpu_room.visible_gpus", tuple)
    assert find_room(4, None, None) is None


def test_the_host_gives_most_of_what_it_has(monkeypatch):
    gpus = (Gpu("0", GIB), Gpu("1", GIB))
    monkeypatch.setattr("prismreplay.collect.gpu_room.visible_gpus", lambda: gpus)
    room = find_room(1, None, None)
    assert room.gpus == gpus[:1]
    assert room.host_bytes > 0
    assert find_room(2, None, 5).host_bytes == 5


def test_a_process_that_only_imported_torch_may_be_forked():
    code = (
        "from prismreplay.collect.pool import preload\n"
        "from prismreplay.collect.gpus import require_cuda_asleep\n"
        "import torch\n"
        "preload(); torch.cuda.is_available(); require_cuda_asleep('all')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_process_in_which_cuda_runs_must_not_be_forked(monkeypatch):
    class Driver:
        def __init__(self, name, **_):
            assert name == "libcuda.so.1"

        def cuDeviceGetCount(self, _count):  # noqa: N802
            return 0

    monkeypatch.setattr(ctypes, "CDLL", Driver)
    with pytest.raises(SwapError, match="forked") as caught:
        require_cuda_asleep("breakfast")
    assert caught.value.where == "after breakfast"


@pytest.mark.gpu
def test_on_this_machine():
    found = find_gpus(Nvml.load())
    assert found
    assert all(gpu.total_bytes > GIB for gpu in found)
