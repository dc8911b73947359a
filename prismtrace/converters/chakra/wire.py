"""Protobuf's wire format, read for many messages at a time.

The library makes a Python object of every message and every attribute, which takes 4 to 6 µs a
node. Here the k-th fields of all messages of a block are read together, as arrays. A test
compares what comes out with what the library reads.

The format is described in https://protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["LENGTH_DELIMITED", "VARINT", "AllFields", "Block", "Fields", "Spans", "ints"]

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

VARINT, FIXED64, LENGTH_DELIMITED, FIXED32 = 0, 1, 2, 5
_COMMON = (VARINT, LENGTH_DELIMITED)
_VARINT_BYTES = 10  # the longest varint
_MOST_FIELDS = 1 << 16
"""Of one message. Lists are packed into one field; what has more only costs time."""
_FEW = 24
"""So few messages are quicker read one after the other."""
_LONG = 255
"""Texts of this many bytes and more are not looked for."""


def ints(values: Ints | Bools) -> Ints:
    """Values, or the positions of true ones, as 64-bit integers."""
    if values.dtype == np.bool_:
        return np.flatnonzero(values).astype(np.int64)
    return values.astype(np.int64)


@dataclass(frozen=True)
class Spans:
    """Parts of a block, from `begin` until before `end`; arrays of one length."""

    begin: Ints
    end: Ints

    def __len__(self) -> int:
        return len(self.begin)

    def take(self, chosen: Ints | Bools) -> Spans:
        """Some of them."""
        return Spans(self.begin[chosen], self.end[chosen])


@dataclass(frozen=True)
class Fields:
    """Some fields of many messages; within a message in the order of the file.

    `tag` is what stands before a field: its number, and in which way it is written. `value` is
    the number of a varint (as 64 bits, signed) or the length of a string or message, whose bytes
    are at `begin`.
    """

    message: Ints
    tag: Ints
    value: Ints
    begin: Ints

    def take(self, chosen: Ints | Bools) -> Fields:
        """Some of them."""
        return Fields(
            self.message[chosen], self.tag[chosen], self.value[chosen], self.begin[chosen]
        )

    @property
    def spans(self) -> Spans:
        """Where strings and messages lie."""
        return Spans(self.begin, self.begin + self.value)


class AllFields:
    """All fields of many messages: the first ones of all messages, the second ones, and so on.

    Messages of a file are alike, so that most rounds hold one field only, and are taken or left
    as they are.
    """

    def __init__(self, rounds: list[Fields]) -> None:
        self._rounds = [fields for fields in rounds if len(fields.tag)]
        self._bounds = [(int(fields.tag.min()), int(fields.tag.max())) for fields in self._rounds]

    def of(self, wire_type: int, *numbers: int) -> Fields:
        """Those with one of some numbers, written in a way."""
        tags = [number << 3 | wire_type for number in numbers]
        found: list[Fields] = []
        for fields, (low, high) in zip(self._rounds, self._bounds, strict=True):
            inside = [tag for tag in tags if low <= tag <= high]
            if inside and low == high:
                found.append(fields)
            elif inside:
                chosen = fields.tag == inside[0]
                for tag in inside[1:]:
                    chosen |= fields.tag == tag
                found.append(fields.take(chosen))
        return _joined(found)

    def of_messages(self, first: int, last: int) -> AllFields:
        """Those of the messages from `first` until before `last`, which are counted anew."""
        found: list[Fields] = []
        for fields in self._rounds:
            mine = fields.take((fields.message >= first) & (fields.message < last))
            found.append(Fields(mine.message - first, mine.tag, mine.value, mine.begin))
        return AllFields(found)

    @property
    def tags(self) -> set[int]:
        """Those that there are."""
        return {tag for fields in self._rounds for tag in np.unique(fields.tag).tolist()}


class Block:
    """Some bytes of a file that hold whole messages."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        # Varints may be looked for some bytes beyond the end; what is read there is refused.
        self._bytes = np.frombuffer(data + bytes(2 * _VARINT_BYTES), dtype=np.uint8)

    def fields(self, messages: Spans) -> tuple[AllFields, Bools]:
        """All fields of the messages, and which messages are none.

        A message is none when a field ends outside of it or is written in no known way; of such
        a message some fields may be among the result.
        """
        found: list[Fields] = []
        bad = np.zeros(len(messages), dtype=np.bool_)
        live = ints(messages.begin < messages.end)
        at, end = messages.begin[live], messages.end[live]
        rounds = 0
        while len(live) > _FEW and rounds < _MOST_FIELDS:
            fields, after, wrong = self._next(live, at, end)
            found.append(fields)
            bad[live[wrong]] = True
            going = ~wrong & (after < end)
            at = after
            if not going.all():
                live, at, end = live[going], after[going], end[going]
            rounds += 1
        for message, begin, stop in zip(live.tolist(), at.tolist(), end.tolist(), strict=True):
            fields, bad[message] = self._one(message, begin, stop)
            found.append(fields)
        return AllFields(found), bad

    def _next(self, live: Ints, at: Ints, end: Ints) -> tuple[Fields, Ints, Bools]:
        """One field of each message, where they end, and which are none."""
        first = self._bytes[at]
        only = int(first[0])
        if only < 0x80 and only >> 3 and only & 7 in _COMMON and (first == only).all():
            return self._next_alike(only, live, at, end)
        key, at, wrong = self._varints(at)
        wire_type = key & 7
        # Most fields are varints or start with one: their length.
        value, begin, unending = self._varints(np.minimum(at, end))
        fixed = np.where(wire_type == FIXED64, 8, 4)
        is_fixed = (wire_type == FIXED64) | (wire_type == FIXED32)
        delimited = wire_type == LENGTH_DELIMITED
        wrong |= unending & ~is_fixed
        wrong |= ~(is_fixed | delimited | (wire_type == VARINT))
        wrong |= (key >> 3 <= 0) | (delimited & (value < 0))
        # Compared before it is added: a length may be anything.
        wrong |= delimited & (value > end - begin)
        after = np.where(delimited, begin + np.where(wrong, 0, value), begin)
        after = np.where(is_fixed, at + fixed, after)
        wrong |= after > end
        return Fields(live, key, value, begin), after, wrong

    def _next_alike(self, key: int, live: Ints, at: Ints, end: Ints) -> tuple[Fields, Ints, Bools]:
        """The same where all fields have one key, as those of a round mostly do."""
        value, begin, wrong = self._varints(at + 1)
        after = begin
        if key & 7 == LENGTH_DELIMITED:
            wrong |= (value < 0) | (value > end - begin)
            after = begin + np.where(wrong, 0, value)
        wrong |= after > end
        return Fields(live, np.broadcast_to(np.int64(key), len(live)), value, begin), after, wrong

    def _one(self, message: int, at: int, end: int) -> tuple[Fields, bool]:
        """The fields of one message."""
        rows: list[tuple[int, int, int, int]] = []
        wrong = False
        data = self.data
        while at < end:
            key, at = _varint(data, at, end)
            value, after = _varint(data, at, end)
            number, wire_type, begin = key >> 3, key & 7, after
            if wire_type == LENGTH_DELIMITED:
                after += value
            elif wire_type in (FIXED64, FIXED32):
                value, after = 0, at + (8 if wire_type == FIXED64 else 4)
            elif wire_type != VARINT:
                number = 0
            if key < 0 or value < 0 or not 0 < number < 2**61 or after > end:
                wrong = True
                break
            value = value - 2**64 if value >= 2**63 else value
            rows.append((message, key, value, begin))
            if len(rows) > _MOST_FIELDS:
                wrong = True
                break
            at = after
        columns = np.array(rows, dtype=np.int64).reshape(-1, 4).T
        return Fields(*columns), wrong

    def _varints(self, at: Ints) -> tuple[Ints, Ints, Bools]:
        """Numbers that begin at some places, where they end, and which are too long."""
        data = self._bytes
        first = data[at]
        value = (first & 0x7F).astype(np.int64)
        after = at + 1
        going = ints(first >= 0x80)
        shift = 0
        while len(going):
            shift += 7
            if shift >= 7 * _VARINT_BYTES:
                break
            byte = data[after[going]].astype(np.int64)
            value[going] |= (byte & 0x7F) << shift
            after[going] += 1
            going = going[byte >= 0x80]
        wrong = np.zeros(len(at), dtype=np.bool_)
        wrong[going] = True
        return value, after, wrong

    def packed(self, spans: Spans) -> tuple[Ints, Ints, Bools]:
        """Numbers of packed lists: the list each belongs to, its value, and which lists are none."""
        bad = np.zeros(len(spans), dtype=np.bool_)
        filled = ints(spans.end > spans.begin)
        unending = self._bytes[spans.end[filled] - 1] >= 0x80
        bad[filled[unending]] = True
        lists = filled[~unending]
        if not len(lists):
            return np.zeros(0, np.int64), np.zeros(0, np.int64), bad
        lengths = (spans.end - spans.begin)[lists]
        until = np.cumsum(lengths)
        place = np.arange(until[-1]) + np.repeat(spans.begin[lists] - until + lengths, lengths)
        ends = ints(self._bytes[place] < 0x80)
        owner = np.repeat(lists, np.diff(np.searchsorted(ends, until), prepend=0))
        values, _, wrong = self._varints(place[np.concatenate([[0], ends[:-1] + 1])])
        bad[owner[wrong]] = True
        return owner, values, bad

    def equal(self, spans: Spans, texts: Sequence[bytes]) -> list[Ints]:
        """Of each text the positions of the spans that hold it."""
        length = np.minimum(spans.end - spans.begin, _LONG).astype(np.uint8)
        by_length = np.argsort(length, kind="stable")
        begin = np.searchsorted(length[by_length], np.arange(_LONG + 1))
        found: list[Ints] = []
        for text in texts:
            places = by_length[begin[len(text)] : begin[len(text) + 1]]
            for offset, byte in enumerate(text if len(places) else b""):
                places = places[self._bytes[spans.begin[places] + offset] == byte]
            found.append(places)
        return found

    def texts(self, spans: Spans) -> list[bytes]:
        """The bytes of each span."""
        data = self.data
        ends = zip(spans.begin.tolist(), spans.end.tolist(), strict=True)
        return [data[begin:end] for begin, end in ends]


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """A number and where it ends; −1 if it does not."""
    value = 0
    for shift in range(0, 7 * _VARINT_BYTES, 7):
        if at >= end:
            break
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & (2**64 - 1), at
    return -1, at


def _joined(found: list[Fields]) -> Fields:
    if not found:
        return Fields(*(np.zeros(0, np.int64) for _ in range(4)))
    if len(found) == 1:
        return found[0]
    return Fields(
        np.concatenate([fields.message for fields in found]),
        np.concatenate([fields.tag for fields in found]),
        np.concatenate([fields.value for fields in found]),
        np.concatenate([fields.begin for fields in found]),
    )
