"""The chain of commands: what each is told, and what is repeated when something changes."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from prismreplay.emulation import emulating
from prismreplay.emulation.emulating import EmulateOptions, emulate
from prismreplay.emulation.stages import StageError
from prismreplay.errors import PlanError, ProgramError
from prismtrace.claiming import Claim
from prismtrace.errors import OutputError

ALL = ["collect", "comm-bench", "slice", "merge", "run"]


class Watching:
    def __init__(self):
        self.begun, self.made = [], []

    def begins(self, number, of, stage, note):
        self.begun.append((number, of, stage.name, note is not None))
        self.words = stage.words

    def ended(self, note):
        self.made.append(note.token)


@pytest.fixture
def commands(monkeypatch, tmp_path):
    """Stages that only leave empty files; the command lines that were called."""
    lines = {}

    def call(stage):
        lines[stage.name] = stage.words
        for pattern in stage.made:
            path = tmp_path / "work" / pattern.replace("*", "0000")
            path.parent.mkdir(exist_ok=True, parents=True)
            path.write_text(stage.line)
        return "{}"

    monkeypatch.setattr("prismreplay.emulation.stages._call", call)
    monkeypatch.setattr(emulating, "find", lambda *_: None)
    monkeypatch.setattr("prismreplay.emulation.transfers.bench_words", lambda *_: ("--nproc", "2"))
    return lines


@pytest.fixture
def train(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("pass")
    return ["train.py", "--steps", "3"]


def names(done, *, kept):
    return [stage.name for stage in done.stages if stage.kept == kept]


def option(words, name):
    return words[words.index(name) + 1]


def test_a_chain_is_five_commands(commands, train):
    watching = Watching()
    done = emulate(train, Path("work"), EmulateOptions(world_size=16, devices=2), watching)
    assert names(done, kept=False) == ALL
    assert [entry[:3] for entry in watching.begun][-1] == (5, 5, "run")
    assert commands["collect"][:4] == ("prismreplay", "collect", "--world-size", "16")
    assert option(commands["collect"], "--record-tensors") == "all"
    assert option(commands["slice"], "--sandbox-size") == "2"
    assert option(commands["run"], "--sandbox") == "0"
    for name in ("collect", "slice", "run"):
        assert commands[name][-4:] == ("--", *train)
    assert "--" not in commands["merge"]


def test_a_folder_is_one_chain_s_at_a_time(commands, train):
    options = EmulateOptions(world_size=16, devices=2)
    watching = Watching()
    with (
        contextlib.closing(Claim(Path("work"))),
        pytest.raises(OutputError, match="another run is writing"),
    ):
        emulate(train, Path("work"), options, watching)
    assert watching.begun == []
    assert not commands
    emulate(train, Path("work"), options, watching)


def test_a_second_time_nothing_is_run(commands, train):
    options = EmulateOptions(world_size=16, devices=2)
    emulate(train, Path("work"), options, Watching())
    commands.clear()
    done = emulate(train, Path("work"), options, Watching())
    assert commands == {}
    assert names(done, kept=True) == ALL


@pytest.mark.parametrize(
    ("change", "again"),
    [
        ({"inject": ("rank=5,scale=2",)}, ["run"]),
        ({"sandbox": (1, 2)}, ["run"]),
        ({"comm_table": Path("table.parquet")}, ["slice", "merge", "run"]),
        ({"sandbox_size": 4}, ["slice", "merge", "run"]),
        ({"world_size": 8}, ALL),
    ],
    ids=str,
)
def test_only_what_depends_on_a_change_is_repeated(commands, train, change, again):
    Path("table.parquet").write_text("")
    base = {"world_size": 16, "devices": 2}
    emulate(train, Path("work"), EmulateOptions(**base), Watching())
    commands.clear()
    emulate(train, Path("work"), EmulateOptions(**base | change), Watching())
    assert list(commands) == again


def test_a_table_of_one_s_own_is_used(commands, train):
    Path("table.parquet").write_text("")
    options = EmulateOptions(world_size=16, devices=2, comm_table=Path("table.parquet"))
    done = emulate(train, Path("work"), options, Watching())
    assert names(done, kept=False) == ["collect", "slice", "merge", "run"]
    assert option(commands["merge"], "--comm-table") == "table.parquet"


def test_what_is_too_large_to_record_is_mirrored(commands, train):
    options = EmulateOptions(world_size=16, devices=2, record_below=4096)
    emulate(train, Path("work"), options, Watching())
    assert option(commands["collect"], "--mirror-above") == "4096"
    for name in ("slice", "run"):
        words = commands[name]
        given = [words[at + 1] for at, word in enumerate(words) if word == "--tensors"]
        assert [Path(one).name for one in given] == ["bare.tensors", "builtin:mirror"]


def test_another_program_is_another_job(commands, train):
    options = EmulateOptions(world_size=16, devices=2)
    emulate(train, Path("work"), options, Watching())
    commands.clear()
    Path("train.py").write_text("pass  # changed")
    emulate(train, Path("work"), options, Watching())
    assert list(commands) == ALL


def test_after_a_failure_it_goes_on(commands, train, monkeypatch):
    options = EmulateOptions(world_size=16, devices=2)
    run = emulating.run_stage

    def failing(folder, stage):
        if stage.name == "merge":
            raise StageError(stage.name, 1)
        return run(folder, stage)

    monkeypatch.setattr(emulating, "run_stage", failing)
    with pytest.raises(StageError, match="merge"):
        emulate(train, Path("work"), options, Watching())
    monkeypatch.setattr(emulating, "run_stage", run)
    commands.clear()
    emulate(train, Path("work"), options, Watching())
    assert list(commands) == ["merge", "run"]


def test_rules_need_only_the_sandbox_s_tensors(commands, train):
    options = EmulateOptions(
        world_size=16, devices=2, sandbox=(2, 3), tensors=("builtin:independent",)
    )
    emulate(train, Path("work"), options, Watching())
    assert option(commands["collect"], "--record-tensors") == "sandbox-facing"
    assert option(commands["collect"], "--sandbox") == "2-3"
    sources = [word for word in commands["slice"] if word.endswith((":independent", ".tensors"))]
    assert sources == ["builtin:independent", "work/bare.tensors"]


def test_a_program_that_is_not_there_begins_nothing(tmp_path):
    with pytest.raises(ProgramError):
        emulate(
            ["nothing.py"], tmp_path / "work", EmulateOptions(world_size=2, devices=1), Watching()
        )
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize(
    ("inject", "told"),
    [
        ("rank=1", "does not say what to change"),
        ("rank=2,scale=2", "the job has ranks 0-1"),
        ("kind=matmul,scale=2", "kind is one of compute, all_reduce, "),
        ("phase=froward,scale=2", "phase is one of forward, backward, optimizer, other"),
    ],
)
def test_what_cannot_be_injected_begins_nothing(train, tmp_path, inject, told):
    options = EmulateOptions(world_size=2, devices=1, inject=(inject,))
    with pytest.raises(PlanError, match=told):
        emulate(train, tmp_path / "work", options, Watching())
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize(
    ("devices", "cores", "on_gpus", "told"),
    [(2, 2, False, "2"), (2, 3, False, "3"), (4, 2, False, "4"), (2, 8, True, "2")],
)
def test_the_emulator_has_a_core_more_if_there_is_one(
    commands, train, devices, cores, on_gpus, told
):
    options = EmulateOptions(world_size=16, devices=devices, cores=cores, on_gpus=on_gpus)
    emulate(train, Path("work"), options, Watching())
    assert option(commands["slice"], "--devices") == told
