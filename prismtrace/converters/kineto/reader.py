"""Reading one PyTorch profiler trace, of whatever version and in whatever state.

    file = read_kineto(Path("rank0.json.gz"))
    file.metadata.rank, file.events, file.comms, file.syncs, file.counts

The file is decompressed, cut and decoded in pieces (`content`, `text`, `events`), and only the
columns conversion needs are kept (`columns`, `records`), so memory stays far below the size of
the uncompressed text. Times are exact integers: nanoseconds since the Unix epoch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from prismtrace.converters.content import read_blocks
from prismtrace.converters.kineto.columns import EventColumns
from prismtrace.converters.kineto.events import EventDecoder
from prismtrace.converters.kineto.metadata import KinetoGroup, KinetoMetadata, parse_metadata
from prismtrace.converters.kineto.text import EventText
from prismtrace.converters.profile import Profile
from prismtrace.converters.sniff import SourceFormat, sniff, unsupported
from prismtrace.errors import InputFileError

__all__ = ["KinetoFile", "KinetoGroup", "KinetoMetadata", "read_kineto", "read_kineto_blocks"]

_GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class KinetoFile(Profile):
    """One rank's trace as tables; `events` are in file order and have more columns: pid, device,
    external_id, rf_id.
    """

    metadata: KinetoMetadata


def read_kineto(
    path: Path,
    *,
    keep_args: Sequence[str] = (),
    on_bytes: Callable[[int], None] | None = None,
) -> KinetoFile:
    """Read the Kineto trace at `path`, gzipped or not.

    `keep_args` names event arguments to keep as columns; `on_bytes` receives the bytes read
    from disk since its last call. Invalid text is repaired where it can be, and counted;
    a truncated file gives the events before the cut and `counts["truncated"] == 1`.

    Raises InputFileError when the file cannot be read, holds no event list or impossible times,
    SourceFormatError when it is another tool's, MixedRanksError when two ranks wrote into it.
    """
    found = sniff(path)
    if found not in {SourceFormat.KINETO, SourceFormat.UNKNOWN}:
        raise unsupported(path, found)
    counts: Counter[str] = Counter()
    blocks = read_blocks(path, counts=counts, on_bytes=on_bytes)
    return read_kineto_blocks(blocks, path=path, keep_args=keep_args, counts=counts)


def read_kineto_blocks(
    blocks: Iterable[bytes],
    *,
    path: Path,
    keep_args: Sequence[str] = (),
    counts: Counter[str] | None = None,
) -> KinetoFile:
    """Read a trace from its uncompressed text, in blocks of any size.

    `path` only names the text in errors and in the result. Raises like read_kineto.
    """
    tally: Counter[str] = Counter() if counts is None else counts
    keep_args = tuple(dict.fromkeys(keep_args))
    text = EventText(blocks, EventDecoder(keep_args), tally, str(path))
    columns = EventColumns(keep_args, tally)
    for events in text.batches():
        columns.append(events)
    metadata = parse_metadata(text.head, text.tail, tally)
    table = columns.events(metadata.base_time_ns)
    if table is None:
        raise InputFileError(
            f"times lie beyond the year 2262 (baseTimeNanoseconds is {metadata.base_time_ns})",
            where=str(path),
            hint="the clock of the host was wrong, or the file was changed: record again",
        )
    return KinetoFile(
        path=path,
        metadata=metadata,
        events=table,
        comms=columns.comms(),
        syncs=columns.syncs(),
        counts={name: n for name, n in sorted(tally.items()) if n or name in {"events", "kept"}},
        has_gpu=bool(table["cat"].is_in(_GPU_WORK).any()),
    )
