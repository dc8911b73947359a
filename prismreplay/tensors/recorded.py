"""Reading recorded contents of communications, one tensor at a time."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import polars as pl
import torch
from safetensors import SafetensorError, safe_open

from prismreplay.collect.handover import torch_dtype
from prismreplay.errors import TensorRecordingError
from prismreplay.runtime.operations import Call, Op, TensorSpec
from prismreplay.tensors.recording import INDEX_SCHEMA, digest_of
from prismreplay.tensors.scope import AGAIN, read_manifest
from prismtrace.errors import InputFileError, PrismError
from prismtrace.group_names import group_label
from prismtrace.input_files import require_readable
from prismtrace.ranks import format_ranks, parse_ranks
from prismtrace.reading import read_table
from prismtrace.schema import DType

__all__ = ["RecordedTensor", "RecordedTensors"]

Tensor = Any
"""A torch.Tensor; torch carries no types that a strict checker accepts."""

_OPEN_SHARDS = 8
_INDEXED_RANKS = 64


@dataclass(frozen=True, slots=True)
class RecordedTensor:
    """Where one input tensor of an operation is."""

    call: Call
    spec: TensorSpec
    splits: tuple[int, ...]
    """Rows along its first dimension for each member, in an uneven all_to_all."""
    shard: int | None
    """None: it has no elements."""
    sha256: bytes
    """Of element type, shape and contents; see `prismreplay.tensors.recording.digest_of`."""


class RecordedTensors:
    """A recording. Opening reads its index; tensors are read when asked for.

        recorded = RecordedTensors("bare.tensors")
        recorded.inputs(rank=3, group="0/0", seq=17)                  # of a collective
        recorded.sent(group="0/2", src=3, dst=7, seq=4)               # of a send

    Groups are named by `Group.key`: ``generation/name``.
    """

    def __init__(self, folder: str | os.PathLike[str], *, verify: bool = True) -> None:
        """Open a recording.

        Args:
            folder: as `collect` wrote it.
            verify: compare every tensor that is read with its SHA-256 (1 to 2 GB a second).

        Raises:
            TensorRecordingError: it is none, or damaged, or of another version.
        """
        self.folder = Path(folder)
        self.verify = verify
        self.manifest = read_manifest(self.folder)
        self.world_size = int(self.manifest["world_size"])
        self.sandbox = frozenset(parse_ranks(str(self.manifest.get("sandbox", ""))))
        self.complete = bool(self.manifest.get("complete"))
        self.groups: dict[str, tuple[int, ...]] = {
            key: tuple(parse_ranks(ranks)) for key, ranks in self.manifest["groups"].items()
        }
        self._rows = self._read_index()
        self._rank_index = lru_cache(maxsize=_INDEXED_RANKS)(self._index_of)
        self._open = lru_cache(maxsize=_OPEN_SHARDS)(self._open_shard)

    def require_job(
        self, *, world_size: int, groups: Mapping[str, Sequence[int]] | None = None
    ) -> None:
        """Refuse a recording of another job.

        Raises:
            TensorRecordingError: the world or a group has other ranks.
        """
        if world_size != self.world_size:
            raise self._error(
                f"recorded with {self.world_size} ranks, and this job has {world_size}",
                "record the tensors of this job",
            )
        for key, ranks in (groups or {}).items():
            found = self.groups.get(key)
            if found is not None and found != tuple(ranks):
                raise self._error(
                    f"group {key} had the ranks {list(found)}, and has {list(ranks)} in this job",
                    "record the tensors of this job",
                )

    def has(self, rank: int, group: str, seq: int) -> bool:
        """True when inputs of that collective of that rank are recorded."""
        return (group, seq, None, None) in self._rank_index(rank)

    def inputs(self, rank: int, group: str, seq: int) -> list[Tensor]:
        """The inputs of a collective of one rank.

        Raises:
            TensorRecordingError: they are not in the recording, or damaged.
        """
        return [self.read(entry) for entry in self.entries(rank, group, seq)]

    def sent(self, group: str, src: int, dst: int, seq: int) -> list[Tensor]:
        """What a send carried.

        Raises:
            TensorRecordingError: it is not in the recording, or damaged.
        """
        return [self.read(entry) for entry in self.sent_entries(group, src, dst, seq)]

    def entries(self, rank: int, group: str, seq: int) -> tuple[RecordedTensor, ...]:
        """Where the inputs of a collective of one rank are; for p2p see `sent_entries`.

        Raises:
            TensorRecordingError: they are not in the recording.
        """
        return self._found(rank, (group, seq, None, None))

    def sent_entries(self, group: str, src: int, dst: int, seq: int) -> tuple[RecordedTensor, ...]:
        """Where what a send carried is.

        Raises:
            TensorRecordingError: it is not in the recording.
        """
        return self._found(src, (group, seq, src, dst))

    def require_equal(self, rank: int, op: Op, inputs: Sequence[Tensor]) -> None:
        """Refuse inputs that differ from the recorded ones: the program has taken another way.

        Raises:
            TensorRecordingError: names the first input that differs.
        """
        send = op.call is Call.SEND
        ends = (rank, op.peer) if send else (None, None)
        found = self._found(rank, (op.group.key, op.seq, *ends))
        self._require_form(rank, op, found)
        for place, (tensor, entry) in enumerate(zip(inputs, found, strict=True)):
            plain = tensor.detach().cpu().contiguous()
            if digest_of(plain, entry.spec) != entry.sha256:
                raise TensorRecordingError(
                    f"input {place} of {op.call.value} is not what was recorded",
                    where=f"rank={rank} group={op.group.called} seq={op.seq}"
                    + (f" at {op.site}" if op.site else ""),
                    hint="the program is not deterministic, or has changed: fix its seeds, or "
                    "record its tensors again",
                )

    def read(self, entry: RecordedTensor) -> Tensor:
        """One tensor.

        Raises:
            TensorRecordingError: its shard is missing or damaged.
        """
        dtype = torch_dtype(entry.spec)
        if entry.shard is None:
            return torch.empty(entry.spec.shape, dtype=dtype)
        key = entry.sha256.hex()
        try:
            tensor = self._open(entry.shard).get_tensor(key)
        except (OSError, SafetensorError) as error:
            raise self._error(
                f"shard {entry.shard} is missing or damaged: {error}", AGAIN
            ) from error
        if tensor.dtype != dtype:
            tensor = tensor.reshape(-1).view(dtype)
        tensor = tensor.reshape(entry.spec.shape)
        if self.verify and digest_of(tensor, entry.spec) != entry.sha256:
            raise self._error(
                f"a tensor of shard {entry.shard} is damaged: its contents are not those of its "
                "checksum",
                AGAIN,
            )
        return tensor

    def _require_form(self, rank: int, op: Op, found: Sequence[RecordedTensor]) -> None:
        was = [(entry.call, entry.spec) for entry in found]
        is_now = [(op.call, spec) for spec in op.inputs]
        if was != is_now:
            raise TensorRecordingError(
                f"recorded as {_form(was)}, and the program issues {_form(is_now)}",
                where=f"{self.folder}, rank={rank} group={op.group.called} seq={op.seq}",
                hint="the recording is of another program, version or setting: record it again",
            )

    def _found(self, rank: int, key: tuple[Any, ...]) -> tuple[RecordedTensor, ...]:
        found = self._rank_index(rank).get(key)
        if found is not None:
            return found
        group, seq, src, dst = key
        members = self.groups.get(
            group
        )  # of a group in which nothing was recorded nothing is known
        called = group if members is None else group_label(group.partition("/")[2], "", members)
        what = f"rank={rank} group={called} seq={seq}" + ("" if src is None else f" to={dst}")
        reason = "" if self.complete else "; the recording was interrupted"
        if self.complete and self.sandbox:
            ranks = format_ranks(tuple(sorted(self.sandbox)))
            reason = f"; it holds what concerns the sandbox ranks {ranks}"
        raise self._error(f"holds no tensors of {what}{reason}", AGAIN)

    def _read_index(self) -> pl.DataFrame:
        parts = range(int(self.manifest.get("parts", 0)))
        names = [self.folder / f"index-{part:05d}.parquet" for part in parts]
        if not self.complete:
            # The manifest was written at the beginning; whatever is whole counts.
            names = sorted(self.folder.glob("index-*.parquet"))
        return pl.concat([INDEX_SCHEMA.to_frame(), *map(self._rows_of, names)])

    def _index_of(self, rank: int) -> dict[tuple[Any, ...], tuple[RecordedTensor, ...]]:
        """Everything of one rank: (group, seq, src, dst) -> inputs in order."""
        index: dict[tuple[Any, ...], list[RecordedTensor]] = {}
        for row in self._rows.filter(pl.col("rank") == rank).iter_rows():
            try:
                entry = RecordedTensor(
                    call=Call(row[5]),
                    spec=TensorSpec(tuple(row[8]), DType(row[7])),
                    splits=tuple(row[9] or ()),
                    shard=row[10],
                    sha256=row[11],
                )
            except (TypeError, ValueError) as error:
                raise self._error(f"the index is damaged at rank {rank}: {error}", AGAIN) from error
            entries = index.setdefault(tuple(row[1:5]), [])
            if row[6] != len(entries):
                raise self._error(f"the index is damaged at rank {rank}", AGAIN)
            entries.append(entry)
        return {key: tuple(entries) for key, entries in index.items()}

    def _rows_of(self, name: Path) -> pl.DataFrame:
        try:
            _, rows = read_table(name, "", hint=AGAIN)
        except PrismError as error:
            raise self._error(
                f"the index {name.name} is missing or damaged: {error.message}", AGAIN
            ) from error
        if rows.schema != INDEX_SCHEMA:
            raise self._error(f"the index {name.name} has other columns", AGAIN)
        return rows

    def _open_shard(self, number: int) -> Any:
        path = self.folder / f"shard-{number:05d}.safetensors"
        try:
            require_readable(path)
        except InputFileError as error:
            raise self._error(
                f"shard {number} is missing or damaged: {error.message}", AGAIN
            ) from (error)
        return safe_open(path, framework="pt")

    def _error(self, message: str, hint: str) -> TensorRecordingError:
        return TensorRecordingError(message, where=str(self.folder), hint=hint)


def _form(parts: Sequence[tuple[Call, TensorSpec]]) -> str:
    if not parts:
        return "nothing"
    shapes = ", ".join(f"{spec.dtype.value}{list(spec.shape)}" for _, spec in parts[:3])
    return f"{parts[0][0].value} of {shapes}" + (", …" if len(parts) > 3 else "")
