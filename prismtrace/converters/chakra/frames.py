"""The protobuf form: messages, each after its length; the first may be metadata of the file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from prismtrace.converters.chakra.nodes import INTEGERS, TEXTS, UNKNOWN, ChakraNodes, joined
from prismtrace.converters.chakra.wire import (
    LENGTH_DELIMITED,
    VARINT,
    AllFields,
    Block,
    Bools,
    Ints,
    Spans,
)
from prismtrace.errors import InputFileError, SourceFormatError

__all__ = ["Frames", "read_frames"]

_BLOCK_BYTES = 2 << 20
MOST_FRAME_BYTES = 64 << 20
"""Of one node. A length of gigabytes is damage, and would be waited for in memory."""

# Fields of a node.
_ID, _NAME, _TYPE, _CTRL, _DATA, _START, _DURATION, _INPUTS, _ATTRIBUTE = 1, 2, 3, 4, 5, 6, 7, 8, 10
_OLD_ATTRIBUTE = 11
_VERSION, _ABOUT = 1, 2  # of the message about the file
_VALUES = 1  # of the inputs
# Fields of an attribute that hold integers: plain ones, and those written in zigzag.
_PLAIN = (7, 9, 11, 13, 27)
_ZIGZAG = (15, 17)
_BOOL_LIST, _STRING = 28, 29
_INVOLVED = "involved_dim"
_WANTED = (*INTEGERS, *TEXTS, _INVOLVED)
_MOST_NAMES = 1 << 16
_GROUP_NODE = b"## process_group:init ##"


@dataclass
class Frames:
    """What a file of frames holds."""

    nodes: ChakraNodes
    metadata: dict[str, int | str]
    """Attributes of the file's metadata that are texts or integers."""


class _Names(dict[bytes, str]):
    """Names by their bytes. Few are different, so each is decoded once."""

    def __missing__(self, text: bytes) -> str:
        name = self[text] = text.decode(errors="replace")
        return name


@dataclass
class _Reader:
    where: str
    counts: Counter[str]
    recover: bool
    metadata: dict[str, int | str] = field(default_factory=dict)
    parts: list[ChakraNodes] = field(default_factory=list)
    frames: int = 0
    names: _Names = field(default_factory=_Names)


def read_frames(
    blocks: Iterable[bytes], *, where: str, counts: Counter[str], recover: bool = False
) -> Frames:
    """Read a file from its uncompressed bytes, in blocks of any size.

    Args:
        blocks: the bytes.
        where: the file, for errors.
        counts: `events` and what was wrong is counted here; a file that ends early is counted
            as `truncated`.
        recover: stop at a frame that is no node instead of raising, and count it.

    Raises:
        InputFileError: a frame is no Chakra node.
        SourceFormatError: written by a version before the present numbering of node types.
    """
    reader = _Reader(where, counts, recover)
    for data, begins, ends in _whole_frames(blocks, where, counts):
        if not _take(reader, Block(data), Spans(begins, ends)):
            break
    counts["events"] += reader.frames
    return Frames(joined(reader.parts), reader.metadata)


def _whole_frames(
    blocks: Iterable[bytes], where: str, counts: Counter[str]
) -> Iterator[tuple[bytes, Ints, Ints]]:
    """Pieces of the file with the places of the whole frames in them."""
    pending = bytearray()
    least = _BLOCK_BYTES
    stopped = False
    for block in blocks:
        pending += block
        if len(pending) < least:
            continue
        begins, ends, at, stopped, needed = _cut(pending, where)
        if begins:
            yield _piece(pending, begins, ends, at)
        del pending[:at]
        least = max(_BLOCK_BYTES, needed)
        if stopped:
            break
    if not stopped:
        begins, ends, at, stopped, _ = _cut(pending, where)
        if begins:
            yield _piece(pending, begins, ends, at)
        counts["truncated"] += at < len(pending) and not stopped
    if stopped:
        # Readers take an empty frame for the end of the file.
        counts["empty-frame"] += 1


def _piece(
    pending: bytearray, begins: list[int], ends: list[int], size: int
) -> tuple[bytes, Ints, Ints]:
    with memoryview(pending) as view:
        return bytes(view[:size]), np.array(begins, np.int64), np.array(ends, np.int64)


