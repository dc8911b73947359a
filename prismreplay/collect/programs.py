"""The user's program: found before ranks start, run in a rank as `python` runs it."""

from __future__ import annotations

import builtins
import os
import runpy
import sys
import tokenize
import types
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import util
from importlib.machinery import SourceFileLoader
from pathlib import Path

from prismreplay.errors import ProgramError

__all__ = ["ProgramCall", "program_of"]


@dataclass(frozen=True)
class ProgramCall:
    """A script or a module, with its arguments."""

    path: str
    """Of the script, as given; or the name of the module."""
    arguments: tuple[str, ...]
    is_module: bool = False

    def check(self) -> None:
        """Find what would fail in every rank.

        Raises:
            ProgramError: it is not there, or no valid Python.
        """
        if self.is_module:
            self._check_module()
            return
        path = Path(self.path)
        if path.is_dir() and not (path / "__main__.py").is_file():
            raise ProgramError(
                "the program is a folder without __main__.py",
                where=self.path,
                hint="name the script, or use -m for a package",
            )
        if path.is_dir() or path.suffix in (".zip", ".pyz"):
            return
        if path.exists() and not path.is_file():
            # Every rank reads it, and a pipe gives it once.
            raise ProgramError(
                "the program is a pipe or a device",
                where=self.path,
                hint="write it to a file first",
            )
        try:
            with tokenize.open(path) as file:
                compile(file.read(), self.path, "exec", dont_inherit=True)
        except FileNotFoundError as error:
            raise ProgramError(
                "the program is not there",
                where=self.path,
                hint="give its path from the current folder; -m NAME runs a module",
            ) from error
        except OSError as error:
            raise ProgramError(
                f"the program cannot be read: {os.strerror(error.errno or 0)}", where=self.path
            ) from error
        except SyntaxError as error:
            line = "" if error.lineno is None else f":{error.lineno}"
            raise ProgramError(
                f"the program is no valid Python: {error.msg}",
                where=f"{self.path}{line}",
                hint=f"the line is: {error.text.strip()}" if error.text else None,
            ) from error
        except ValueError as error:  # null bytes
            raise ProgramError(f"the program is no Python: {error}", where=self.path) from error

    def _check_module(self) -> None:
        top = self.path.partition(".")[0]
        here = os.getcwd()  # noqa: PTH109  what Python puts into sys.path
        sys.path.insert(0, here)
        try:
            found = util.find_spec(top)
        except (ImportError, ValueError):
            found = None
        finally:
            sys.path.remove(here)
        if found is None:
            raise ProgramError(
                "no such module", where=self.path, hint="check the name and PYTHONPATH"
            )

    def run(self) -> None:
        """Run it as `__main__` of this process; what it raises comes out."""
        main = types.ModuleType("__main__")
        main.__dict__["__builtins__"] = builtins
        sys.modules["__main__"] = main
        if self.is_module:
            sys.argv = ["-m", *self.arguments]
            sys.path.insert(0, os.getcwd())  # noqa: PTH109
            # What `python -m` itself calls; the public function puts modules into a copy.
            run_module = runpy._run_module_as_main  # type: ignore[attr-defined]  # noqa: SLF001
            run_module(self.path)
            return
        sys.argv = [self.path, *self.arguments]
        path = Path(self.path)
        if path.is_dir() or path.suffix in (".zip", ".pyz"):
            runpy.run_path(self.path, run_name="__main__")
            return
        # As Python: modules are beside the script that a link leads to.
        script = path.parent / path.readlink() if path.is_symlink() else path
        sys.path.insert(0, os.path.realpath(script.parent))
        full = os.path.abspath(path)  # noqa: PTH100  as Python: without following links
        main.__file__ = full
        main.__loader__ = SourceFileLoader("__main__", full)
        code = compile(path.read_bytes(), full, "exec", dont_inherit=True)
        exec(code, main.__dict__)  # noqa: S102  this is what the user asked for


_FLAGS = frozenset("uBOsEIbdqSvX")


def program_of(words: Sequence[str]) -> ProgramCall:
    """What the words after `--` call: `train.py args`, `-m module args`, `python train.py args`.

    Raises:
        ProgramError: they name no program.
    """
    rest = list(words)
    if rest and Path(rest[0]).name.startswith("python"):
        rest.pop(0)
        while rest and rest[0] != "-m" and rest[0].startswith("-") and set(rest[0][1:]) <= _FLAGS:
            rest.pop(0)
    if not rest:
        raise ProgramError(
            "no program is given", hint="it comes after two dashes: ... -- train.py --steps 3"
        )
    if Path(rest[0]).name in ("torchrun", "accelerate", "deepspeed", "srun", "mpirun"):
        raise ProgramError(
            "the ranks are started here, without a launcher",
            where=rest[0],
            hint="give the script and its own arguments only, and --world-size",
        )
    if rest[0] == "-m":
        if len(rest) == 1:
            raise ProgramError("-m needs the name of a module")
        return ProgramCall(rest[1], tuple(rest[2:]), is_module=True)
    if rest[0] == "-c":
        raise ProgramError("-c is not supported", hint="put the program into a file")
    return ProgramCall(rest[0], tuple(rest[1:]))
