from __future__ import annotations

import os
import pickle
import sys

import pytest
import torch

from prismreplay.collect.virtual_gpus import VirtualGpus, show_gpus


@pytest.fixture
def shown():
    """Eight GPUs, all of which are the CPU here."""
    shown = VirtualGpus(8, "3", torch.device("cpu"))
    shown.install()
    yield shown
    shown.remove()


@pytest.mark.usefixtures("shown")
def test_there_are_as_many_gpus_as_on_the_cluster():
    assert torch.cuda.device_count() == 8
    assert torch.accelerator.device_count() == 8


@pytest.mark.usefixtures("shown")
def test_every_number_means_the_one_gpu():
    for find in ("torch.cuda._utils", "torch.cuda", "torch.cuda.memory", "torch.cuda.streams"):
        found = vars(sys.modules[find]).get("_get_device_index")
        if found is not None:
            assert found(5) == 0
            assert found(torch.device("cuda", 7)) == 0
            assert found("cuda:2") == 0
            assert found(-1) == -1
    assert torch.cuda._utils._get_device_index(torch.device("cpu"), allow_cpu=True) == -1
    from torch.nn.parallel import distributed

    assert distributed._get_device_index(6, True) == 0


@pytest.fixture
def shown_timed():
    """The same, without a function mode."""
    real = torch.device
    shown = VirtualGpus(8, "3", torch.device("cpu"), timed=True)
    shown.install()
    yield shown
    shown.remove()
    assert torch.device is real
    assert torch.zeros(1, device="cpu").to("cpu").device.type == "cpu"


@pytest.mark.usefixtures("shown_timed")
def test_without_a_function_mode_devices_are_the_one_gpu():
    device = torch.device("cuda", 5)
    assert isinstance(device, torch.device)
    assert pickle.loads(pickle.dumps(device)) == device
    assert torch.device("meta").type == "meta"
    assert torch.cuda.device_count() == 8
    assert not torch.overrides._get_current_function_mode_stack()


@pytest.mark.parametrize("how", ["shown", "shown_timed"])
def test_operators_compute_on_it(how, request):
    request.getfixturevalue(how)
    device = torch.device("cuda", 5)
    found = [
        torch.zeros(2, device=device),
        torch.ones(2, device="cuda:4"),
        torch.tensor([1.0], device="cuda:1"),
        torch.ones(2).to(device),
        torch.ones(2).to("cuda:6", torch.float64),
        torch.ones(2).to(3),
        torch.empty_like(torch.ones(2), device=device),
        torch.nn.Linear(2, 2, device=device).weight,
        torch.nn.Linear(2, 2).to(device).weight,
        torch.rand(2, generator=None, device=torch.device("cuda", 1)),
    ]
    assert {tensor.device.type for tensor in found} == {"cpu"}
    assert found[4].dtype is torch.float64


@pytest.mark.usefixtures("shown")
def test_what_is_no_device_stays():
    assert torch.ones(2).to(torch.int8).dtype is torch.int8
    assert torch.ones(2).to(torch.zeros(1, dtype=torch.bool)).dtype is torch.bool
    assert torch.full((2,), 7).tolist() == [7, 7]
    assert torch.ones(2, device="meta").is_meta
    assert torch.zeros(3).sum(0).item() == 0


@pytest.mark.usefixtures("shown")
def test_backward_and_checkpoints_work(tmp_path):
    device = torch.device("cuda", 5)
    layer = torch.nn.Linear(2, 2).to(device)
    out = torch.utils.checkpoint.checkpoint(layer, torch.ones(1, 2), use_reentrant=False)
    out.sum().backward()
    assert layer.weight.grad is not None
    torch.save(layer.state_dict(), tmp_path / "x.pt")
    assert torch.load(tmp_path / "x.pt", map_location="cuda:5")["weight"].device.type == "cpu"
    assert torch.load(tmp_path / "x.pt", map_location=device)["bias"].device.type == "cpu"
    assert torch.load(tmp_path / "x.pt")["bias"].device.type == "cpu"