def _cut(data: bytearray, where: str) -> tuple[list[int], list[int], int, bool, int]:
    """Begins and ends of frames, where the first unfinished one starts, whether a frame was
    empty, and how many bytes the unfinished one needs.
    """
    begins: list[int] = []
    ends: list[int] = []
    at, size = 0, len(data)
    while at < size:
        length = data[at]
        begin = at + 1
        if length >= 0x80:
            length &= 0x7F
            shift = 7
            while begin < size and shift < 35:
                byte = data[begin]
                begin += 1
                length |= (byte & 0x7F) << shift
                shift += 7
                if byte < 0x80:
                    break
            else:
                if shift >= 35:
                    raise _damaged("a frame's length is no number", where)
                return begins, ends, at, False, 0
        if length == 0:
            return begins, ends, at, True, 0
        if length > MOST_FRAME_BYTES:
            raise _damaged(
                f"a frame of {length} bytes; one node has at most {MOST_FRAME_BYTES}", where
            )
        end = begin + length
        if end > size:
            return begins, ends, at, False, end - at
        begins.append(begin)
        ends.append(end)
        at = end
    return begins, ends, at, False, 0


def _damaged(problem: str, where: str) -> InputFileError:
    return InputFileError(
        f"the file is damaged, or no Chakra trace: {problem}",
        where=where,
        hint="copy it again, or write it again with the tool that made it",
    )


def _take(reader: _Reader, block: Block, frames: Spans) -> bool:
    """Read the frames of a block; whether to go on."""
    found, bad = block.fields(frames)
    if reader.frames == 0 and not bad[0] and _is_metadata(block, found.of_messages(0, 1)):
        reader.metadata.update(_metadata(block, found.of_messages(0, 1)))
        found, bad = found.of_messages(1, len(frames)), bad[1:]
        reader.frames += 1
    _refuse_old(reader, block, found)
    nodes, worse = _decode(reader, block, found, len(bad))
    bad = bad | worse
    if bad.any():
        first = int(np.argmax(bad))
        if not reader.recover:
            raise _damaged(f"frame {reader.frames + first} is no node", reader.where)
        reader.counts["dropped-unreadable"] += 1
        nodes, _ = _decode(reader, block, found.of_messages(0, first), first)
    reader.frames += len(nodes)
    if len(nodes):
        reader.parts.append(nodes)
    return not bad.any()


def _is_metadata(block: Block, fields: AllFields) -> bool:
    """Whether the first frame is about the file: a version and attributes, nothing of a node."""
    known = {number << 3 | LENGTH_DELIMITED for number in (_VERSION, _ABOUT)}
    if not fields.tags or not fields.tags <= known:
        return False
    # A node of which only the name is written looks alike, but for what the name begins with.
    _, bad = block.fields(fields.of(LENGTH_DELIMITED, _ABOUT).spans)
    return not bad.any()


def _metadata(block: Block, fields: AllFields) -> dict[str, int | str]:
    attributes = fields.of(LENGTH_DELIMITED, _ABOUT).spans
    inner, _ = block.fields(attributes)
    found: dict[str, int | str] = {}
    for position in range(len(attributes)):
        mine = inner.of_messages(position, position + 1)
        names = block.texts(mine.of(LENGTH_DELIMITED, 1).spans)
        if not names:
            continue
        name = names[0].decode(errors="replace")
        for text in block.texts(mine.of(LENGTH_DELIMITED, _STRING).spans):
            found[name] = text.decode(errors="replace")
        for number in _PLAIN:
            for value in mine.of(VARINT, number).value.tolist():
                found[name] = value
    return found


def _refuse_old(reader: _Reader, block: Block, found: AllFields) -> None:
    """Refuse what the first versions wrote: their numbers of collectives mean others today."""
    old = found.of(LENGTH_DELIMITED, _OLD_ATTRIBUTE)
    if not len(old.tag):
        return
    inner, bad = block.fields(old.spans)
    typed = inner.of(VARINT, 2).message
    if bad.any() or len(np.unique(typed)) < len(old.tag):
        return
    raise SourceFormatError(
        "a Chakra trace of schema 0.0.1 to 0.0.3, whose numbers mean other things today",
        where=reader.where,
        hint="convert it to schema 0.0.4 or later with Chakra's own tools of that time",
    )


def _decode(
    reader: _Reader, block: Block, found: AllFields, count: int
) -> tuple[ChakraNodes, Bools]:
    """Columns of the nodes of a block, and which frames are none after all."""
    bad = np.zeros(count, dtype=np.bool_)
    nodes = ChakraNodes(
        id=_scalar(found, _ID, count),
        type=_scalar(found, _TYPE, count),
        start_us=_scalar(found, _START, count),
        dur_us=_scalar(found, _DURATION, count),
        name=_names(reader, block, found, count),
    )
    # Unsigned in the file; beyond 2^63 they are nothing that can be true.
    bad |= (nodes.start_us < 0) | (nodes.dur_us < 0)
    nodes.data_owner, nodes.data_dep, wrong = _deps(block, found, _DATA)
    bad[wrong] = True
    nodes.ctrl_owner, nodes.ctrl_dep, wrong = _deps(block, found, _CTRL)
    bad[wrong] = True
    bad[_attributes(block, found, nodes)] = True
    nodes.groups = _group_texts(block, found)
    return nodes, bad


