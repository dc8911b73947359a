"""Finding the user's program, and running it as `python` does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from prismreplay.collect.programs import ProgramCall, program_of
from prismreplay.errors import ProgramError
from prismreplay.local_ranks import with_paths

LITTLE = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}


@pytest.mark.parametrize(
    ("words", "call"),
    [
        (["train.py", "--steps", "3"], ProgramCall("train.py", ("--steps", "3"))),
        (["-m", "pkg.train", "-x"], ProgramCall("pkg.train", ("-x",), is_module=True)),
        (["python", "train.py"], ProgramCall("train.py", ())),
        (["/usr/bin/python3.12", "-u", "train.py", "-u"], ProgramCall("train.py", ("-u",))),
        (["python", "-m", "pkg"], ProgramCall("pkg", (), is_module=True)),
    ],
)
def test_what_is_called(words: list[str], call: ProgramCall) -> None:
    assert program_of(words) == call


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no program is given"),
        (["python"], "no program is given"),
        (["-m"], "needs the name"),
        (["python", "-c", "print()"], "-c is not supported"),
        (["torchrun", "train.py"], "without a launcher"),
    ],
)
def test_what_cannot_be_called(words: list[str], message: str) -> None:
    with pytest.raises(ProgramError, match=message) as caught:
        program_of(words)
    assert caught.value.code == "program"


def test_what_would_fail_in_every_rank_is_found_before(tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match="not there"):
        ProgramCall(str(tmp_path / "missing.py"), ()).check()
    with pytest.raises(ProgramError, match="without __main__"):
        ProgramCall(str(tmp_path), ()).check()
    broken = tmp_path / "broken.py"
    broken.write_text("ok = 1\nx = = 3\n")
    with pytest.raises(ProgramError, match=r"no valid Python.*broken\.py:2"):
        ProgramCall(str(broken), ()).check()
    binary = tmp_path / "binary.py"
    binary.write_bytes(b"x = 1\0")
    with pytest.raises(ProgramError):
        ProgramCall(str(binary), ()).check()
    with pytest.raises(ProgramError, match="no such module"):
        ProgramCall("surely_no_module.of_this", (), is_module=True).check()
    ProgramCall("json.tool", (), is_module=True).check()


SEEN = """
import json, sys
import beside
import __main__
print(json.dumps([__name__, __file__, sys.argv, sys.path[0], __main__.__dict__ is globals(),
                  beside.name, __package__, __spec__ is None, __doc__]))
"""
RUN = "from prismreplay.collect.programs import ProgramCall as P; P({!r}, ('a', '-b'), {}).run()"


def test_a_script_sees_what_python_would_show_it(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("name = 'neighbour'\n")
    script = tmp_path / "script.py"
    script.write_text(SEEN)
    plain = subprocess.run(
        [sys.executable, "script.py", "a", "-b"],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    repo = Path(__file__).resolve().parents[3]
    ours = subprocess.run(
        [sys.executable, "-c", RUN.format("script.py", False)],
        cwd=tmp_path, capture_output=True, text=True, check=True,
        env=with_paths(LITTLE, repo),
    )  # fmt: skip
    assert json.loads(ours.stdout) == json.loads(plain.stdout)


def test_a_module_sees_what_python_would_show_it(tmp_path: Path) -> None:
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "work.py").write_text(
        "import sys, __main__\nprint(__name__, __package__, sys.argv[1:], __spec__.name,"
        " __main__.__dict__ is globals())\n"
    )
    repo = Path(__file__).resolve().parents[3]
    outputs = [
        subprocess.run(
            [sys.executable, *call],
            cwd=tmp_path, capture_output=True, text=True, check=True,
            env=with_paths(LITTLE, repo),
        ).stdout
        for call in (["-m", "pkg.work", "a", "-b"], ["-c", RUN.format("pkg.work", True)])
    ]  # fmt: skip
    assert outputs[0] == outputs[1]


def test_modules_are_beside_the_script_that_a_link_leads_to(tmp_path: Path) -> None:
    for name in ("there", "here"):
        (tmp_path / name).mkdir()
    (tmp_path / "there/beside.py").write_text("name = 'neighbour'\n")
    (tmp_path / "there/script.py").write_text(SEEN)
    (tmp_path / "here/link.py").symlink_to("../there/script.py")
    repo = Path(__file__).resolve().parents[3]
    outputs = [
        subprocess.run(
            [sys.executable, *call],
            cwd=tmp_path, capture_output=True, text=True, check=True,
            env=with_paths(LITTLE, repo),
        ).stdout
        for call in (["here/link.py", "a", "-b"], ["-c", RUN.format("here/link.py", False)])
    ]  # fmt: skip
    assert json.loads(outputs[0]) == json.loads(outputs[1])
