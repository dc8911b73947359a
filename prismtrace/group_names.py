"""What process groups are called in tables and messages: one way of writing them everywhere.

torch numbers its groups, so the name that a job gave may be a bare `3`; ids of a trace are numbers,
too, and others.  Such a group is called by its description and its ranks, `mesh_dp [0,4]`, or by
its ranks alone, `[0,4]`.  A name that says something, such as `tp_3`, stays as it is.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from prismtrace.ranks import format_ranks
from prismtrace.schema import ProcessGroup

__all__ = ["group_family", "group_label", "group_labels"]

_NUMBERS = re.compile(r"(?:split|[\d:,() /#-])*|(?:0x)?[0-9a-f]{12,}(?: \(\d+\))?", re.IGNORECASE)
"""Names that say nothing: numbers, parts of numbered groups, ranks, hashes, addresses."""

_END = re.compile(r"[\d_.:#-]*\d+$")
_LONGEST = 40  # characters of ranks


def group_labels(groups: Iterable[ProcessGroup]) -> dict[int, str]:
    """What each group is called, by id; no two are called the same.

    Groups whose descriptions and ranks are equal, too, are told apart by id: `[0-7] (id 2)`.
    """
    groups = list(groups)
    named = Counter(group.name for group in groups)
    labels = {
        group.id: group.name
        if named[group.name] == 1 and _tells(group.name)
        else _with_ranks(group.name, group.desc, group.ranks)
        for group in groups
    }
    # A name that says something may be what others are called, with their id even.
    while twice := {label for label, often in Counter(labels.values()).items() if often > 1}:
        labels = {
            number: f"{label} (id {number})" if label in twice else label
            for number, label in labels.items()
        }
    return labels


def group_label(name: str, desc: str, ranks: Sequence[int]) -> str:
    """What a group is called where no others of its job are at hand."""
    return name if _tells(name) else _with_ranks(name, desc, ranks)


def group_family(group: ProcessGroup) -> str:
    """What a group is one of many of: `dp_3` and `dp_4` are of the family `dp`."""
    family = _END.sub("", group.name) if _tells(group.name) else ""
    return family or _told(group.desc) or f"groups of {len(group.ranks)}"


def _tells(name: str) -> bool:
    return _NUMBERS.fullmatch(name) is None


def _told(desc: str) -> str:
    return "" if desc == "undefined" else desc


def _with_ranks(name: str, desc: str, ranks: Sequence[int]) -> str:
    called = name if _tells(name) else _told(desc)
    text = format_ranks(ranks)
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST].rpartition(',')[0]},... {len(ranks)} ranks"
    return f"{called} [{text}]".lstrip()
