"""What the columns of a SQL answer are called where the query names none.

Polars calls `COUNT(*)` len, and `SUM(dur_ns)` as well as `MAX(dur_ns)` after their column. Here
such a column is called as it was written. Nothing of the query itself changes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import polars as pl

__all__ = ["name_columns"]

_TOKEN = re.compile(
    r"(?P<space>\s+|--[^\n]*|/\*.*?\*/)"
    r"|(?P<text>'(?:[^']|'')*')"
    r"|(?P<quoted>\"(?:[^\"]|\"\")*\"|`[^`]*`)"
    r"|(?P<number>\d[\w.]*)"
    r"|(?P<word>\w+)"
    r"|(?P<sign>.)",
    re.DOTALL,
)
_AFTER = {
    "from", "where", "group", "having", "order", "limit", "offset", "union", "except",
    "intersect", "window", "fetch", "qualify",
}  # fmt: skip
"""Words that end the list of what is selected."""
_NO_NAME = {
    "end", "null", "true", "false", "and", "or", "not", "is", "in", "like", "ilike", "rlike",
    "regexp", "between", "case", "when", "then", "else", "distinct", "all", "any", "interval",
    "date", "time", "timestamp", "over", "filter", "within",
}  # fmt: skip
"""Words that neither are a name nor stand before one."""
_LONGEST = 60  # characters that are still read as a name


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str

    @property
    def word(self) -> str:
        """A word that is not quoted, in small letters."""
        return self.text.lower() if self.kind == "word" else ""


def name_columns(answer: pl.LazyFrame, sql: str) -> pl.LazyFrame:
    """`answer` with its nameless columns called as `sql` has them.

    Where columns and expressions are not one to one, as with ``*``, all stay as they are.
    """
    columns = answer.collect_schema().names()
    items = list(_items(sql))
    if len(items) != len(columns) or any(_is_wildcard(item) for item in items):
        return answer
    names = [
        column if _has_name(item) or len(_text(item)) > _LONGEST else _text(item)
        for item, column in zip(items, columns, strict=True)
    ]
    if len(set(names)) < len(names):
        return answer
    return answer.rename(dict(zip(columns, names, strict=True)))


def _items(sql: str) -> Iterator[list[_Token]]:
    """Expressions of the outermost SELECT, of several the first, each as its tokens."""
    tokens = list(_tokens(sql))
    if next((token.word for token in tokens if token.text != " "), "") not in ("select", "with"):
        return
    item: list[_Token] = []
    depth, selecting = 0, False
    for token in tokens:
        depth += (token.text in "([") - (token.text in ")]")
        outside = depth == 0 and token.text not in ")]"
        if not selecting:
            selecting = outside and token.word == "select"
        elif outside and (token.word in _AFTER or token.text == ";"):
            break
        elif outside and token.text == ",":
            yield item
            item = []
        elif item or not (token.text == " " or token.word in ("distinct", "all")):
            item.append(token)
    if item:
        yield item


def _tokens(sql: str) -> Iterator[_Token]:
    for found in _TOKEN.finditer(sql):
        kind = found.lastgroup or "sign"
        yield _Token(kind, " " if kind == "space" else found[0])


def _text(item: list[_Token]) -> str:
    return " ".join("".join(token.text for token in item).split())


def _is_wildcard(item: list[_Token]) -> bool:
    """Whether it stands for several columns, as `*`, `nodes.*` and `* EXCLUDE (deps)`.

    ``ON`` of a DISTINCT ON is taken for one, too: what follows is not read.
    """
    told = [token for token in item if token.text != " "]
    if told and told[0].word in ("columns", "on"):
        return True
    at = next((k for k, token in enumerate(told) if token.text == "*"), None)
    return at == 0 or (at == 2 and told[1].text == ".")


def _has_name(item: list[_Token]) -> bool:
    """Whether it is a column, or something with a name behind it."""
    told = [token for token in item if token.text != " "]
    *before, last = told or [_Token("sign", "")]
    if last.kind not in ("word", "quoted") or last.word in _NO_NAME:
        return False
    # Names and dots alone are a column: nodes."group"
    if all(token.kind in ("word", "quoted") or token.text == "." for token in told):
        return not any(token.word in _NO_NAME for token in told)
    ahead = before[-1]
    return ahead.word == "as" or (
        ahead.word not in _NO_NAME and (ahead.kind != "sign" or ahead.text in ")]")
    )
