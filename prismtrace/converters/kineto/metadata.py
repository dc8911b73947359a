"""What a Kineto file says about itself outside its event list."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import msgspec

from prismtrace.converters.kineto.records import parse_ranks
from prismtrace.converters.kineto.repair import repair_text
from prismtrace.converters.kineto.values import int64

__all__ = ["KinetoGroup", "KinetoMetadata", "parse_metadata"]

_NUMBERS = {
    name: re.compile(rb'"' + name.encode() + rb'"\s*:\s*"?(-?\d{1,30}+)(?!\d)')
    for name in ("baseTimeNanoseconds", "rank", "world_size")
}


@dataclass(frozen=True)
class KinetoGroup:
    """A process group the file's rank belongs to; `ranks` is None when they are not listed."""

    name: str
    desc: str
    ranks: tuple[int, ...] | None


@dataclass(frozen=True)
class KinetoMetadata:
    """Facts of one rank's profile. None: the file does not say.

    `base_time_ns` is what was added to every timestamp (0 when they are absolute);
    `device_names` are those of all devices of the host, not only the rank's.
    """

    rank: int | None = None
    world_size: int | None = None
    backend: str | None = None
    host_name: str | None = None
    base_time_ns: int = 0
    device_names: tuple[str, ...] = ()
    groups: tuple[KinetoGroup, ...] = ()
    nccl_version: str | None = None


def parse_metadata(head: bytes, tail: bytes, counts: Counter[str]) -> KinetoMetadata:
    """Read the metadata around the event list.

    `head` ends with the list's opening bracket, `tail` starts after the closing one and is
    empty when the file was cut off. Metadata that had to be repaired, or of which only numbers
    could be saved, is counted as `repaired-metadata`.
    """
    if head.lstrip().startswith(b"["):
        if tail.strip():
            counts["dropped-trailing-text"] += 1
        return KinetoMetadata()
    text = head + b"]" + (tail if tail.strip() else b"}")
    document = _decode(text)
    if document is None:
        counts["repaired-metadata"] += 1
        document = _decode(repair_text(text, counts)) or _save_parts(head, tail)
    return _from_document(document, counts)


def _decode(text: bytes) -> dict[str, Any] | None:
    try:
        document = msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _save_parts(head: bytes, tail: bytes) -> dict[str, Any]:
    """Each side alone if it is whole, and the numbers that matter wherever they stand."""
    document = _decode(head + b"]}") or {}
    document |= _decode(b'{"":0' + tail) or {}
    found = {
        name: int(match.group(1))
        for name, pattern in _NUMBERS.items()
        if (match := pattern.search(head) or pattern.search(tail))
    }
    if "baseTimeNanoseconds" in found:
        document.setdefault("baseTimeNanoseconds", found.pop("baseTimeNanoseconds"))
    document.setdefault("distributedInfo", found)
    return document


def _from_document(document: dict[str, Any], counts: Counter[str]) -> KinetoMetadata:
    info = document.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    devices = document.get("deviceProperties")
    devices = devices if isinstance(devices, list) else []
    groups = info.get("pg_config")
    groups = groups if isinstance(groups, list) else []
    return KinetoMetadata(
        rank=int64(info.get("rank"), counts),
        world_size=int64(info.get("world_size"), counts),
        backend=_text(info.get("backend")),
        host_name=_text(document.get("host_name")),
        base_time_ns=int64(document.get("baseTimeNanoseconds"), counts) or 0,
        device_names=tuple(
            d["name"] for d in devices if isinstance(d, dict) and isinstance(d.get("name"), str)
        ),
        groups=tuple(_group(g, counts) for g in groups if isinstance(g, dict)),
        nccl_version=_text(info.get("nccl_version")),
    )


def _group(config: dict[str, Any], counts: Counter[str]) -> KinetoGroup:
    # Early versions called the name `uid`; on-demand traces print the ranks as a string.
    name = config.get("pg_name", config.get("uid", ""))
    ranks = config.get("ranks")
    members: tuple[int, ...] | None = None
    if isinstance(ranks, str):
        members = parse_ranks(ranks)
    elif isinstance(ranks, list):
        numbers = [int64(r, counts) for r in ranks]
        known = tuple(n for n in numbers if n is not None)
        members = known if known and len(known) == len(numbers) else None
    return KinetoGroup(name=str(name), desc=_text(config.get("pg_desc")) or "", ranks=members)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value not in {"", "unknown"} else None
