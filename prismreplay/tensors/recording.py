"""Writing the contents of communications while a graph is collected.

A recording is a folder:

    manifest.json                  what job it is, which operations are in it, whether it is whole
    index-00000.parquet            one row per input tensor: whose, of which operation, where it is
    shard-00000.safetensors        the tensors, each under the SHA-256 of its contents
    store.jsonl                    what ranks did with the job's key-value store, if they did

Equal tensors are stored once: identical replicas cost one row each. A shard and the index of
what was recorded meanwhile appear together, whole, so an interrupted recording can be read up to
its last shard.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from prismreplay.collect.handover import bytes_of
from prismreplay.runtime.operations import Call, Op, TensorSpec
from prismreplay.tensors.choices import RecordTensors
from prismreplay.tensors.scope import FORMAT, MANIFEST, is_large
from prismreplay.tensors.shards import ShardWriter
from prismreplay.tensors.store_log import StoreEntry, write_store_log
from prismtrace.errors import OutputError
from prismtrace.output import atomic_output, output_error, temporary_prefix
from prismtrace.ranks import format_ranks

__all__ = [
    "INDEX_SCHEMA",
    "RecordingSummary",
    "TensorRecorder",
    "digest_of",
]

Tensor = Any
"""A torch.Tensor; torch carries no types that a strict checker accepts."""

SHARD_BYTES = 256 << 20
_MOST_KNOWN = 1_000_000  # tensors that equal ones are looked for among: some 200 MB
_MOST_ROWS = 250_000  # of the index that memory holds

_INDEX: dict[str, pl.DataType] = {
    "rank": pl.Int32(),
    "group": pl.Categorical(),
    "seq": pl.Int64(),
    "src": pl.Int32(),
    "dst": pl.Int32(),
    "call": pl.Categorical(),
    "input": pl.Int32(),
    "dtype": pl.Categorical(),
    "shape": pl.List(pl.Int64()),
    "splits": pl.List(pl.Int64()),
    "shard": pl.Int32(),
    "sha256": pl.Binary(),
}
INDEX_SCHEMA = pl.Schema(_INDEX)
"""Columns of the index. `src` and `dst` are null for collectives, `shard` for empty tensors;
`splits` are those of an uneven all_to_all."""


@dataclass(frozen=True)
class RecordingSummary:
    """What was recorded. Sizes in bytes."""

    folder: Path
    operations: int
    tensors: int
    nbytes: int
    """Of all tensors."""
    stored_bytes: int
    """Of those on disk: equal ones count once."""
    shards: int
    complete: bool


def digest_of(tensor: Tensor, spec: TensorSpec) -> bytes:
    """SHA-256 of a contiguous CPU tensor: of its element type, its shape and its bytes."""
    digest = hashlib.sha256(f"{spec.dtype.value}{list(spec.shape)}".encode())
    digest.update(bytes_of(tensor))
    return digest.digest()


class TensorRecorder:
    """Writes inputs as they come; memory holds one tensor and the rows of one shard."""

    def __init__(
        self,
        folder: Path,
        *,
        choice: RecordTensors,
        world_size: int,
        sandbox: Sequence[int] = (),
        job: Mapping[str, Any] | None = None,
        most_bytes: int | None = None,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        """Begin a recording that takes the place of `folder` when it is finished.

        Args:
            folder: where it goes; nothing, an empty folder, or an earlier recording.
            choice: `all`, or those that a rank of `sandbox` takes part in.
            world_size: ranks of the job.
            sandbox: global ranks.
            job: what else the manifest says of the job.
            most_bytes: operations with more are left out, see `is_large`; None: none are.
            shard_bytes: size from which a shard is closed.

        Raises:
            OutputError: something else is at `folder`, or it cannot be written.
        """
        self.folder = folder
        _require_free(folder)
        try:
            self._draft = Path(
                tempfile.mkdtemp(prefix=temporary_prefix(folder), suffix=".tmp", dir=folder.parent)
            )
        except OSError as error:
            raise output_error(folder, error.errno or 0) from error
        self._sandbox = None if choice is RecordTensors.ALL else frozenset(sandbox)
        self._most_bytes = most_bytes
        self._shard_bytes = shard_bytes
        self._shard: ShardWriter | None = None
        self._parts = 0
        self._rows: list[tuple[Any, ...]] = []
        self._known: dict[bytes, int] = {}
        self._groups: dict[str, str] = {}
        self._store_log: list[StoreEntry] = []
        self._counts = {"operations": 0, "tensors": 0, "nbytes": 0, "stored_bytes": 0}
        self._about = {
            "format": FORMAT,
            "choice": choice.value,
            "world_size": world_size,
            "sandbox": format_ranks(tuple(sandbox)),
            **({} if most_bytes is None else {"most_bytes": most_bytes}),
            **(job or {}),
        }
        try:
            self._write_manifest(complete=False)
        except BaseException:
            self.discard()
            raise

    def wants(self, rank: int, op: Op) -> bool:
        """True when the inputs of this operation are to be recorded."""
        if not op.inputs or op.seq is None:
            return False
        if self._most_bytes is not None and is_large(op, self._most_bytes):
            return False
        if self._sandbox is None:
            return True
        ends = (rank, op.peer) if op.call is Call.SEND else op.group.ranks
        return not self._sandbox.isdisjoint(ends)

    def record(self, rank: int, op: Op, inputs: Sequence[Tensor]) -> None:
        """Write the inputs of an operation that `wants` is true for.

        Raises:
            OutputError: the disk is full.
        """
        self._groups.setdefault(op.group.key, format_ranks(op.group.ranks))
        ends = (rank, op.peer) if op.call is Call.SEND else (None, None)
        self._counts["operations"] += 1
        for place, (tensor, spec) in enumerate(zip(inputs, op.inputs, strict=True)):
            plain = tensor.detach().cpu().contiguous()
            digest = digest_of(plain, spec)
            shard = self._stored(digest, plain, spec) if spec.nbytes else None
            self._counts["tensors"] += 1
            self._counts["nbytes"] += spec.nbytes
            self._rows.append(
                (
                    rank,
                    op.group.key,
                    op.seq,
                    *ends,
                    op.call.value,
                    place,
                    spec.dtype.value,
                    list(spec.shape),
                    list(op.input_splits) or None,
                    shard,
                    digest,
                )
            )
        full = self._shard is not None and self._shard.nbytes >= self._shard_bytes
        if full or len(self._rows) >= _MOST_ROWS:
            self._finish_part()

    def record_store(self, rank: int, operation: str, arguments: tuple[Any, ...]) -> None:
        """Note an operation of the key-value store that was done."""
        self._store_log.append(StoreEntry(rank, operation, arguments))

    def close(self, *, complete: bool = True) -> RecordingSummary:
        """Finish the recording and put it in its place.

        Args:
            complete: False when the program did not run to its end.

        Raises:
            OutputError: the disk is full, or something appeared at the folder's place.
        """
        self._finish_part()
        if self._store_log:
            write_store_log(self._draft, self._store_log)
        self._write_manifest(complete=complete)
        _require_free(self.folder)
        try:
            if self.folder.exists():
                shutil.rmtree(self.folder)
            self._draft.chmod(0o755)
            self._draft.rename(self.folder)
        except OSError as error:
            raise output_error(self.folder, error.errno or 0) from error
        return RecordingSummary(
            folder=self.folder, shards=self._parts, complete=complete, **self._counts
        )

    def close_interrupted(self) -> RecordingSummary | None:
        """After a failure: keep what is there beside the name it would have had, if anything.

        None if there is nothing, or no space for it: then nothing is left behind.
        """
        self.folder = self.folder.with_suffix(".partial.tensors")
        if self._counts["tensors"]:
            with suppress(OutputError):
                return self.close(complete=False)
        if self._parts:
            # The disk is full: the shard that was begun gives way to those that are whole.
            self._drop_begun()
            with suppress(OutputError):
                return self.close(complete=False)
        self.discard()
        return None

    def discard(self) -> None:
        """Give the recording up and leave nothing behind."""
        self._drop_begun()
        shutil.rmtree(self._draft, ignore_errors=True)

    def _drop_begun(self) -> None:
        if self._shard is not None:
            self._shard.discard()
            self._shard = None
        self._rows = []

    def _stored(self, digest: bytes, tensor: Tensor, spec: TensorSpec) -> int:
        """Number of the shard that holds the tensor, which is written unless it is there."""
        known = self._known.get(digest)
        if known is not None:
            return known
        key = digest.hex()
        if self._shard is not None and not (
            self._shard.fits(key, spec)
            and (not self._shard.nbytes or self._shard.nbytes + spec.nbytes <= self._shard_bytes)
        ):
            self._finish_part()
        if self._shard is None:
            self._shard = ShardWriter(self._draft / f"shard-{self._parts:05d}.safetensors")
        self._shard.add(key, tensor, spec)
        self._counts["stored_bytes"] += spec.nbytes
        if len(self._known) >= _MOST_KNOWN:
            # The oldest one; should it come again, it is stored again.
            del self._known[next(iter(self._known))]
        self._known[digest] = self._parts
        return self._parts

    def _finish_part(self) -> None:
        """Close the shard, then write the index of what was recorded since the last one.

        Rows of an operation whose first inputs lie in the shard are kept together with it even
        when its last ones begin the next shard: the shard number says where they are.
        """
        if self._shard is not None:
            self._shard.close()
            self._shard = None
        elif not self._rows:
            return
        rows = pl.DataFrame(self._rows, schema=INDEX_SCHEMA, orient="row")
        with atomic_output(self._draft / f"index-{self._parts:05d}.parquet") as path:
            rows.write_parquet(path)
        self._rows = []
        self._parts += 1

    def _write_manifest(self, *, complete: bool) -> None:
        manifest = {
            **self._about,
            "complete": complete,
            "parts": self._parts,
            "groups": self._groups,
            **self._counts,
        }
        with atomic_output(self._draft / MANIFEST) as path:
            path.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def _require_free(folder: Path) -> None:
    """Refuse to replace anything but a recording or an empty folder."""
    if not folder.exists() and not folder.is_symlink():
        return
    with suppress(OSError, ValueError, TypeError, KeyError):
        if folder.is_dir() and not any(folder.iterdir()):
            return
        if json.loads((folder / MANIFEST).read_bytes())["format"] == FORMAT:
            return
    raise OutputError(
        "the folder for tensors holds something else",
        where=str(folder),
        hint="name another output, or move the folder away",
    )