def _scalar(found: AllFields, number: int, count: int) -> Ints:
    column = np.zeros(count, dtype=np.int64)
    mine = found.of(VARINT, number)
    column[mine.message] = mine.value
    return column


def _names(reader: _Reader, block: Block, found: AllFields, count: int) -> list[str]:
    """Names of the nodes."""
    mine = found.of(LENGTH_DELIMITED, _NAME)
    texts = block.texts(mine.spans)
    known = reader.names
    if len(known) > _MOST_NAMES:
        known.clear()
    names = list(map(known.__getitem__, texts))
    if len(names) == count and (mine.message == np.arange(count)).all():
        return names
    column = [""] * count
    for position, name in zip(mine.message.tolist(), names, strict=True):
        column[position] = name
    return column


def _deps(block: Block, found: AllFields, number: int) -> tuple[Ints, Ints, Ints]:
    """Node and value of each dependency, in the order of the nodes; and nodes with broken ones."""
    lists = found.of(LENGTH_DELIMITED, number)
    owner, values, bad = block.packed(lists.spans)
    single = found.of(VARINT, number)
    owners = np.concatenate([lists.message[owner], single.message])
    deps = np.concatenate([values, single.value])
    order = np.argsort(owners, kind="stable")
    return owners[order], deps[order], lists.message[bad]


def _attributes(block: Block, found: AllFields, nodes: ChakraNodes) -> Ints:
    """Fill in the attributes that matter; the nodes with a broken one."""
    attributes = found.of(LENGTH_DELIMITED, _ATTRIBUTE)
    inner, bad = block.fields(attributes.spans)
    named = inner.of(LENGTH_DELIMITED, 1)
    node_of = attributes.message
    places = block.equal(named.spans, [name.encode() for name in _WANTED])
    of_name = {name: named.message[at] for name, at in zip(_WANTED, places, strict=True)}
    integers, texts, flags = _values(inner, len(attributes.tag))
    count = len(nodes)
    for name in INTEGERS:
        chosen = of_name[name]
        chosen = chosen[integers[chosen] != UNKNOWN]
        if len(chosen):
            column = np.full(count, UNKNOWN, dtype=np.int64)
            column[node_of[chosen]] = integers[chosen]
            nodes.numbers[name] = column
    for name in TEXTS:
        chosen = of_name[name]
        chosen = chosen[texts.begin[chosen] >= 0]
        if len(chosen):
            values: list[str | None] = [None] * count
            for position, text in zip(
                node_of[chosen].tolist(), block.texts(texts.take(chosen)), strict=True
            ):
                values[position] = text.decode(errors="replace")
            nodes.texts[name] = values
    for attribute in of_name[_INVOLVED].tolist():
        begin, end = int(flags.begin[attribute]), int(flags.end[attribute])
        if begin >= 0:
            nodes.involved.append((int(node_of[attribute]), _all_true(block.data[begin:end])))
    return node_of[bad]


def _values(inner: AllFields, count: int) -> tuple[Ints, Spans, Spans]:
    """Value of each attribute as an integer, as a text and as a list of flags, where it is one."""
    integers = np.full(count, UNKNOWN, dtype=np.int64)
    plain = inner.of(VARINT, *_PLAIN)
    integers[plain.message] = plain.value
    zigzag = inner.of(VARINT, *_ZIGZAG)
    integers[zigzag.message] = (zigzag.value >> 1) & (2**63 - 1) ^ -(zigzag.value & 1)

    def spans(number: int) -> Spans:
        begin, end = np.full(count, -1, dtype=np.int64), np.full(count, -1, dtype=np.int64)
        mine = inner.of(LENGTH_DELIMITED, number)
        begin[mine.message], end[mine.message] = mine.begin, mine.begin + mine.value
        return Spans(begin, end)

    return integers, spans(_STRING), spans(_BOOL_LIST)


def _all_true(flags: bytes) -> bool:
    """Whether a message with a packed list of flags holds no false one."""
    at = 2 if flags[:1] == b"\x0a" else 0
    return 0 not in flags[at:]


def _group_texts(block: Block, found: AllFields) -> list[str]:
    """What the nodes that stand for the making of process groups list."""
    named = found.of(LENGTH_DELIMITED, _NAME)
    (places,) = block.equal(named.spans, [_GROUP_NODE])
    nodes = named.message[places]
    if not len(nodes):
        return []
    inputs = found.of(LENGTH_DELIMITED, _INPUTS)
    inner, _ = block.fields(inputs.take(np.isin(inputs.message, nodes)).spans)
    values = inner.of(LENGTH_DELIMITED, _VALUES)
    return [text.decode(errors="replace") for text in block.texts(values.spans)]
