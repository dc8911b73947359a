"""The wheel and the sdist: what is in them, how large they are, and that they work installed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import prismtrace
from tests.end_to_end.commands import profile, write_profiles
from tests.end_to_end.installed import Environment, build, install

PACKAGES = ("prismtrace", "prismcalib", "prismreplay")

# Budgets: what is beyond them was added by mistake, or deserves a decision.
WHEEL_BYTES = 1_500_000
SDIST_BYTES = 4_000_000
MODULES_OF_IMPORT = 60
MODULES_OF_HELP = 260


@pytest.fixture(scope="session")
def built(repo: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return build(repo, tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="session")
def environment(
    built: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Environment]:
    """Where the wheel is installed with given extras, made once for each."""
    known: dict[tuple[str, ...], Environment] = {}

    def made(*extras: str) -> Environment:
        if extras not in known:
            folder = tmp_path_factory.mktemp("installed") / ("-".join(extras) or "base")
            known[extras] = install(built[".whl"], folder, extras)
        return known[extras]

    return made


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_profiles(tmp_path_factory.mktemp("in") / "job", profile(0), profile(1))


def _tracked(repo: Path) -> set[str]:
    """The files of the repository that are not about how it is hosted."""
    if not (repo / ".git").exists():
        pytest.skip("no checkout: nothing tells which files belong to the source")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=repo, capture_output=True, text=True, check=True
    )
    return {
        name
        for name in listed.stdout.split("\0")
        if name and not name.startswith(".") and (repo / name).exists()
    }


def _in_sdist(path: Path) -> set[str]:
    with tarfile.open(path) as archive:
        return {name.partition("/")[2] for name in archive.getnames()} - {"PKG-INFO", ".gitignore"}


# --- what is inside -----------------------------------------------------------------------


def test_the_sdist_holds_the_source_and_nothing_else(built: dict[str, Path], repo: Path) -> None:
    # Files that are being worked on may be there before git knows them.
    new = {name for name in _in_sdist(built[".gz"]) if (repo / name).exists()}
    assert _tracked(repo) - _in_sdist(built[".gz"]) == set()
    assert _in_sdist(built[".gz"]) - new == set()
    assert not any("__pycache__" in name or name.endswith(".parquet.tmp") for name in new)


def test_the_wheel_holds_the_packages_and_their_files(built: dict[str, Path], repo: Path) -> None:
    with zipfile.ZipFile(built[".whl"]) as archive:
        names = set(archive.namelist())
    moved = {"schemas/": "prismtrace/schemas/", "cuda/": "prismreplay/cuda/"}
    expected = {
        name for name in _tracked(repo) if name.startswith(tuple(f"{p}/" for p in PACKAGES))
    }
    for folder, place in moved.items():
        expected |= {
            name.replace(folder, place, 1) for name in _tracked(repo) if name.startswith(folder)
        }
    expected = {name for name in expected if not name.endswith("/ruff.toml")}
    info = f"prismllm_toolkit-{prismtrace.__version__}.dist-info/"
    assert expected - names == set()
    assert {f"{package}/py.typed" for package in PACKAGES} <= names
    assert {f"{info}{name}" for name in ("licenses/LICENSE", "entry_points.txt")} <= names
    assert {name.partition("/")[0] for name in names} == {*PACKAGES, info[:-1]}
    assert any(name.endswith(".cu") for name in names)
    assert any(name.endswith(".cuh") for name in names)


def test_the_sdist_builds_the_same_wheel(built: dict[str, Path], tmp_path: Path) -> None:
    with tarfile.open(built[".gz"]) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    again = build(source, tmp_path / "dist")
    assert again[".whl"].read_bytes() == built[".whl"].read_bytes()


def test_sizes(built: dict[str, Path]) -> None:
    assert built[".whl"].stat().st_size <= WHEEL_BYTES
    assert built[".gz"].stat().st_size <= SDIST_BYTES


def test_the_changelog_has_this_version(repo: Path) -> None:
    heads = re.findall(r"^## \[(.*?)\](.*)$", (repo / "CHANGELOG.md").read_text(), re.MULTILINE)
    versions = dict(heads)
    assert "dev" in prismtrace.__version__ or re.fullmatch(
        r" - \d{4}-\d\d-\d\d", versions[prismtrace.__version__]
    )


# --- what it costs to start ---------------------------------------------------------------


@pytest.mark.parametrize("package", PACKAGES)
def test_how_many_modules_an_import_loads(package: str) -> None:
    # Modules, not seconds: their number is the same on every machine, and is what takes the time.
    code = (
        f"import sys; before = len(sys.modules); import {package}; print(len(sys.modules)-before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) <= MODULES_OF_IMPORT


@pytest.mark.parametrize("package", PACKAGES)
def test_how_many_modules_help_loads(package: str) -> None:
    words = [sys.executable, "-X", "importtime", "-m", f"{package}.cli", "--help"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stderr.count("import time:") <= MODULES_OF_HELP


# --- installed ----------------------------------------------------------------------------


@pytest.mark.parametrize("command", PACKAGES)
def test_every_command_starts_without_extras(
    command: str, environment: Callable[..., Environment]
) -> None:
    base = environment()
    assert base.good(command, "--version") == f"prismllm-toolkit {prismtrace.__version__}\n"
    assert "Usage: " in base.good(command, "--help")
    for shell in ("bash", "zsh", "fish"):
        assert f"_{command.upper()}_COMPLETE" in base.good(command, "--show-completion", shell)


@pytest.mark.parametrize(
    ("command", "typed", "answer"),
    [
        ("prismtrace", "con", "convert\nconcat"),
        ("prismtrace", "convert --res", "--resume"),
        ("prismtrace", "export --to per", "perfetto"),
        ("prismcalib", "strag", "stragglers"),
        ("prismreplay", "collect --fol", "--fold"),
    ],
)
def test_a_shell_completes(
    command: str, typed: str, answer: str, environment: Callable[..., Environment]
) -> None:
    words = f"{command} {typed}"
    done = environment().call(
        command,
        **{f"_{command.upper()}_COMPLETE": "complete_bash"},
        COMP_WORDS=words,
        COMP_CWORD=str(words.count(" ")),
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, answer, "")


def test_traces_are_made_and_looked_at_without_extras(
    environment: Callable[..., Environment], job: list[Path]
) -> None:
    base = environment()
    base.good("prismtrace", "convert", *job, "-o", "run.parquet")
    base.good("prismtrace", "validate", "run.parquet")
    assert json.loads(base.good("prismtrace", "info", "run.parquet", "--json"))["nodes"] == 20
    counted = "SELECT rank, COUNT(*) AS n FROM nodes GROUP BY rank"
    base.good("prismtrace", "query", "run.parquet", counted)
    base.good("prismtrace", "slice-out", "run.parquet", "--ranks", "0", "-o", "0.parquet")
    base.good("prismtrace", "diff", "run.parquet", "run.parquet")
    for kind, name in (("perfetto", "run.json.gz"), ("chakra", "chakra"), ("node-link", "n.json")):
        base.good("prismtrace", "export", "run.parquet", "--to", kind, "-o", name)
    site = Path(base.good("python", "-c", "import prismtrace; print(prismtrace.__file__)").strip())
    assert site.is_relative_to(base.folder)
    for schema in sorted((site.parent / "schemas").iterdir()):
        shown = base.good("prismtrace", "schema", schema.name.removesuffix(".schema.json"))
        assert json.loads(shown) == json.loads(schema.read_text())


# Every trace is as one of very many rows, for which propagation is compiled.
LARGE = """
import sys
from prismcalib import cli, propagation
propagation._ARRAY_FROM_ROWS = 1
cli.main()
"""


def test_what_needs_an_extra_names_it(
    environment: Callable[..., Environment], job: list[Path]
) -> None:
    base = environment()
    (base.work / "program.py").write_text(PROGRAM)
    base.good("prismtrace", "convert", *job, "-o", "run.parquet")
    for extra, words in {
        "calib": ("python", "-c", LARGE, "merge", "run.parquet", "-o", "a.parquet"),
        "dask": ("prismtrace", "convert", *job, "-o", "b.parquet", "--dask", "tcp://127.0.0.1:1"),
        "replay": ("prismreplay", "collect", "--world-size", "2", "-o", "c.parquet", "program.py"),
    }.items():
        done = base.call(*words)
        assert (done.returncode, done.stdout) == (1, ""), done
        assert f"pip install 'prismllm-toolkit[{extra}]'" in done.stderr
        assert "Traceback" not in done.stderr


def test_the_calib_extra_alone(environment: Callable[..., Environment], job: list[Path]) -> None:
    calib = environment("calib")
    calib.good("prismtrace", "convert", *job, "-o", "run.parquet")
    calib.good("prismcalib", "merge", "run.parquet", "-o", "a.parquet")
    calib.good("python", "-c", LARGE, "merge", "run.parquet", "-o", "compiled.parquet")
    for command in ("critical-path", "predict", "stragglers", "check"):
        calib.good("prismcalib", command, "a.parquet")
    calib.good("prismcalib", "what-if", "a.parquet", "--scale", "kind == 'compute'", "0.5")
    calib.good("prismcalib", "compare", "a.parquet", "a.parquet")
    calib.good("prismcalib", "report", "a.parquet", "-o", "report.html")
    calib.good("python", "-c", "import networkx; networkx.config.backends['prismcalib']")


CLUSTER = """
import subprocess, sys
from distributed import LocalCluster
if __name__ == "__main__":
    with LocalCluster(1, processes=False, protocol="tcp", dashboard_address="127.0.0.1:0") as cluster:
        words = [*sys.argv[1:], "--dask", cluster.scheduler_address]
        sys.exit(subprocess.run(words).returncode)
