"""No command replaces a file that it reads, and none waits for what is no file."""

from __future__ import annotations

import os
from importlib import util
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import prismcalib
import prismtrace as pt
from prismcalib import synth
from prismcalib.cli import app as prismcalib_app
from prismreplay.cli import app as prismreplay_app
from prismtrace.errors import PrismError

NEEDS_TORCH = pytest.mark.skipif(
    util.find_spec("torch") is None, reason="needs torch: pip install 'prismllm-toolkit[replay]'"
)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recorded and a calibrated trace, a table's source, and a program."""
    folder = tmp_path_factory.mktemp("job")
    spec = synth.JobSpec(pp=2, tp=1, dp=1, microbatches=2, layers_per_stage=1, steps=1)
    recorded = synth.generate(spec)
    pt.write(recorded, folder / "recorded.parquet")
    pt.write(prismcalib.merge(recorded).trace, folder / "calibrated.parquet")
    (folder / "times.csv").write_text(
        "kind,dtype,ranks,hosts,bytes,time_ns,cpu_ns\nall_reduce,float32,8,1,1000,500,100\n"
    )
    (folder / "train.py").write_text("print('hello')\n")
    (folder / "rules.toml").write_text("[[rule]]\nproduce = 'zeros'\n")
    return folder


def _call(folder: Path, words: str) -> Result:
    app, *rest = words.split()
    named = [str(folder / word) if (folder / word).is_file() else word for word in rest]
    return CliRunner().invoke(
        prismreplay_app if app == "prismreplay" else prismcalib_app, named, standalone_mode=False
    )


@pytest.mark.parametrize(
    "words",
    [
        "prismcalib merge recorded.parquet -o recorded.parquet",
        "prismcalib coarsen calibrated.parquet -o calibrated.parquet",
        "prismcalib report calibrated.parquet -o calibrated.parquet",
        "prismcalib comm-table times.csv -o times.csv",
        "prismreplay plan calibrated.parquet -o calibrated.parquet",
        pytest.param(
            "prismreplay run calibrated.parquet -o calibrated.parquet -- train.py",
            marks=NEEDS_TORCH,
        ),
        pytest.param(
            "prismreplay run calibrated.parquet --tensors rules.toml -o rules.toml -- train.py",
            marks=NEEDS_TORCH,
        ),
        "prismreplay collect --world-size 2 -o train.py -- train.py",
        "prismreplay record -o train.py -- train.py",
    ],
)
def test_an_output_is_no_input(words: str, job: Path) -> None:
    before = {path.name: path.read_bytes() for path in job.iterdir()}
    found = _call(job, words)
    assert isinstance(found.exception, PrismError), found
    assert "the output is one of the inputs" in str(found.exception)
    assert found.exception.hint
    assert {path.name: path.read_bytes() for path in job.iterdir()} == before


@pytest.mark.parametrize("device", ["pipe", "/dev/zero"])
@pytest.mark.parametrize(
    "words",
    [
        "prismreplay plan {}",
        "prismreplay collect --world-size 2 -- {}",
        "prismreplay collect --world-size 2 --mock-router {} -- train.py",
        "prismreplay collect --world-size 2 --tensors {} -- train.py",
        *(
            pytest.param(
                f"prismreplay run calibrated.parquet {option} {{}} -- train.py", marks=NEEDS_TORCH
            )
            for option in ("--plan", "--comm-table", "--compare", "--mock-router", "--tensors")
        ),
    ],
)
def test_nothing_waits_for_a_pipe_or_reads_a_device(
    words: str, device: str, job: Path, tmp_path: Path
) -> None:
    path = device
    if device == "pipe":
        path = str(tmp_path / "pipe")
        os.mkfifo(path)
    found = _call(job, words.format(path))
    assert isinstance(found.exception, PrismError), found
    assert "a pipe or a device" in str(found.exception)
    assert found.exception.hint
