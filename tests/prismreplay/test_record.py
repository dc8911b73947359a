"""`prismreplay record`: a true run over gloo becomes a trace, also when it goes wrong."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib import util
from pathlib import Path
from textwrap import dedent

import pytest

import prismcalib
import prismtrace as pt

pytestmark = pytest.mark.skipif(
    util.find_spec("torch") is None, reason="needs torch: pip install 'prismllm-toolkit[replay]'"
)

TRAINING = """
import os
import sys
import time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

torch.manual_seed(0)
dist.init_process_group("gloo")
rank = dist.get_rank()
layers = [torch.nn.Linear(128, 128) for _ in range(4)]
model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    model(torch.randn(64, 128)).square().mean().backward()
    # FAULT
    optimizer.step()
    optimizer.zero_grad()
neighbour = 1 - rank
if rank == 0:
    dist.send(torch.ones(3), 1)
else:
    received = torch.zeros(3)
    dist.recv(received)
    dist.irecv(received, 0, tag=3).wait()
if rank == 0:
    dist.isend(torch.ones(3), 1, tag=3).wait()
print(f"rank {rank} is done\\n", end="")  # one write: another rank's may come between two
dist.destroy_process_group()
"""


@pytest.fixture
def write_program(tmp_path):
    def write(fault="", text=TRAINING):
        path = tmp_path / "program.py"
        path.write_text(dedent(text).replace("# FAULT", fault))
        return path

    return write


def test_a_run_is_recorded_and_explains_itself(tmp_path, write_program, run_command):
    done = run_command(
        "prismreplay", "record", "--nproc-per-node", 2, "-o", "run.parquet", "--json",
        "--", write_program(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "rank 0 is done" in done.stderr
    assert "rank 1 is done" in (tmp_path / "run.logs" / "rank-0001.log").read_text()
    assert not (tmp_path / "run.spools").exists()
    report = json.loads(done.stdout)
    assert (report["ranks"], report["steps"]) == ([0, 1], [0, 1, 2, 3])
    assert report["log_dir"] == "run.logs"
    trace = pt.open(tmp_path / "run.parquet")
    # gloo runs two collectives of a group at a time: they may overlap.
    assert {each.rule for each in pt.validate(trace)} <= {"overlap"}
    cores = len(os.sched_getaffinity(0))
    shared = {"ranks": 2, "cores": cores} if cores < 2 else None
    assert trace.header.extra.get("shared_cores") == shared
    nodes = trace.collect()
    assert nodes.height == report["nodes"]
    assert nodes["start_ns"].null_count() == 0
    assert set(nodes["phase"].drop_nulls()) == {"other", "forward", "backward", "optimizer"}
    reductions = nodes.filter(kind="all_reduce", rank=0, step=2)
    assert len(reductions) > 1, "one for each bucket"
    whole = nodes.filter(kind="send", rank=0)["index"][0]
    following = nodes.filter(rank=0, index=whole + 1)
    assert following["deps"].to_list() == [[2, 1]], "sending blocks: there is nothing beside it"
    messages = nodes.filter(kind="recv").select("peer", "seq", "bytes").rows()
    assert messages == [(0, 0, 12), (0, 1, 12)]
    merged = prismcalib.merge(trace).report
    assert abs(merged.difference_ns) <= merged.recorded_ns // 50


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are named in /proc")
@pytest.mark.parametrize("destroys", [True, False])
def test_gloo_s_threads_end_before_the_interpreter(write_program, run_command, destroys):
    # One that drops its last operation later wants the interpreter's lock: the process aborts.
    # DistributedDataParallel holds its group until then.
    last = """
    import atexit, os
    def show():
        tasks = os.listdir("/proc/self/task")
        print([open(f"/proc/self/task/{task}/comm").read() for task in tasks])
    atexit.register(show)
    """
    text = dedent(last) + (
        TRAINING if destroys else TRAINING.replace("dist.destroy_process_group()", "")
    )
    done = run_command(
        "prismreplay", "record", "--nproc-per-node", 2, "--", write_program(text=text)
    )
    assert done.returncode == 0, done.stderr
    assert "logs:                      recorded.logs" in done.stdout
    assert "python" in done.stdout
    assert "gloo" not in done.stdout


def test_a_rank_that_leaves_by_os_exit_is_recorded_whole(write_program, run_command):
    # It runs no exit functions; its data loader's workers are forked, and are not the rank.
    program = write_program(text=TRAINING)
    loader = """
    from torch.utils.data import DataLoader
    rows = [row for row in DataLoader(torch.arange(4.0), num_workers=1)]
    assert len(rows) == 4
    """
    begin = "for step in range(4):"
    text = program.read_text().replace(begin, dedent(loader) + begin)
    program.write_text(text.replace("dist.destroy_process_group()", "os._exit(0)"))
    done = run_command("prismreplay", "record", "--nproc-per-node", 2, "--json", "--", program)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["ranks"], report["steps"]) == ([0, 1], [0, 1, 2, 3])
    assert report["policies"].get("cut-rank", 0) == 0


def test_any_launcher_will_do(tmp_path, write_program, run_command):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = run_command("prismreplay", "record", "--", *launcher, write_program())
    assert done.returncode == 0, done.stderr
    assert "rank 1 is done" in done.stdout
    assert pt.open(tmp_path / "recorded.parquet").header.steps == (0, 1, 2, 3)


def test_hosts_record_apart_and_are_put_together(tmp_path, write_program, run_command):
    done = run_command(
        "prismreplay", "record", "--nproc-per-node", 2, "--spools", "host-a", "--", write_program()
    )
    assert done.returncode == 0, done.stderr
    assert "--assemble host-a" in done.stdout
    again = run_command("prismreplay", "record", "--spools", "host-a", "--", write_program())
    assert again.returncode == 1
    assert "spools of another run" in again.stderr
    made = run_command("prismreplay", "record", "--assemble", "host-a", "-o", "run.parquet")
    assert made.returncode == 0, made.stderr
    broken = pt.validate(pt.open(tmp_path / "run.parquet"))
    assert {each.rule for each in broken} <= {"overlap"}


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("if rank == 1 and step == 2: raise ValueError('no such layer')", "no such layer"),
        ("if rank == 1 and step == 2: os._exit(3)", "rank 1 ended with exit code 3"),
        ("if rank == 1 and step == 2: os.kill(os.getpid(), 9)", "rank 1 was killed by SIGKILL"),
    ],
)
def test_a_rank_that_fails_leaves_what_was_recorded(
    tmp_path, write_program, run_command, fault, told
):
    # As a real step would, this one lasts long enough for what is recorded to be written.
    program = write_program(f"time.sleep(0.7)\n    {fault}")
    done = run_command(
        "prismreplay", "record", "--nproc-per-node", 2, "-o", "run.parquet", "--", program
    )
    assert done.returncode == 1
    assert told in done.stderr
    assert not (tmp_path / "run.parquet").exists()
    command = next(line for line in done.stderr.splitlines() if "--assemble" in line)
    assert "`prismreplay collect`" not in command  # it was no communication that failed
    words = command.rpartition("prismreplay ")[2].split()
    made = run_command("prismreplay", *words)
    assert made.returncode == 0, made.stderr
    assert "cut off" in made.stderr
    assert "ranks that are behind are those that the others wait for" in made.stderr
    if "os.kill" in fault:
        killed = r"but of ranks? (0-)?1, killed, the last half second may be missing"
        assert re.search(killed, made.stderr)
    trace = pt.open(tmp_path / "run.parquet")
    assert trace.header.steps in {(0, 1), (0,)}
    assert {each.rule for each in pt.validate(trace)} <= {"overlap"}


def test_who_aborts_for_what_another_sent_is_not_blamed(tmp_path, run_command):
    program = tmp_path / "program.py"
    program.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.all_reduce(torch.ones(3000 if dist.get_rank() == 2 else 1000))\n"
    )
    done = run_command("prismreplay", "record", "--nproc-per-node", 3, "--", program)
    assert done.returncode == 1
    said = done.stderr[done.stderr.index("error: ") :]
    assert "SIGABRT: it got more data than it expected, so another rank may be the one at" in said
    assert "`prismreplay collect`" in said


def test_who_lost_another_rank_is_not_blamed_alone(tmp_path, run_command):
    program = tmp_path / "program.py"
    program.write_text(
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.barrier()\n"
        "if dist.get_rank() == 1: os._exit(0)\n"
        "dist.all_reduce(torch.ones(8))\n"
    )
    done = run_command("prismreplay", "record", "--nproc-per-node", 2, "--", program)
    assert done.returncode == 1
    assert "rank 0 ended with exit code 1: another rank has left, and may be" in done.stderr


def test_what_cannot_be_recorded(write_program, run_command):
    alone = write_program(text="print('nobody to talk to')")
    done = run_command("prismreplay", "record", "--", alone)
    assert done.returncode == 1
    assert "made no process group" in done.stderr
    done = run_command("prismreplay", "record", "--", "no-such-launcher", alone)
    assert done.returncode == 1
    assert "cannot be started" in done.stderr
    done = run_command("prismreplay", "record", "--nproc-per-node", 2, "--", "no-such-script.py")
    assert done.returncode == 1
    assert "the program is not there" in done.stderr
    assert run_command("prismreplay", "record").returncode == 2
    done = run_command("prismreplay", "record", "--assemble", "nowhere", "--", alone)
    assert done.returncode == 2
    done = run_command("prismreplay", "record", "--assemble", "nowhere")
    assert done.returncode == 1
    assert "nowhere" in done.stderr


def test_interrupting_ends_all_ranks(tmp_path, write_program, command_env, run_command):
    program = write_program(f"open(f'{tmp_path}/pid-{{rank}}', 'w').write(str(os.getpid()))")
    program.write_text(program.read_text().replace("optimizer.step()", "time.sleep(60)"))
    command = subprocess.Popen(
        ["prismreplay", "record", "--nproc-per-node", "2", "--", str(program)],
        cwd=tmp_path,
        env=command_env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    pids = [tmp_path / f"pid-{rank}" for rank in range(2)]
    limit = time.monotonic() + 60
    while not all(path.exists() and path.read_text() for path in pids):
        assert time.monotonic() < limit
        assert command.poll() is None
        time.sleep(0.1)
    # Meanwhile the output is this run's; another one of that name would mix with it.
    second = run_command("prismreplay", "record", "--nproc-per-node", 2, "--", program)
    assert second.returncode == 1
    assert "another run is writing to this folder" in second.stderr
    command.send_signal(signal.SIGTERM)
    assert command.wait(20) == 143
    for path in pids:
        assert not Path(f"/proc/{path.read_text()}").exists()


def test_other_programs_are_left_alone(run_command):
    code = "import torch, sys; print('prismreplay.runtime.recording' in sys.modules)"
    done = run_command("python", "-c", code)
    assert done.stdout.strip() == "False"
    assert "PRISMREPLAY_ROLE" not in os.environ


DEVICE = """
import time
import torch
from prismreplay.runtime import recording

