"""Whole runs of small programs on a few ranks, forked from this process."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

from prismreplay.collect import client
from prismreplay.collect.collecting import CollectOptions, CollectReport, collect
from prismreplay.collect.programs import ProgramCall
from prismreplay.errors import DeadlockError, MismatchError, ProgramError, RankFailedError

Run = Callable[..., tuple[CollectReport, list[str]]]

BEGINNING = """
import json, os, random, sys, threading, time
import numpy
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
ones = torch.ones(3)
"""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """`run(program, ranks=3, devices=1)`: the report, and what each rank printed."""

    def run(program: str, ranks: int = 3, devices: int = 1, **more: object) -> object:
        path = tmp_path / "program.py"
        path.write_text(BEGINNING + dedent(program))
        options = CollectOptions(ranks, devices, **{"shown": (), **more})  # type: ignore[arg-type]
        output = tmp_path / "bare.parquet"
        report = collect(ProgramCall(str(path), ("--flag",)), output, options)
        logs = [report.log_dir / f"rank-{rank:04d}.log" for rank in range(ranks)]
        return report, [log.read_text() for log in logs]

    return run  # type: ignore[return-value]


def test_ranks_see_what_torchrun_shows_them(run: Run) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    program = f"""
        dist.barrier()
        print(json.dumps([os.environ[name] for name in {names}]
              + sys.argv[1:] + [torch.get_num_threads(), sys.stdin.read()]))
    """
    _, logs = run(program, 4, local_world_size=2)
    assert json.loads(logs[3]) == ["3", "4", "1", "2", "1", "--flag", 1, ""]


def test_random_state_is_each_ranks_own_unless_seeded(run: Run) -> None:
    program = """
        dist.barrier()
        def draw():
            return [torch.rand(1).item(), random.random(), numpy.random.rand()]
        free = draw()
        torch.manual_seed(5), random.seed(5), numpy.random.seed(5)
        print(json.dumps([free, draw()]))
    """
    _, logs = run(program)
    free, seeded = zip(*map(json.loads, logs), strict=True)
    assert all(len({one[which] for one in free}) == 3 for which in range(3))
    assert len({tuple(one) for one in seeded}) == 1


def test_at_most_as_many_compute_as_there_are_slots(run: Run) -> None:
    program = """
        for _ in range(5):
            dist.all_reduce(ones)
    """
    report, _ = run(program, 4, 1)
    assert report.most_running == 1
    assert report.collectives == 5
    assert report.naive_context_switches is not None
    assert report.context_switches <= report.naive_context_switches
    assert run(program, 4, 2, per_device=1)[0].most_running == 2


def test_a_job_of_large_collectives_only(run: Run) -> None:
    program = """
        for _ in range(2):
            dist.all_reduce(ones)
        print(ones.tolist())
    """
    report, logs = run(program, 2, mirror_above=4)
    assert (report.collectives, report.mirrored) == (0, 4)
    assert report.nodes > 4
    assert logs == ["[4.0, 4.0, 4.0]\n"] * 2


def test_a_program_that_never_communicates(run: Run, tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match="without any communication") as caught:
        run("print(1)", 2)
    assert str(tmp_path / "bare.logs") in str(caught.value.hint)


def test_a_rank_that_waits_for_a_file_lends_its_turn(run: Run, tmp_path: Path) -> None:
    program = f"""
        flag = {str(tmp_path / "flag")!r}
        if rank == 0:
            while not os.path.exists(flag):
                time.sleep(0.05)
        elif rank == 1:
            open(flag, "w").close()
        dist.barrier()
    """
    assert run(program)[0].collectives == 1


def test_a_rank_that_polls_lets_others_go_on(run: Run) -> None:
    program = """
        work = dist.all_reduce(ones, async_op=True)
        while not work.is_completed():
            pass
        print(ones.tolist())
    """
    assert run(program)[1] == ["[3.0, 3.0, 3.0]\n"] * 3


def test_threads_of_a_rank_may_communicate(run: Run) -> None:
    program = """
        other = dist.new_group()
        def work():
            time.sleep(0.2)
            dist.all_reduce(ones, group=other)
        thread = threading.Thread(target=work)
        thread.start()
        mine = torch.ones(2)
        dist.all_reduce(mine)
        thread.join()
        print(ones.tolist(), mine.tolist())
    """
    assert run(program, 3, 1)[1] == ["[3.0, 3.0, 3.0] [3.0, 3.0]\n"] * 3


def test_tensors_may_be_handed_over_through_a_folder(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "scratch"
    folder.mkdir()
    program = """
        big = torch.full((100_000,), float(rank))
        dist.all_reduce(big)
        print(big.unique().tolist())
    """
    assert run(program, shm_dir=folder)[1] == ["[3.0]\n"] * 3
    assert list(folder.iterdir()) == []


def test_a_rank_that_only_sends_does_not_run_far_ahead(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "MOST_AHEAD_BYTES", 50_000)
    program = """
        for number in range(20):
            block = torch.full((5_000,), float(number))
            if rank == 0:
                dist.send(block, 1)
            elif rank == 1:
                dist.recv(block, 0)
                assert block[0] == number
    """
    report, _ = run(program, 2)
    assert report.messages == 20
    assert report.rounds > 3


@pytest.mark.parametrize(
    ("last", "words"),
    [
        ("os._exit(4)", "rank 1 ended with exit code 4"),
        ("import ctypes; ctypes.string_at(0)", "rank 1 was killed by SIGSEGV"),
        ("os.kill(os.getpid(), 9)", "rank 1 was killed by SIGKILL"),
        ("sys.exit('no data')", "rank 1 ended with exit code 1"),
        ("raise ValueError('no data')", "rank 1 failed: ValueError: no data"),
    ],
)
def test_a_rank_that_fails_ends_the_run(run: Run, last: str, words: str, ended: Ended) -> None:
    program = f"""
        print("before the end", flush=True)
        dist.barrier()
        if rank == 1:
            {last}
        dist.barrier()
    """
    with pytest.raises(RankFailedError, match=words) as caught:
        run(program)
    if "exit" in last and "os" not in last:
        assert caught.value.report.endswith("no data")
    if "raise" in last:
        assert "program.py" in caught.value.report
        assert "prismreplay" not in caught.value.report
    if "SEGV" in words:
        assert "program.py" in caught.value.report
        assert "prismreplay/collect" not in caught.value.report
    ended()


def test_a_rank_that_leaves_without_a_word_is_missed(run: Run, ended: Ended) -> None:
    program = """
        if rank == 2:
            os._exit(0)
        dist.barrier()
    """
    with pytest.raises(DeadlockError, match="program of rank 2 has ended"):
        run(program)
    ended()


def test_processes_that_a_rank_forks_are_not_the_rank(run: Run) -> None:
    program = """
        dist.barrier()
        pid = os.fork()
        if pid == 0:
            dist.barrier()
        _, status = os.waitpid(pid, 0)
        dist.barrier()
        print("status", os.waitstatus_to_exitcode(status), flush=True)
        os._exit(0)
    """
    report, logs = run(program, 2)
    assert report.collectives == 2
    assert report.policies == {}
    assert report.nodes > 2 * 2  # all of both ranks, whatever way they ended
    for log in logs:
        assert "status 1" in log
        assert "communication in a process that a rank has forked" in log
        assert "prismreplay/" not in log  # frames of ours


def test_a_rank_that_asks_its_user_is_told_how_else(run: Run) -> None:
    with pytest.raises(RankFailedError, match="EOFError: EOF when reading a line") as caught:
        run("dist.barrier(); input()", 2)
    assert "standard input of ranks is empty" in str(caught.value.hint)


def test_a_rank_that_closes_files_that_it_did_not_open_is_told(run: Run) -> None:
    with pytest.raises(RankFailedError, match="ended with exit code 1") as caught:
        run("dist.barrier(); os.closerange(3, 1024); dist.barrier()", 2)
    # It can tell nobody but its log.
    assert "does the program close files that it did not open" in caught.value.report
    assert "program.py" in caught.value.report


def test_programs_that_start_their_ranks_themselves_have_a_hint(run: Run) -> None:
    program = """
        import torch.multiprocessing
        def train(rank):
            dist.all_reduce(torch.ones(1))
        torch.multiprocessing.start_processes(train, nprocs=1, start_method="fork")
    """
    with pytest.raises(RankFailedError, match="ProcessRaisedException") as caught:
        run(program, 1)
    assert "let it be one rank, as under torchrun" in str(caught.value.hint)


def test_programs_that_want_a_gpu_where_there_is_none_have_a_hint(run: Run) -> None:
    with pytest.raises(RankFailedError, match="not compiled with CUDA") as caught:
        run('raise AssertionError("Torch not compiled with CUDA enabled")', 1)
    assert "torch.cuda.is_available() says no" in str(caught.value.hint)


def test_a_rank_that_becomes_another_program_is_told(run: Run) -> None:
    program = """
        dist.barrier()
        os.execv(sys.executable, [sys.executable, "-c", "print('another')"])
    """
    report, logs = run(program, 2)
    assert logs == ["another\n"] * 2
    assert report.policies["cut-rank"] == 2


def test_what_an_exception_says_is_one_line(run: Run) -> None:
    program = """
        raise ValueError("first" + chr(10) + "second\\nTraceback (most recent call last):\\n x")
    """
    with pytest.raises(RankFailedError, match=r"ValueError: first second \.\.\. \["):
        run(program, 1)


def test_groups_made_in_another_order_are_told(run: Run) -> None:
    program = """
        both = [dist.new_group(one) for one in ([[0, 1], [0, 1, 2]])[:: 1 if rank else -1]]
    """
    with pytest.raises(MismatchError, match="disagree on the members of a group"):
        run(program)


def test_finished_steps_of_a_run_that_fails_are_kept(
    run: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    import prismtrace

    program = """
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            model(torch.ones(2)).sum().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            if step == 2 and rank == 1:
                raise ValueError
    """
    with pytest.raises(RankFailedError):
        run(program)
    assert "partial.parquet" in capfd.readouterr().err
    assert not (tmp_path / "bare.parquet").exists()
    kept = prismtrace.open(tmp_path / "bare.partial.parquet")
    assert kept.header.ranks == (0, 1, 2)
    assert len(kept.header.steps) >= 1


Ended = Callable[[], None]


@pytest.fixture
def ended() -> Ended:
    """Asks whether all processes have ended that this test has started."""
    before = _children()

    def ask() -> None:
        assert _children() <= before

    return ask


def _children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())