"""


@pytest.mark.slow
def test_the_dask_extra_alone(environment: Callable[..., Environment], job: list[Path]) -> None:
    dask = environment("dask")
    dask.good("python", "-c", CLUSTER, "prismtrace", "convert", *job, "-o", "run.parquet")
    dask.good("prismtrace", "convert", *job, "-o", "plain.parquet")
    results = {(dask.work / name).read_bytes() for name in ("run.parquet", "plain.parquet")}
    assert len(results) == 1


PROGRAM = """\
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(4) * dist.get_rank()
dist.all_reduce(total)
assert total.tolist() == [1.0] * 4
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_the_replay_extra_alone(environment: Callable[..., Environment]) -> None:
    replay = environment("replay")
    (replay.work / "program.py").write_text(PROGRAM)
    words = ("--world-size", "2", "--devices", "1", "-o", "bare.parquet", "program.py")
    done = replay.call("prismreplay", "collect", *words)
    assert done.returncode == 0, done
    replay.good("prismtrace", "validate", "bare.parquet")
    assert replay.call("prismreplay", "doctor", "--json").stdout.startswith("{")


@pytest.mark.slow
def test_the_cuda_extra_has_what_compiles(environment: Callable[..., Environment]) -> None:
    cuda = environment("cuda")
    code = (
        "from prismreplay.plugin.compiling import source_folder;"
        "print(*sorted(p.name for p in source_folder().iterdir()))"
    )
    assert "ring.cu" in cuda.good("python", "-c", code)
