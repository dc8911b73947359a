"""The bytes of a file, decompressed, in blocks of bounded size or, up to a bound, as a whole.

Whether a file is gzipped is decided by its first two bytes: people rename `.json.gz` to
`.json` and back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

from prismtrace.errors import InputFileError

__all__ = ["GZIP_MAGIC", "read_blocks", "read_json", "read_whole"]

GZIP_MAGIC = b"\x1f\x8b"
_READ_BYTES = 128 * 1024
_BLOCK_BYTES = 512 * 1024
_MOST_BYTES = 1 << 30
"""Of a file that is read as a whole."""

Form = TypeVar("Form")


def read_blocks(
    path: Path,
    *,
    counts: Counter[str] | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> Iterator[bytes]:
    """Yield the content of `path` in blocks of at most 512 KiB, gunzipped where needed.

    `on_bytes` receives the bytes read from disk since its last call (they add up to the
    file's size). A gzip stream that ends early or is damaged yields what came before and is
    counted in `counts` as `damaged-gzip`. Raises InputFileError when the file cannot be read.
    """
    tally: Counter[str] = Counter() if counts is None else counts
    try:
        with path.open("rb") as file:
            pieces = _read_pieces(file, on_bytes)
            first = next(pieces, b"")
            if first.startswith(GZIP_MAGIC):
                yield from _gunzip(first, pieces, tally)
                return
            if first:
                yield first
            yield from pieces
    except OSError as error:
        raise InputFileError(
            f"cannot read the file: {error.strerror or error}",
            where=str(path),
            hint="check that the path exists, is a file and may be read",
        ) from error


def read_whole(blocks: Iterable[bytes], too_large: InputFileError) -> bytes:
    """All blocks as one; raises `too_large` when they are more than 1 GiB."""
    text = bytearray()
    for block in blocks:
        text += block
        if len(text) > _MOST_BYTES:
            raise too_large
    return bytes(text)


def read_json(
    blocks: Iterable[bytes], form: type[Form], *, name: str, where: str, smaller: str, hint: str
) -> Form:
    """A JSON document that is read as a whole.

    Args:
        blocks: the bytes.
        form: the msgspec type of what it holds.
        name: what the file should be, without an article, for errors.
        where: the file, for errors.
        smaller: what to do when it is too large.
        hint: what to do when it is something else.

    Raises:
        InputFileError: it is larger than 1 GiB, or of another form.
    """
    import msgspec

    large = InputFileError(f"a {name} of more than 1 GiB", where=where, hint=smaller)
    text = read_whole(blocks, large)
    try:
        return msgspec.json.decode(text, type=form, strict=False)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InputFileError(f"no {name}, or cut off: {error}", where=where, hint=hint) from error


def _read_pieces(file: BinaryIO, on_bytes: Callable[[int], None] | None) -> Iterator[bytes]:
    while piece := file.read(_READ_BYTES):
        if on_bytes is not None:
            on_bytes(len(piece))
        yield piece


def _gunzip(first: bytes, pieces: Iterator[bytes], counts: Counter[str]) -> Iterator[bytes]:
    # isal inflates these files about five times faster than zlib.
    from isal import isal_zlib

    damage: type[Exception] = isal_zlib.error  # type: ignore[assignment]  # its stub says instance
    gzip_wbits = 31
    stream = isal_zlib.decompressobj(wbits=gzip_wbits)
    pending = first
    while True:
        if not pending:
            pending = next(pieces, b"")
            if not pending:
                break
        try:
            block = stream.decompress(pending, _BLOCK_BYTES)
        except damage:
            counts["damaged-gzip"] += 1
            return
        if block:
            yield block
        if stream.eof:
            pending = stream.unused_data or next(pieces, b"")
            if not pending.startswith(GZIP_MAGIC):
                return  # the end, or padding after the last member
            stream = isal_zlib.decompressobj(wbits=gzip_wbits)
        else:
            pending = stream.unconsumed_tail
    while block := stream.decompress(b"", _BLOCK_BYTES):
        yield block
    if not stream.eof:
        counts["damaged-gzip"] += 1
