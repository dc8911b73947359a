from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from prismreplay import Check, Report, Status, doctor, examine
from prismreplay.run.holding import Lateness


def _report(*checks: tuple[Status, str]) -> Report:
    return Report(
        tuple(
            Check(f"thing {number}", status, "found", needed_for, "do this")
            for number, (status, needed_for) in enumerate(checks)
        )
    )


def test_a_missing_gpu_is_no_failure():
    report = _report((Status.OK, "cpu"), (Status.MISSING, "gpu"))
    assert report.ok
    assert not report.gpu_ok
    assert "thing 1" in report.verdict()


def test_something_missing_for_cpus_is_a_failure():
    report = _report((Status.MISSING, "cpu"), (Status.OK, "gpu"))
    assert not report.ok
    assert not report.gpu_ok
    assert "thing 0" in report.verdict()


def test_a_warning_is_no_failure():
    assert _report((Status.WARN, "cpu"), (Status.WARN, "gpu")).gpu_ok


def test_everything_that_is_not_ok_says_what_to_do():
    assert [c.name for c in examine().checks if c.status is not Status.OK and not c.hint] == []


def test_an_old_python_is_missing():
    assert doctor._check_python((3, 10, 4)).status is Status.MISSING
    assert doctor._check_python((3, 13, 0)).status is Status.OK


def test_a_run_needs_idle_cores():
    check = doctor._check_load(16, 1.5)
    assert (check.status, "13 sandbox ranks" in check.found) == (Status.OK, True)
    assert doctor._check_load(2, 0.0).found.endswith("1 sandbox rank of a run")
    assert doctor._check_load(2, 1.2).status is Status.WARN
    assert doctor._check_load(16, 40.0).status is Status.WARN


def test_late_holds_are_said():
    good = Lateness(200, 1_000, 9_000, 60_000, 0, 0)
    assert doctor._check_holds(good).status is Status.OK
    assert "9 us (99 %)" in doctor._check_holds(good).found
    assert doctor._check_holds(replace(good, p99_ns=400_000)).status is Status.WARN
    missed = doctor._check_holds(replace(good, late_calls=30, called_late_ns=10**7))
    assert missed.status is Status.WARN
    assert "30 of 200 missed" in missed.found


def test_little_or_no_shared_memory_warns(tmp_path, monkeypatch):
    assert doctor._check_shared_memory(tmp_path / "absent").status is Status.WARN
    usage = SimpleNamespace(total=64 << 20, used=0, free=64 << 20)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: usage)
    check = doctor._check_shared_memory(tmp_path)
    assert check.status is Status.WARN
    assert "--shm-size" in check.hint


def test_driver_version_is_read_from_the_kernel_module(tmp_path):
    path = tmp_path / "version"
    path.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release\n")
    assert doctor._check_driver(path).found == "580.65.06"
    assert doctor._check_driver(tmp_path / "absent").status is Status.MISSING


@pytest.mark.parametrize(
    ("driver", "core", "status", "found"),
    [
        (None, "1.2.0", Status.WARN, "no NVIDIA driver"),
        ("550.90.07", "1.2.0", Status.WARN, "driver 550.90.07, cuda-core 1.2.0"),
        ("580.65.06", None, Status.WARN, "driver 580.65.06, cuda-core not installed"),
        ("580.65.06", "0.7.0", Status.WARN, "driver 580.65.06, cuda-core 0.7.0"),
        ("580.65.06", "1.2.0", Status.OK, "driver 580.65.06, cuda-core 1.2.0"),
    ],
)
def test_moving_ranks_needs_a_driver_and_cuda_python(tmp_path, driver, core, status, found):
    path = tmp_path / "version"
    if driver is not None:
        path.write_text(f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {driver}  Rel")
    check = doctor._check_moves(path, core)
    assert (check.status, check.found) == (status, found)
    assert check.needed_for == "gpu"
    assert (check.hint is None) == (status is Status.OK)


@pytest.mark.parametrize(
    ("core", "bindings", "status"),
    [
        ("1.2.0", "13.3.0", Status.OK),
        ("0.7.0", "13.3.0", Status.WARN),
        (None, "13.3.0", Status.WARN),
        ("1.2.0", None, Status.WARN),
    ],
)
def test_timed_runs_on_gpus_need_cuda_python(core, bindings, status):
    check = doctor._check_timed_runs(core, bindings)
    assert (check.status, check.needed_for) == (status, "gpu")
    assert (check.hint is None) == (status is Status.OK)


def test_devices_of_a_cuda_build():
    cuda = SimpleNamespace(
        device_count=lambda: 2,
        get_device_properties=lambda _: SimpleNamespace(name="GPU", total_memory=80 << 30),
    )
    torch = SimpleNamespace(version=SimpleNamespace(cuda="13.0"), cuda=cuda)
    check = doctor._check_devices(torch)
    assert (check.status, check.found) == (Status.OK, "2: GPU 80 GiB, GPU 80 GiB")
    torch.cuda.device_count = lambda: 0
    assert doctor._check_devices(torch).status is Status.MISSING


def test_the_command_prints_json_and_its_exit_code_follows_ok(run_command):
    done = run_command("prismreplay", "doctor", "--json")
    answer = json.loads(done.stdout)
    assert done.returncode == (0 if answer["ok"] else 1)
    assert {check["status"] for check in answer["checks"]} <= {"ok", "warn", "missing"}
    assert run_command("prismreplay", "doctor", cwd=Path("/")).stdout.startswith("What this")
