"""Process groups that a file lists: PyTorch's ``process_group:init``, and `export`'s own way."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from prismtrace.converters.groups import NamedGroup
from prismtrace.errors import InputFileError
from prismtrace.ranks import MOST_RANKS, parse_ranks

__all__ = ["group_configs", "own_groups"]


def group_configs(text: str, counts: Counter[str]) -> Iterator[NamedGroup]:
    """Groups of the JSON that stands in a ``process_group:init`` node.

    What is no such JSON (it may be cut off) is counted as `unreadable-groups`. A group whose
    ranks are not listed is of all ranks, as many as its size says.
    """
    for config in _configs(text):
        if config is None:
            counts["unreadable-groups"] += 1
            continue
        ranks = config.get("ranks")
        size = config.get("group_size")
        name, desc = config.get("pg_name"), config.get("pg_desc")
        members: tuple[int, ...] | None = None
        if isinstance(ranks, list) and all(_is_rank(rank) for rank in ranks):
            members = tuple(ranks)
        if members == ():
            members = tuple(range(size)) if type(size) is int and 0 < size <= MOST_RANKS else None
        yield NamedGroup(str(name), desc if isinstance(desc, str) else "", members)


def _is_rank(value: Any) -> bool:
    return type(value) is int and 0 <= value < MOST_RANKS


def _configs(text: str) -> Iterator[dict[str, Any] | None]:
    """The entries; null for what is none."""
    # Chakra's converter prints the list of inputs as Python does: a text within brackets.
    for candidate in (text, text.strip()[2:-2], text.strip()[2:-2].replace('\\"', '"')):
        try:
            found = json.loads(candidate)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, list) and found and all(isinstance(item, str) for item in found):
            for item in found:
                yield from _configs(item)
            return
        if isinstance(found, list):
            yield from (
                item if isinstance(item, dict) and "pg_name" in item else None for item in found
            )
            return
    yield None


def own_groups(text: str | None, where: str) -> dict[str, NamedGroup]:
    """Groups as `export` lists them, by the name that nodes call them:
    ``{"1": {"name": "tp_0", "ranks": "0-7", "desc": ""}}``.

    Raises:
        InputFileError: it is something else.
    """
    if text is None:
        return {}
    try:
        return {
            number: NamedGroup(
                str(group["name"]), str(group.get("desc", "")), parse_ranks(group["ranks"])
            )
            for number, group in json.loads(text).items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputFileError(
            "the list of process groups in the file is broken",
            where=where,
            hint="the file was changed: export it again",
        ) from error
