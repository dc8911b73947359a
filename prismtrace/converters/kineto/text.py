"""Cutting the text of a Kineto file into lists of events, in bounded memory.

A file is `head [ event, event, … ] tail`: an object whose metadata may stand before, after
or on both sides of `traceEvents`, or (legacy exporter) a bare list. `EventText` never looks
for matching brackets in the common case. It cuts at the last place in its buffer that looks
like `}, {"key`, and lets the JSON decoder prove the cut:

* in valid JSON a bare quote inside a string is impossible, so such a place is always a
  boundary between two objects;
* if the text up to it decodes as a list of events, it is a boundary between two events.

When decoding fails, the list ended in this buffer, the place was inside a nested list, or the
text is not valid JSON; these are tried in this order, each slower than the one before.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from itertools import islice

import msgspec

from prismtrace.converters.kineto.events import Event, EventDecoder
from prismtrace.converters.kineto.repair import repair_event, repair_text
from prismtrace.errors import InputFileError, MixedRanksError

__all__ = ["EventText"]

_LIST_KEY = re.compile(rb'"traceEvents"\s*:\s*\[')
_LIST_START = re.compile(rb"\s*\[")
_LIST_EMPTY = re.compile(rb"\s*+,?\s*+\]")
_BOUNDARY = re.compile(rb'\}\s*,\s*(?=\{\s*"[A-Za-z])')
_LIST_END = re.compile(rb'\}(\s*+,?\s*+\])\s*+(?:,\s*"[^"\\]*"\s*:|\}\s*\Z|\Z)')
# A string that does not end takes all the rest: it is not searched again from quotes inside it.
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*+"?|[{}\[\]]', re.DOTALL)
_RANK = re.compile(rb'"distributedInfo"\s*:\s*\{[^{}\[\]]*?"rank"\s*:\s*"?(\d{1,18}+)(?!\d)')
_UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_BETWEEN = b" \t\r\n,"
_FIRST_WINDOW = 8 * 1024
_LARGEST_PART = 64 * 1024 * 1024  # of one event, of the head, of the tail
_LARGEST_FIRST_TRY = 4 * 1024 * 1024  # an event that long is taken for invalid text
_JOINED_PIECES = 4


class EventText:
    """Reads the text once; `head`, `tail` and `ranks` are complete after `batches`.

    `counts` receives `truncated` (the text ends inside the list), `dropped-unreadable`
    (events beyond repair) and the repairs.
    """

    def __init__(
        self, blocks: Iterable[bytes], decoder: EventDecoder, counts: Counter[str], where: str
    ) -> None:
        self.head = b""
        self.tail = b""
        self.ranks: set[int] = set()
        self._blocks = iter(blocks)
        self._decoder = decoder
        self._counts = counts
        self._where = where
        self._buffer = b""
        self._exhausted = False
        self._ended = False  # the list's closing bracket was found
        self._stopped = False  # that, or the text ended before it
        self._broken = False  # some text needed repair: do not look for subtler reasons again

    def batches(self) -> Iterator[list[Event]]:
        """Yield the events in file order.

        Raises InputFileError when there is no event list, MixedRanksError when the text names
        more than one rank.
        """
        self._read_head()
        while not self._stopped and (events := self._next_batch()) is not None:
            yield events
        self._read_tail()
        self._note_ranks(self.head)
        self._note_ranks(self.tail)

    def _read_more(self) -> bool:
        """Append at least one block, more when the buffer is large; False at the end."""
        wanted = len(self._buffer)
        blocks = [self._buffer]
        got = 0
        for block in self._blocks:
            blocks.append(block)
            got += len(block)
            if got >= wanted:
                break
        else:
            self._exhausted = True
        self._buffer = b"".join(blocks)
        return got > 0

    def _read_head(self) -> None:
        searched = 0
        while self._read_more():
            if not searched:
                self._buffer = self._buffer.removeprefix(_BYTE_ORDER_MARK)
            bare = _LIST_START.match(self._buffer)
            if match := bare or _LIST_KEY.search(self._buffer, searched):
                self.head = self._buffer[: match.end()]
                self._buffer = self._buffer[match.end() :]
                return
            searched = max(0, len(self._buffer) - 64)
            no_json = len(self._buffer) > 8 and self._buffer.lstrip()[:1] not in b"{["
            if no_json or len(self._buffer) > _LARGEST_PART:
                break
        if not self._buffer.strip():
            damaged = self._counts["damaged-gzip"]
            message = "the gzip data is damaged" if damaged else "the file is empty"
            raise InputFileError(message, where=self._where, hint="export or copy it again")
        raise InputFileError(
            "no traceEvents list found",
            where=self._where,
            hint="pass a trace exported by torch.profiler (Chrome trace JSON, plain or gzipped)",
        )

    def _next_batch(self) -> list[Event] | None:
        cut = self._find_cut()
        if self._ended:
            return None
        if cut is None:
            if self._buffer.strip(_BETWEEN):
                return self._decode_awkward(None)
            self._counts["truncated"] += 1
            return None
        end, next_start = cut
        events = self._try_decode(self._buffer[:end])
        if events is None:
            return self._decode_awkward(end)
        self._buffer = self._buffer[next_start:]
        self._read_more()
        return events

    def _find_cut(self) -> tuple[int, int] | None:
        """Read on until the buffer holds a boundary, or all there is."""
        while True:
            self._buffer = self._buffer.lstrip(_BETWEEN)
            if match := _LIST_EMPTY.match(self._buffer):
                self._end_list(match.end())
                return None
            cut = _last_boundary(self._buffer)
            if cut or len(self._buffer) > _LARGEST_PART or not self._read_more():
                return cut

    def _try_decode(self, text: bytes) -> list[Event] | None:
        try:
            return self._decoder.decode(b"[" + text + b"]")
        except _UNDECODABLE:
            return None

    def _end_list(self, after_bracket: int) -> None:
        self._ended = self._stopped = True
        self._buffer = self._buffer[after_bracket:]

    def _decode_awkward(self, tried: int | None) -> list[Event]:
        """The text up to the last boundary (`tried`) is no list of events: find out why."""
        if match := _LIST_END.search(self._buffer):
            events = self._try_decode(self._buffer[: match.start() + 1])
            if events is not None:
                self._end_list(match.end(1))
                return events
        if self._broken and (events := self._repair_all()) is not None:
            return events
        cut = _last_element(self._buffer)
        if cut and cut != tried:
            events = self._try_decode(self._buffer[:cut].rstrip(_BETWEEN))
            if events is not None:
                self._buffer = self._buffer[cut:].lstrip(_BETWEEN)
                if self._buffer.startswith(b"]"):
                    self._end_list(1)
                return events
        if not cut and len(self._buffer) < _LARGEST_FIRST_TRY and self._read_more():
            return []  # so far one incomplete event, with boundaries inside it
        self._note_ranks(self._buffer)
        if not self._broken:
            self._broken = True
            if (events := self._repair_all()) is not None:
                return events
        return self._salvage_pieces()

    def _repair_all(self) -> list[Event] | None:
        """Repair all events up to the last boundary at once."""
        last = _last_boundary(self._buffer)
        if last is None:
            return None
        counts: Counter[str] = Counter()
        events = self._try_decode(repair_text(self._buffer[: last[0]], counts))
        if events is not None:
            self._counts.update(counts)
            self._buffer = self._buffer[last[1] :]
        return events

    def _salvage_pieces(self) -> list[Event]:
        """Invalid text that cannot be repaired at once: go on event by event."""
        starts = [0, *(m.end() for m in _BOUNDARY.finditer(self._buffer))]
        pieces = list(zip(starts, [*starts[1:], len(self._buffer)], strict=True))
        events: list[Event] = []
        final = self._exhausted or len(self._buffer) > _LARGEST_PART
        i = 0
        while i < len(pieces):
            start, end = pieces[i]
            if i == len(pieces) - 1 and not final:
                break
            event = self._salvage_event(self._buffer[start:end])
            if event is None and (found := self._salvage_end(start, end)):
                events.append(found[0])
                self._end_list(found[1])
                return events
            taken = 1
            while event is None and taken < _JOINED_PIECES and i + taken < len(pieces):
                taken += 1
                joined = self._buffer[start : pieces[i + taken - 1][1]]
                event = self._salvage_event(joined, guess=False)
            if event is not None:
                events.append(event)
                i += taken
                continue
            if not final and i + _JOINED_PIECES > len(pieces):
                break  # its other pieces may not have been read yet
            if i < len(pieces) - 1:
                self._counts["dropped-unreadable"] += 1
            i += 1
        if i < len(pieces):
            self._buffer = self._buffer[pieces[i][0] :]
            self._read_more()
        else:
            # The rest was an event cut short, or so much that it cannot have been an event.
            name = "truncated" if self._exhausted else "dropped-unreadable"
            self._counts[name] += 1
            self._buffer = b""
            self._stopped = self._exhausted
        return events

    def _salvage_event(self, text: bytes, *, guess: bool = True) -> Event | None:
        text = text.strip(_BETWEEN)
        events = self._try_decode(text)
        if events is not None and len(events) == 1 and events[0].ph is not None:
            return events[0]
        for repaired, counts in islice(repair_event(text), None if guess else 1):
            try:
                event = self._decoder.decode_loosely(repaired, counts)
            except _UNDECODABLE:
                continue
            if event.ph is None:
                return None  # an object inside an event
            self._counts.update(counts)
            return event
        return None

    def _salvage_end(self, start: int, end: int) -> tuple[Event, int] | None:
        """The last event of the list, if it starts at `start`, and where the list ends."""
        match = _LIST_END.search(self._buffer, start, end)
        if match is None:
            return None
        # In text cut short, a bracket as the very last thing is more likely part of a name.
        guess = bool(self._buffer[match.end(1) :].strip())
        event = self._salvage_event(self._buffer[start : match.start() + 1], guess=guess)
        return None if event is None else (event, match.end(1))

    def _read_tail(self) -> None:
        parts = [self._buffer]
        size = len(self._buffer)
        for block in self._blocks:
            size += len(block)
            if size > _LARGEST_PART:
                self._note_ranks(block)
                continue
            parts.append(block)
        self.tail = b"".join(parts) if self._ended else b""
        self._buffer = b""

    def _note_ranks(self, text: bytes) -> None:
        self.ranks.update(int(m.group(1)) for m in _RANK.finditer(text))
        if len(self.ranks) > 1:
            named = ", ".join(map(str, sorted(self.ranks)))
            raise MixedRanksError(
                f"two ranks wrote into one file (ranks {named})",
                where=self._where,
                hint="give every rank its own file name when exporting, and record again",
            )


def _last_boundary(buffer: bytes) -> tuple[int, int] | None:
    """(end of an object, start of the next) at the last boundary between two objects."""
    window = _FIRST_WINDOW
    while True:
        start = max(0, len(buffer) - window)
        last = deque(_BOUNDARY.finditer(buffer, start), maxlen=1)
        if last:
            return last[0].start() + 1, last[0].end()
        if start == 0:
            return None
        window *= 16


def _last_element(buffer: bytes) -> int:
    """The end of the last complete element of a list in valid JSON; 0 when there is none.

    Walks strings and brackets: exact, and slower than decoding.
    """
    depth = 0
    end = 0
    for token in _TOKEN.finditer(buffer):
        char = token.group()
        if char in b"{[":
            depth += 1
        elif char in b"}]":
            depth -= 1
            if depth < 0:
                break
            if depth == 0:
                end = token.end()
    return end
