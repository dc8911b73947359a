"""Lenient repair of text that profilers wrote as JSON but that is not.

What is known to be wrong in real files, and what becomes of it (each is counted under the
name on the left):

    repaired-utf8                bytes that are not UTF-8 and half surrogate pairs become U+FFFD
    repaired-control-character   raw control bytes and line breaks in strings become escapes
    repaired-backslash           backslashes that start no escape are doubled
    repaired-number              inf, nan and numbers beyond float64 become null
    repaired-quote               quotes inside a string value are escaped

Two grades: `repair_text` is cheap enough for megabytes and looks only at places that cannot
be inside a valid string; `repair_event` walks the strings of a single event.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

__all__ = ["repair_event", "repair_text"]

_HEX = rb"[0-9a-fA-F]"
_HALF_A_PAIR = re.compile(
    # Skipped: a whole surrogate pair, an escaped backslash. Found: a surrogate on its own.
    rb"\\u[dD][89abAB]" + _HEX + rb"{2}\\u[dD][c-fC-F]" + _HEX + rb"{2}|\\\\"
    rb"|(\\u[dD][89a-fA-F]" + _HEX + rb"{2})"
)
_BACKSLASH = re.compile(rb'\\(?:["\\/bfnrt]|u' + _HEX + rb"{4})|(\\)")
_CONTROL_BYTES = bytes(b for b in range(32) if b not in b"\t\n\r")
_CONTROL = re.compile(b"[" + re.escape(_CONTROL_BYTES) + b"]")
_NOT_A_NUMBER = rb"[-+]?(?:inf(?:inity)?|nan(?:\([^()\"]*\))?)(?![\w.])|-?\d[\d.]*e\+?\d{3,}"
# An unescaped quote and a colon come together only after a key.
_BAD_VALUE = re.compile(
    rb'(?<=[^\\]")(\s*:\s*)(?:' + _NOT_A_NUMBER + rb")(?=\s*[,}])", re.IGNORECASE
)
_STRING_OR_BAD_NUMBER = re.compile(
    rb'"(?:[^"\\]|\\.)*+"?|(?<![\w.])(' + _NOT_A_NUMBER + rb")", re.IGNORECASE | re.DOTALL
)
# A string that does not end takes all the rest, so that no text is searched twice.
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
_ANY_CONTROL = re.compile(rb"[\x00-\x1f]")
_KEY = rb'"[\w .()/%-]{1,64}"\s*:'
# A string value ends at the first quote that another key or the end of the object follows.
_VALUE_END = rb"\s*(?:,\s*" + _KEY + rb"|\}\s*(?:[,}]|$))"
_STRING_VALUE = re.compile(
    rb"(" + _KEY + rb'\s*")(.{0,2048}?)(")(?=' + _VALUE_END + rb")", re.DOTALL
)
_LARGEST_GUESS = 64 * 1024  # bytes of an event; for each key the end of its value is searched
_BARE_QUOTE = re.compile(rb'\\.|(")', re.DOTALL)
# C:\dir\ written as it is: its last backslash hides the closing quote.
_HIDDEN_QUOTE = re.compile(rb'(?<!\\)\\"(?=' + _VALUE_END + rb")")


def repair_text(text: bytes, counts: Counter[str]) -> bytes:
    """Repair what can be found without walking strings; `text` holds any number of events."""
    text = _repair_utf8(text, counts)
    if b"\\" in text:
        text, n = _sub_group(_HALF_A_PAIR, rb"\\ufffd", text)
        counts["repaired-utf8"] += n
        text, n = _sub_group(_BACKSLASH, rb"\\\\", text)
        counts["repaired-backslash"] += n
    if len(text.translate(None, _CONTROL_BYTES)) < len(text):
        text, n = _CONTROL.subn(_escape_control, text)
        counts["repaired-control-character"] += n
    text, n = _BAD_VALUE.subn(rb"\1null", text)
    counts["repaired-number"] += n
    return text


def repair_event(text: bytes) -> Iterator[tuple[bytes, Counter[str]]]:
    """Texts to try for one event, the mildest change first, with what was done to each."""
    counts: Counter[str] = Counter()
    mild = repair_text(text, counts)
    strings = counts.copy()
    yield _repair_strings(mild, strings), strings

    if len(text) > _LARGEST_GUESS:
        return
    # From here on it is a guess where a string ends.
    closed, n = _HIDDEN_QUOTE.subn(rb'\\\\"', text)
    hidden: Counter[str] = Counter({"repaired-backslash": n})
    yield _repair_strings(repair_text(closed, hidden), hidden), hidden

    quoted, n = _repair_quotes(mild)
    counts["repaired-quote"] += n
    yield _repair_strings(quoted, counts), counts


def _repair_utf8(text: bytes, counts: Counter[str]) -> bytes:
    try:
        text.decode()
    except UnicodeDecodeError:
        replaced = text.decode(errors="replace")
        counts["repaired-utf8"] += replaced.count("\ufffd")
        return replaced.encode()
    return text


def _sub_group(pattern: re.Pattern[bytes], new: bytes, text: bytes) -> tuple[bytes, int]:
    """Replace matches of `pattern` whose group 1 took part; other matches only skip text."""
    n = 0

    def replace(match: re.Match[bytes]) -> bytes:
        nonlocal n
        if match.group(1) is None:
            return match.group()
        n += 1
        return match.expand(new)

    return pattern.sub(replace, text), n


def _escape_control(match: re.Match[bytes]) -> bytes:
    return b"\\u%04x" % match.group()[0]


def _repair_strings(text: bytes, counts: Counter[str]) -> bytes:
    def escape(match: re.Match[bytes]) -> bytes:
        string, n = _ANY_CONTROL.subn(_escape_control, match.group())
        counts["repaired-control-character"] += n
        return string

    text = _STRING.sub(escape, text)
    text, n = _sub_group(_STRING_OR_BAD_NUMBER, b"null", text)
    counts["repaired-number"] += n
    return text


def _repair_quotes(text: bytes) -> tuple[bytes, int]:
    n = 0

    def escape_inner(match: re.Match[bytes]) -> bytes:
        nonlocal n
        inner, found = _sub_group(_BARE_QUOTE, rb'\\"', match.group(2))
        n += found
        return match.group(1) + inner + match.group(3)

    return _STRING_VALUE.sub(escape_inner, text), n
