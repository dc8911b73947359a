"""Spools: what a running program writes beside itself, one file per rank, until it is assembled.

A spool is a sequence of frames, each written whole: a mark, the length and checksum of what
follows, and a list of records as MessagePack. A record is a mapping (a *fact*: who writes,
which groups and streams there are) or an array: a node, or a later word about a node. Whoever is
killed while writing leaves whole frames and at most one broken one, which reading leaves out.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from prismtrace.errors import InputFileError, ValidationError
from prismtrace.input_files import require_readable, unreadable
from prismtrace.schema import Kind

__all__ = [
    "AMENDED",
    "COMPUTE",
    "NODE",
    "NODE_FIELDS",
    "SPOOL_SUFFIX",
    "TAG",
    "TIMED",
    "Spool",
    "frame_of",
    "read_spool",
]

SPOOL_SUFFIX = ".spool"
SPOOL_VERSION = 1

NODE, TIMED, AMENDED, COMPUTE = 0, 1, 2, 3
"""First entry of an array: a node; (index, start_ns, dur_ns); (index, {field: value}); a node that
computes, with fewer fields."""

TAG = 2**32
"""A message with tag t may be numbered from t × TAG: messages of different tags may overtake
each other, so each tag counts for itself."""

NODE_FIELDS = (
    "index", "kind", "name", "stream", "batch", "step", "microbatch", "chunk", "phase", "group",
    "seq", "peer", "bytes", "dtype", "reduce_op", "start_ns", "dur_ns", "deps",
)  # fmt: skip
"""What follows in a node. `stream` and `group` are numbers of facts; the rest as in the format."""

_COMPUTE_KIND = Kind.COMPUTE.value
_NO_COMMUNICATION = (None,) * 6

_FRAME = struct.Struct("<4sII")
_MARK = b"PSP1"


def frame_of(records: Iterable[Any]) -> bytes:
    """Records as one frame."""
    payload = msgspec.msgpack.encode(records)
    return _FRAME.pack(_MARK, len(payload), zlib.crc32(payload)) + payload


@dataclass
class Spool:
    """What one rank wrote.

    `nodes` are arrays of `NODE_FIELDS`, in no particular order. `groups` and `streams` are the
    facts about them by number. `ended` tells whether the writer was closed: otherwise the
    program was cut off, and what it did last is missing. `broken_bytes` at the end of the file
    were no whole frame.
    """

    path: Path
    facts: dict[str, Any]
    nodes: list[list[Any]] = field(default_factory=list)
    timed: list[list[Any]] = field(default_factory=list)
    amended: list[list[Any]] = field(default_factory=list)
    groups: dict[int, dict[str, Any]] = field(default_factory=dict)
    streams: dict[int, dict[str, Any]] = field(default_factory=dict)
    ended: bool = False
    broken_bytes: int = 0

    @property
    def rank(self) -> int:
        """The rank that wrote it."""
        return int(self.facts["rank"])

    def add(self, record: Any) -> None:
        """Take in one record."""
        if isinstance(record, dict):
            self._learn(record)
        else:
            tag = record[0]
            if tag == COMPUTE:
                index, name, stream, step, microbatch, chunk, phase, start, duration, deps = record[
                    1:
                ]
                self.nodes.append(
                    [
                        index, _COMPUTE_KIND, name, stream, None, step, microbatch, chunk, phase,
                        *_NO_COMMUNICATION, start, duration, deps,
                    ]
                )  # fmt: skip
            else:
                (self.nodes, self.timed, self.amended)[tag].append(record[1:])

    def _learn(self, fact: dict[str, Any]) -> None:
        if "group" in fact:
            self.groups.setdefault(fact["group"], {}).update(fact)
        elif "stream" in fact:
            self.streams[fact["stream"]] = fact
        elif fact.get("ended"):
            self.ended = True
        else:
            self.facts.update(fact)


def read_spool(path: str | os.PathLike[str]) -> Spool:
    """Read the whole frames of a spool.

    Raises:
        InputFileError: unreadable, or no spool.
        ValidationError: written by another version, or records that make no sense.
    """
    require_readable(path)
    shown = Path(path)
    try:
        data = shown.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error
    spool = Spool(shown, {})
    position = 0
    try:
        for payload, end in _frames(data):
            for record in msgspec.msgpack.decode(payload):
                spool.add(record)
            position = end
    except (msgspec.DecodeError, LookupError, TypeError, ValueError) as error:
        raise ValidationError(
            "a spool with records that make no sense",
            where=f"{path} after byte {position}",
            hint="another program may have written into it: record again",
        ) from error
    if not spool.facts:
        raise InputFileError(
            "not a spool, or one of a program that was killed before it recorded anything",
            where=str(path),
            hint="a spool is what SpanWriter and `prismreplay record` write, one file per rank",
        )
    version = spool.facts.get("spool")
    if version != SPOOL_VERSION:
        raise ValidationError(
            f"a spool of version {version}; this version reads {SPOOL_VERSION}",
            where=str(path),
            hint="assemble with the version of prismllm-toolkit that recorded it",
        )
    spool.broken_bytes = len(data) - position
    return spool


def _frames(data: bytes) -> Iterator[tuple[bytes, int]]:
    """Payload and end of every whole frame up to the first that is not."""
    position = 0
    while position + _FRAME.size <= len(data):
        mark, length, checksum = _FRAME.unpack_from(data, position)
        begin = position + _FRAME.size
        payload = data[begin : begin + length]
        if mark != _MARK or len(payload) < length or zlib.crc32(payload) != checksum:
            return
        position = begin + length
        yield payload, position
