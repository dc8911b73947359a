"""Sandbox ranks on several hosts, which are two commands that meet on a loopback address."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import prismtrace as pt
from prismreplay.collect.handover import Place
from prismreplay.collect.messages import Channel
from prismreplay.errors import HostsError
from prismreplay.local_ranks import with_paths
from prismreplay.run import relaying
from prismreplay.run.hosts import Hosts, Meeting, call_hub, hosts_from, meet, ranks_of_host

REPO = Path(__file__).parents[3]
TOY = Path(__file__).parent / "programs" / "toy.py"
ADDRESS = "127.0.0.2"
LAUNCHED = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": ADDRESS, "MASTER_PORT": "29400"}


def free_port() -> int:
    with socket.create_server((ADDRESS, 0)) as taken:
        return int(taken.getsockname()[1])


def hosts(number: int, port: int, run: str = "run", count: int = 2) -> Hosts:
    return Hosts(number, count, ADDRESS, port, agent_store=False, run=run)


def test_a_launcher_says_who_is_who():
    found = hosts_from({**LAUNCHED, "TORCHELASTIC_RUN_ID": "mine"})
    assert found == Hosts(1, 2, ADDRESS, 29400, agent_store=False, run="mine")
    assert hosts_from({**LAUNCHED, "TORCHELASTIC_USE_AGENT_STORE": "True"}).agent_store
    for wrong in ({}, {**LAUNCHED, "RANK": "first"}, {**LAUNCHED, "RANK": "2"}):
        with pytest.raises(HostsError):
            hosts_from(wrong)


def test_hosts_share_the_ranks():
    assert [ranks_of_host((0, 1, 5, 6, 7), number, 2) for number in range(2)] == [(0, 1, 5), (6, 7)]
    assert [ranks_of_host((3, 4), number, 2) for number in range(2)] == [(3,), (4,)]
    with pytest.raises(HostsError, match="1 sandbox ranks for 2 hosts"):
        ranks_of_host((0,), 0, 2)


def test_hosts_meet_and_strangers_are_sent_away():
    port = free_port()
    meeting = Meeting(hosts(0, port))
    found = {}
    waiting = threading.Thread(target=lambda: found.update(meeting.await_ranks([2, 3], 30)))
    waiting.start()
    stranger = call_hub(hosts(1, port, run="another"), [2])[2]
    mine = call_hub(hosts(1, port), [2, 3])
    waiting.join()
    meeting.close()
    assert sorted(found) == [2, 3]
    mine[3].send(("hello", 3))
    assert found[3].receive() == (("hello", 3), None)
    with pytest.raises(EOFError):
        stranger.receive()
    for channel in [*found.values(), *mine.values(), stranger]:
        channel.close()


def test_a_host_that_does_not_come_is_named():
    meeting = Meeting(hosts(0, free_port()))
    with pytest.raises(HostsError, match=r"sandbox ranks \[7\] within"):
        meeting.await_ranks([7], 0.2)
    meeting.close()
    with pytest.raises(HostsError, match="does not answer"):
        call_hub(hosts(1, free_port()), [7], 0.2)


def test_a_taken_port_is_told():
    with socket.create_server(("", 0)) as taken, pytest.raises(HostsError, match="cannot listen"):
        meet(hosts(0, taken.getsockname()[1]), (0, 1))


def test_bytes_of_large_tensors_travel_inside():
    left, right = (Channel(end) for end in socket.socketpair())
    file = os.memfd_create("test")
    os.write(file, b"abc" * 5000)
    data = relaying._bytes_of(file)
    relaying._say(left, ("result", 1), data, Place())
    message, copy = right.receive()
    assert message == ("result", 1)
    assert relaying._bytes_of(copy) == b"abc" * 5000
    left.close()
    right.close()


def test_the_quickest_answers_tell_the_time():
    offset = relaying.ClockOffset()
    offset.learn(1_000, 51_000, 2_000)
    assert abs(offset.now() - time.monotonic_ns() - 49_500) < 10**9
    assert offset._words[0] == 49_500
    offset.learn(1_000, 90_000, 80_000)  # took long: says little
    assert offset._words[0] == 49_500
    offset.learn(1_000, 51_300, 1_200)
    assert offset._words[0] == 50_200


# --- whole runs ------------------------------------------------------------------------------


def start(number: int, port: int, log: Path, *words: object) -> subprocess.Popen[bytes]:
    environment = with_paths({**os.environ, "OMP_NUM_THREADS": "1"}, REPO)
    environment |= {"RANK": str(number), "WORLD_SIZE": "2", "MASTER_ADDR": ADDRESS}
    environment |= {"MASTER_PORT": str(port)}
    environment.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "prismreplay.cli", "run", *map(str, words)],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def run_on_two(folder: Path, *words: object) -> list[tuple[int, str]]:
    """Exit codes and output of both commands."""
    port = free_port()
    logs = [folder / f"host{number}.txt" for number in range(2)]
    options = (folder / "bare.parquet", "--early", "--hosts", "-o", folder / "run.parquet", *words)
    started = [start(number, port, log, *options) for number, log in enumerate(logs)]
    codes = [one.wait(timeout=300) for one in started]
    return [(code, log.read_text()) for code, log in zip(codes, logs, strict=True)]


@pytest.fixture(scope="module")
def collected(tmp_path_factory):
    """The graph of three steps on four ranks, its tensors, and the weights it ended with."""
    folder = tmp_path_factory.mktemp("hosts")
    command = ["collect", "--world-size", "4", "--devices", "2", "--record-tensors", "all"]
    command += ["--show-rank", "0", "-o", str(folder / "bare.parquet"), "--", str(TOY), "3"]
    done = subprocess.run(
        [sys.executable, "-m", "prismreplay.cli", *command],
        env=with_paths({**os.environ, "OMP_NUM_THREADS": "1"}, REPO),
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    (folder / "weights").write_text(re.findall(r"weights \S+", done.stdout)[0])
    return folder


def test_ranks_of_two_hosts_learn_what_they_would(collected):
    sandbox = ("--sandbox", "0,1,3", "--show-rank", "all")
    (code, said), (other_code, other) = run_on_two(collected, *sandbox, "--", TOY, 3)
    assert (code, other_code) == (0, 0), said + other
    weights = (collected / "weights").read_text()
    assert said.count(weights) == 2
    assert other.count(weights) == 1
    trace = pt.open(collected / "run.parquet")
    assert trace.header.ranks == (0, 1, 3)
    assert pt.validate(trace) == []


@pytest.mark.slow
def test_a_rank_that_fails_elsewhere_ends_the_run(collected):
    words = ("--sandbox", "0,1", "--", TOY, 3, "fails")
    (code, said), (other_code, other) = run_on_two(collected, *words)
    assert (code, other_code) == (1, 1)
    assert "RuntimeError: the program has a bug" in said
    assert "the first host says which rank failed first" in other


@pytest.mark.slow
def test_a_host_that_is_gone_ends_the_run(collected):
    port = free_port()
    words = (collected / "bare.parquet", "--early", "--hosts", "--sandbox", "0,1")
    words += ("--show-rank", "all", "-o", collected / "gone.parquet", "--", TOY, 3, "sleeps")
    logs = [collected / f"gone{number}.txt" for number in range(2)]
    started = [start(number, port, log, *words) for number, log in enumerate(logs)]
    deadline = time.monotonic() + 200
    while "asleep" not in logs[1].read_text() and time.monotonic() < deadline:
        time.sleep(0.2)
    started[1].send_signal(signal.SIGKILL)
    started[1].wait()
    assert started[0].wait(timeout=30) == 1
    assert "its host is gone" in logs[0].read_text()