@pytest.mark.usefixtures("shown")
def test_generators():
    generator = torch.Generator(device="cuda:5")
    assert generator.device.type == "cpu"
    assert isinstance(torch.default_generator, torch.Generator)
    assert isinstance(generator, torch.Generator)
    assert torch.Generator().manual_seed(3).initial_seed() == 3
    torch.randn(2, generator=generator, device="cuda:5")


@pytest.mark.skipif(
    torch.version.cuda is not None and not torch.cuda.is_available(),
    reason="torch is built for GPUs and there is none: its compiler asks the driver",
)
@pytest.mark.usefixtures("shown")
def test_compiled_code_is_on_it_too():
    double = torch.compile(lambda x: x + torch.ones(2, device="cuda:3"), backend="eager")
    assert double(torch.ones(2)).tolist() == [2, 2]


@pytest.mark.usefixtures("shown")
def test_a_default_device_by_number():
    with torch.device("cuda:4"):
        assert torch.zeros(1).device.type == "cpu"


def test_cuda_starts_on_the_real_gpu_whatever_the_program_sets(monkeypatch):
    seen = []

    def _cuda_init():
        seen.append(os.environ["CUDA_VISIBLE_DEVICES"])
        torch.cuda.default_generators = ("one",)

    monkeypatch.setattr(torch._C, "_cuda_init", _cuda_init, raising=False)
    monkeypatch.setattr(torch.cuda, "default_generators", ())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    shown = VirtualGpus(3, "GPU-aa", torch.device("cpu"))
    shown.install()
    torch._C._cuda_init()
    shown.remove()
    assert seen == ["GPU-aa"]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "5"
    assert torch.cuda.default_generators == ("one",) * 3
    assert torch._C._cuda_init is _cuda_init


def test_all_is_put_back():
    before = torch.cuda.device_count, torch.Generator, torch.load, torch.cuda._get_device_index
    shown = VirtualGpus(8, "0", torch.device("cpu"))
    shown.install()
    shown.remove()
    after = torch.cuda.device_count, torch.Generator, torch.load, torch.cuda._get_device_index
    assert after == before


def test_with_one_rank_a_host_nothing_is_replaced():
    before = torch.cuda.device_count
    show_gpus(1, "0")
    assert torch.cuda.device_count is before


PROGRAM = """
import os, torch
from prismreplay.collect.virtual_gpus import show_gpus
show_gpus(8, os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0])
os.environ["CUDA_VISIBLE_DEVICES"] = "5"
torch.manual_seed(3)
torch.cuda.set_device(5)
device = torch.device("cuda", 5)
assert torch.cuda.is_available() and torch.cuda.device_count() == 8
assert torch.zeros(2, device=device).device == torch.device("cuda", 0)
model = torch.nn.Linear(4, 4).to(device)
model(torch.ones(2, 4, device="cuda:7")).sum().backward()
with torch.cuda.device(6), torch.cuda.stream(torch.cuda.Stream(6)):
    torch.cuda.current_stream(3).synchronize()
torch.cuda.synchronize(4)
torch.cuda.manual_seed_all(5)
state = torch.cuda.get_rng_state_all()
torch.cuda.set_rng_state_all(state)
with torch.random.fork_rng(devices=[2, 3]):
    torch.rand(2, device=device)
assert torch.Generator(device="cuda:3").device.index == 0
assert torch.cuda.get_device_properties(5).total_memory == torch.cuda.mem_get_info(2)[1]
assert torch.cuda.memory_allocated(device) == torch.cuda.memory_allocated(0) > 0
assert torch.cuda.max_memory_allocated(1) > 0
assert torch.ones(2).cuda(2).is_cuda and torch.nn.Linear(2, 2).cuda(5).weight.is_cuda
torch.accelerator.set_device_index(5)
x = torch.randn(1 << 20).pin_memory().to(device, non_blocking=True)
half = torch.compile(lambda y: y.to(device) + torch.ones(4, device=device), backend="eager")
half(torch.ones(4, device=device))
print("fine")
"""


@pytest.mark.gpu
def test_on_a_gpu_numbers_of_a_whole_host_work():
    import subprocess

    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert done.stdout == "fine\n", done.stderr
