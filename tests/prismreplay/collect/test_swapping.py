from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from prismreplay.collect.swapping import Checkpoints, load_checkpoints
from prismreplay.errors import PluginUnavailableError, SwapError


class Process:
    """As cuda.core.checkpoint.Process; fails at what it is told to."""

    calls: list[str]
    fails: set[str]

    def __init__(self, pid):
        self.pid = pid

    def _do(self, name):
        self.calls.append(name)
        if name in self.fails:
            raise RuntimeError(f"CUDA_ERROR: {name}")

    def lock(self, timeout_ms=0):
        assert timeout_ms > 0, "a process that never stops would hang the run"
        self._do("lock")

    def checkpoint(self):
        self._do("checkpoint")

    def restore(self):
        self._do("restore")

    def unlock(self):
        self._do("unlock")

    @property
    def state(self):
        self._do("state")
        return "checkpointed"


@pytest.fixture
def process():
    return type("OneProcess", (Process,), {"calls": [], "fails": set()})


def test_out_and_in(process):
    moves = Checkpoints(process)
    moves.move_out(7)
    moves.move_in(7)
    assert process.calls == ["lock", "checkpoint", "restore", "unlock"]


@pytest.mark.parametrize(
    ("fails", "usable"),
    [({"lock"}, True), ({"checkpoint"}, True), ({"checkpoint", "unlock"}, False)],
)
def test_a_rank_that_cannot_leave_may_still_be_usable(process, fails, usable):
    process.fails |= fails
    with pytest.raises(SwapError, match="CUDA_ERROR") as caught:
        Checkpoints(process).move_out(7)
    assert caught.value.usable is usable


@pytest.mark.parametrize("fails", [{"restore"}, {"unlock"}, {"restore", "state"}])
def test_a_rank_that_cannot_come_back_is_lost(process, fails):
    process.fails |= fails
    with pytest.raises(SwapError, match="back to its GPU") as caught:
        Checkpoints(process).move_in(7)
    assert not caught.value.usable
    assert "unknown" in caught.value.where if "state" in fails else "checkpointed"


@pytest.fixture
def cuda(monkeypatch, process):
    """A cuda-python with a driver of 12.8 that works."""
    driver = SimpleNamespace(
        cuInit=lambda _: (0,), cuDriverGetVersion=lambda: (0, 12080), started=False
    )
    modules = {
        "cuda": ModuleType("cuda"),
        "cuda.bindings": SimpleNamespace(driver=driver),
        "cuda.bindings.driver": driver,
        "cuda.core": SimpleNamespace(checkpoint=SimpleNamespace(Process=process)),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return driver


@pytest.mark.usefixtures("cuda")
def test_loading(process):
    load_checkpoints().move_out(7)
    assert process.calls == ["lock", "checkpoint"]


def test_an_old_driver_is_told(cuda):
    cuda.cuDriverGetVersion = lambda: (0, 12040)
    with pytest.raises(PluginUnavailableError, match=r"12\.4") as caught:
        load_checkpoints()
    assert "570" in caught.value.hint


def test_a_driver_that_does_not_start_is_told(cuda):
    cuda.cuInit = lambda _: (100,)
    with pytest.raises(PluginUnavailableError, match="100"):
        load_checkpoints()


def test_without_cuda_python_it_says_what_still_works(monkeypatch):
    for name in ("cuda", "cuda.bindings", "cuda.core"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(PluginUnavailableError) as caught:
        load_checkpoints()
    assert "fit on the GPUs" in caught.value.hint


@pytest.mark.gpu
def test_a_process_moves_out_and_back_with_its_values():
    import subprocess

    program = (
        "import torch; x = torch.arange(1 << 26, device='cuda'); torch.cuda.synchronize();"
        "print('up', flush=True); input(); print(int(x[::1001].sum()), flush=True)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout.readline() == "up\n"
        moves = load_checkpoints()
        moves.move_out(child.pid)
        moves.move_in(child.pid)
        out, _ = child.communicate("\n", timeout=60)
        assert int(out) == sum(range(0, 1 << 26, 1001))
    finally:
        child.kill()
        child.wait()
