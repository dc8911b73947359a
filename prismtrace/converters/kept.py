"""Parts of a conversion that outlive it: what one file became, beside the result.

An interrupted conversion goes on from them, and the workers of a cluster hand theirs over
this way. A part is two files, the nodes (Parquet) and the record of the rest, named after what
they were made from and how. The record comes last, and both come whole or not at all.
"""

from __future__ import annotations

import io
import pickle
import shutil
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any
from uuid import uuid4

from prismtrace import __version__
from prismtrace.claiming import Claim
from prismtrace.converters.archives import name_of
from prismtrace.converters.files import convert_file
from prismtrace.converters.parts import disk_errors
from prismtrace.converters.rank_trace import RankOptions, RankTrace
from prismtrace.errors import OutputError, SourceFormatError
from prismtrace.output import atomic_output, output_error, temporary_prefix, writable_target

__all__ = ["count_kept", "drop_kept", "kept_folder", "load_part", "make_part", "part_key"]

_RECORD = ".record"
# A network file system may show a new file to other hosts a little later.
_VISIBLE_S = 10.0
_NOT_A_RECORD = (
    pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, ImportError,
    IndexError, KeyError,
)  # fmt: skip
_NUMPY_NAMES = ("_reconstruct", "_frombuffer", "ndarray", "dtype", "scalar")


def _folder_of(target: Path) -> Path:
    real = writable_target(target)
    return real.parent / f"{temporary_prefix(real)}kept.parts"


@contextmanager
def kept_folder(target: Path, *, resume: bool) -> Iterator[Path]:
    """The folder of the parts for `target`; it stays until `drop_kept`, unless it is empty.

    Args:
        target: the result.
        resume: use the parts that an earlier conversion left; else they are removed first.

    Raises:
        OutputError: nothing can be written beside `target`, or another conversion uses them.
    """
    folder = _folder_of(target)
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise output_error(target, error.errno or 0) from error
    with closing(Claim(folder)):
        if not resume:
            for part in folder.iterdir():
                shutil.rmtree(part) if part.is_dir() else part.unlink()
        try:
            yield folder
        finally:
            # An empty one is of no use to anybody.
            with suppress(OSError):
                folder.rmdir()


def drop_kept(target: Path) -> None:
    """Remove what an interrupted conversion has left for `target`; not what another one uses."""
    folder = _folder_of(target)
    if folder.is_dir():
        with suppress(OutputError), closing(Claim(folder)):
            shutil.rmtree(folder, ignore_errors=True)


def count_kept(target: Path) -> int:
    """How many whole parts for `target` an interrupted conversion has left."""
    with suppress(OSError, OutputError):
        return len(list(_folder_of(target).glob(f"*{_RECORD}")))
    return 0


def part_key(path: Path, options: RankOptions, given_rank: int | None) -> str:
    """A name for what a file becomes: changes with the file, the options and this package."""
    found = path.stat()
    file = (_place_of(path), found.st_size, found.st_mtime_ns)
    beside = tuple(
        replace(other, path=_place_of(Path(other.path))) for other in options.execution_traces
    )
    options = replace(options, execution_traces=beside)
    made_from = repr((file, options, given_rank, __version__))
    return blake2b(made_from.encode(), digest_size=16).hexdigest()


def _place_of(path: Path) -> str:
    """Where a file is, or an archive's member, which is unpacked elsewhere each time."""
    name = name_of(path)
    return str(path.resolve()) if name == str(path) else name


def make_part(
    path: Path,
    folder: Path,
    key: str,
    options: RankOptions,
    given_rank: int | None,
    version: str,
) -> None:
    """Read `path` and leave its part in `folder`, unless it is there already.

    May run on another machine that sees the same files; `version` is that of the caller.

    Raises:
        TraceError: the file cannot be read or used.
        SourceFormatError: this machine has another version, and would make other bytes.
        OutputError: the part cannot be written.
    """
    if version != __version__:
        raise SourceFormatError(
            f"a worker runs prismtrace {__version__}, this is {version}",
            where=str(path),
            hint="install the same version on the cluster",
        )
    if not folder.is_dir():
        raise OutputError(
            "a worker does not see the folder of the result",
            where=str(folder.parent),
            hint="write to storage that all workers share, and read from it",
        )
    record = folder / f"{key}{_RECORD}"
    if record.exists():
        return
    # Another worker may still be at it, if it only seemed to be dead.
    traces = convert_file(path, folder / f"{key}-{uuid4().hex}", options, given_rank)
    with disk_errors(folder), atomic_output(record) as temporary:
        temporary.write_bytes(pickle.dumps(traces, protocol=5))


def load_part(path: Path, folder: Path, key: str) -> tuple[RankTrace, ...]:
    """What `make_part` left of `path` in `folder`.

    Raises:
        OutputError: it is not there, or is not what `make_part` writes.
    """
    record = folder / f"{key}{_RECORD}"
    deadline = time.monotonic() + _VISIBLE_S
    while not record.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    damaged = OutputError(
        "a part of an earlier conversion is damaged",
        where=str(record),
        hint="convert again without --resume",
    )
    try:
        found = _Reader(io.BytesIO(record.read_bytes())).load()
    except FileNotFoundError as error:
        raise OutputError(
            "what a worker wrote is not here",
            where=str(record),
            hint="write the result to storage that all workers share",
        ) from error
    except _NOT_A_RECORD as error:
        raise damaged from error
    if not isinstance(found, tuple) or not all(isinstance(one, RankTrace) for one in found):
        raise damaged
    # Not where the record says: the folder may be mounted elsewhere there.
    traces = tuple(
        replace(trace, path=path, nodes=folder / Path(trace.nodes).name) for trace in found
    )
    if not all(trace.nodes.exists() for trace in traces):
        raise damaged
    return traces


class _Reader(pickle.Unpickler):
    """Reads records: classes of this package and arrays. Pickle keeps shared objects shared.

    Nothing else is looked up, so that a foreign file in the folder runs no code.
    """

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("prismtrace."):
            found = super().find_class(module, name)
            if isinstance(found, type):
                return found
        if module.partition(".")[0] == "numpy" and name in _NUMPY_NAMES:
            return super().find_class(module, name)
        if module.startswith("pathlib") and name in ("PosixPath", "WindowsPath"):
            return Path
        raise pickle.UnpicklingError(f"{module}.{name} is not part of a record")