class Devices:
    # What the host does is done: its events are moments.
    host_ns = staticmethod(time.perf_counter_ns)
    ready = staticmethod(lambda: True)
    current = staticmethod(lambda: (0, 0, 1))
    new_event = staticmethod(lambda: [0])
    private_stream = staticmethod(lambda device: (9, device, 1))
    connections = staticmethod(lambda: 32)
    memory = staticmethod(lambda device: (100, 200))
    def record(self, event, stream): event[0] = time.perf_counter_ns()
    def done(self, event): return True
    def elapsed_ns(self, earlier, later): return later[0] - earlier[0]
    def after(self, work, stream): raise AssertionError("gloo has the host wait")

torch.cuda.is_available = lambda: True
recording.CudaDevices = Devices
"""


def test_times_of_devices_do_not_change_the_graph(tmp_path, write_program, run_command):
    graphs = []
    for name, text in (("host", TRAINING), ("device", DEVICE + TRAINING)):
        output = tmp_path / f"{name}.parquet"
        program = write_program(text=text)
        done = run_command(
            "prismreplay", "record", "--nproc-per-node", 2, "-o", output, "--", program
        )
        assert done.returncode == 0, done.stderr
        trace = pt.open(output)
        assert {each.rule for each in pt.validate(trace)} <= {"overlap"}
        rows = trace.collect()
        assert rows["start_ns"].null_count() == 0
        graphs.append(rows.select("rank", "index", "kind", "step", "phase", "deps", "seq").rows())
    assert graphs[0] == graphs[1]
    assert rows["mem_peak_bytes"].max() == 200
    assert trace.header.clock[0].uncertainty_ns is not None
    merged = prismcalib.merge(trace).report
    assert abs(merged.difference_ns) <= merged.recorded_ns // 50
