"""The package as people get it: built, and installed where nothing else is.

An environment holds the wheel and links to what its metadata asks for, taken from the packages
that the tests themselves run with. What a command needs and the metadata does not name is
missing there, as it would be after `pip install`; no network is needed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

NAME = "prismllm-toolkit"


def build(source: Path, target: Path) -> dict[str, Path]:
    """The sdist and the wheel of a source tree, by what their names end in."""
    pytest.importorskip("hatchling", reason="hatchling builds the package")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(target)],
        cwd=source,
        check=True,
        capture_output=True,
    )
    return {path.suffix: path for path in target.iterdir()}


@dataclass(frozen=True)
class Environment:
    """An environment in which the wheel is installed, and a folder to work in."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def work(self) -> Path:
        path = self.folder / "work"
        path.mkdir(exist_ok=True)
        return path

    def call(self, *words: object, **more: str) -> subprocess.CompletedProcess[str]:
        """Run a command of the environment as a person would, away from any checkout."""
        program, *rest = map(str, words)
        kept = {name: text for name, text in os.environ.items() if not name.startswith("PYTHON")}
        path = f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        return subprocess.run(
            [str(self.folder / "bin" / program), *rest],
            cwd=self.work,
            env={**kept, "PATH": path, "NO_COLOR": "1", **more},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )

    def good(self, *words: object) -> str:
        """What a command prints that must succeed without a word on stderr."""
        done = self.call(*words)
        assert (done.returncode, done.stderr) == (0, ""), done
        return done.stdout


def install(wheel: Path, folder: Path, extras: tuple[str, ...]) -> Environment:
    """An environment with the wheel, what it requires with these extras, and nothing else."""
    venv.create(folder, symlinks=True, with_pip=False)
    made = Environment(folder)
    pip = [sys.executable, "-m", "pip", "--python", made.python, "install"]
    alone = ["--no-deps", "--no-index", "--no-compile", wheel]
    subprocess.run([*map(str, [*pip, *alone])], check=True, capture_output=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (info,) = site.glob(f"{NAME.replace('-', '_')}-*.dist-info")
    for needed in _requirements(Distribution.at(info), extras).values():
        for entry in _top_level(needed):
            link = site / entry.name
            if not link.exists():
                link.symlink_to(entry)
    return made


def _requirements(root: Distribution, extras: tuple[str, ...]) -> dict[str, Distribution]:
    """All distributions that `root` with `extras` needs, directly or not."""
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, tuple[str, ...]]] = set()
    todo = [(root, extras)]
    while todo:
        owner, wanted = todo.pop()
        for line in owner.requires or []:
            need = Requirement(line)
            if need.marker and not any(
                need.marker.evaluate({"extra": extra}) for extra in ("", *wanted)
            ):
                continue
            name, more = canonicalize_name(need.name), tuple(sorted(need.extras))
            if (name, more) in seen:
                continue
            seen.add((name, more))
            if name == NAME:
                todo.append((root, more))
                continue
            found[name] = _installed(need)
            todo.append((found[name], more))
    return found


def _installed(need: Requirement) -> Distribution:
    try:
        found = distribution(need.name)
    except PackageNotFoundError:
        pytest.skip(f"{need.name} is not installed here")
    assert need.specifier.contains(found.version, prereleases=True), (need, found.version)
    return found


def _top_level(owner: Distribution) -> Iterator[Path]:
    """What a distribution put into site-packages: its packages, modules and metadata."""
    names = {file.parts[0] for file in owner.files or ()}
    for name in sorted(names - {"..", "__pycache__"}):
        yield Path(str(owner.locate_file(name)))
