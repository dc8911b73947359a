"""Which process group a communication belongs to.

Each rank's file lists only the groups that the rank itself belongs to, so the groups of a job
are the union over all files. A communication may name its group, give its ranks, only its
size, or nothing at all; it is assigned when exactly one set of ranks fits, and refused with
the candidates named when several do.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from prismtrace.converters.kineto.carried import CommOp
from prismtrace.converters.sniff import SourceFormat, sniff
from prismtrace.errors import GroupError, InputFileError
from prismtrace.group_names import group_label
from prismtrace.input_files import require_readable, unreadable
from prismtrace.ranks import MOST_RANKS, format_ranks, parse_ranks
from prismtrace.schema import ProcessGroup

__all__ = [
    "GroupBook",
    "GroupKey",
    "NamedGroup",
    "groups_among",
    "read_groups_file",
    "united",
    "unlisted",
]

Ranks = tuple[int, ...]


@dataclass(frozen=True, order=True)
class GroupKey:
    """A process group of the job: its ranks in group-rank order, and its name."""

    ranks: Ranks
    name: str

    def __hash__(self) -> int:
        return self._hash

    @property
    def label(self) -> str:
        """What messages call it: its description is not known everywhere."""
        return group_label(self.name, "", self.ranks)

    @cached_property
    def _hash(self) -> int:
        # Looked up once a communication; hashing thousands of ranks each time would show.
        return hash((self.name, self.ranks))


@dataclass(frozen=True)
class NamedGroup:
    """A group as one rank's file lists it; `ranks` is null when they are not listed."""

    name: str
    desc: str
    ranks: Ranks | None
    shared_name: bool = False
    """Its members, and nobody else, call it by this name: an identifier of the communicator."""
    position: int | None = None
    """The rank's own place in the group."""
    size: int | None = None


def united(one: Sequence[NamedGroup], other: Sequence[NamedGroup]) -> tuple[NamedGroup, ...]:
    """What two files list of one rank's groups; the first is believed where both name a group."""
    known = {group.name for group in one if group.ranks is not None}
    told = [group for group in other if group.name not in known and group.ranks is not None]
    named = {group.name for group in told}
    return (*(group for group in one if group.name not in named), *told)


def read_groups_file(path: Path) -> dict[str, Ranks]:
    """Read a JSON file ``{"tp0": "0-3", "dp0": [0, 4]}``: name -> ranks.

    Raises:
        InputFileError: unreadable, not JSON, or not of that form.
    """
    require_readable(path)
    try:
        raw = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_Pairs)
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        place = f" (line {error.lineno})" if isinstance(error, json.JSONDecodeError) else ""
        raise _no_groups(path, f"it is not JSON{place}") from error
    if not isinstance(raw, _Pairs):
        raise _no_groups(path, "it does not hold names with their ranks")
    groups: dict[str, Ranks] = {}
    for name, ranks in raw:
        if name in groups:
            raise _no_groups(path, f"{name!r} is named twice")
        groups[name] = _given_ranks(path, name, ranks)
    return groups


def groups_among(
    paths: Sequence[Path], given: str | os.PathLike[str] | None
) -> tuple[list[Path], dict[str, Ranks]]:
    """The inputs without the file of process groups that may be among them, and the groups.

    Args:
        paths: the inputs.
        given: a file of groups that was given apart; then that one counts.

    Raises:
        InputFileError: see `read_groups_file`; or there are two.
    """
    found = [path for path in paths if sniff(path) is SourceFormat.GROUPS]
    if len(found) > 1 and given is None:
        raise InputFileError(
            "two files of process groups are among the inputs",
            where=f"{found[0]} and {found[1]}",
            hint="convert the files of one job only",
        )
    source = given if given is not None else next(iter(found), None)
    others = [path for path in paths if path not in found]
    if not others:
        raise InputFileError(
            "only process groups were given",
            where=str(found[0]),
            hint="name the traces, too",
        )
    return others, {} if source is None else read_groups_file(Path(source))


def unlisted(
    named: Mapping[str, Ranks], listed: Iterable[Sequence[NamedGroup]]
) -> dict[str, Ranks]:
    """Groups of which no trace lists the ranks; the others are known, perhaps by another name."""
    known = {group.ranks for groups in listed for group in groups}
    return {name: ranks for name, ranks in named.items() if ranks not in known}


class _Pairs(list[tuple[str, Any]]):
    """A JSON object as it is written, with names that occur twice."""


def _given_ranks(path: Path, name: str, given: Any) -> Ranks:
    if isinstance(given, str):
        try:
            ranks = parse_ranks(given)
        except ValueError as error:
            raise _no_groups(path, f"{name!r}: {error}") from error
    elif not isinstance(given, list) or isinstance(given, _Pairs):
        raise _no_groups(path, f"{name!r} is neither a text of ranks nor a list of them")
    else:
        wrong = [rank for rank in given if type(rank) is not int or not 0 <= rank < MOST_RANKS]
        if wrong:
            shown = json.dumps(wrong[0])[:_SHOWN]
            raise _no_groups(path, f"{name!r} lists {shown}, which is no rank")
        ranks = tuple(given)
    if not ranks:
        raise _no_groups(path, f"{name!r} has no ranks")
    if len(set(ranks)) < len(ranks):
        raise _no_groups(path, f"{name!r} lists a rank twice")
    return ranks


_SHOWN = 40  # characters of a wrong value


def _no_groups(path: Path, problem: str) -> InputFileError:
    return InputFileError(
        f"not a groups file: {problem}",
        where=str(path),
        hint='expected JSON such as {"tp0": "0-3", "dp0": [0, 4]}',
    )


@dataclass
class GroupBook:
    """All groups of a job, and the rules that assign a communication to one of them."""

    world_size: int
    counts: Counter[str]
    _named: dict[tuple[str, int], list[GroupKey]] = field(default_factory=dict)
    """(name, rank) -> groups of that name that the rank belongs to."""
    _desc: dict[GroupKey, str] = field(default_factory=dict)
    _local: dict[tuple[int, Ranks], list[int]] = field(default_factory=dict)
    """(rank, ranks) -> process-local group numbers in order of first use."""
    _of_rank: dict[int, list[GroupKey]] = field(default_factory=dict)
    assumed: GroupKey = field(init=False)
    """The group of all ranks, given to communications that say nothing about theirs."""

    def __post_init__(self) -> None:
        self.assumed = GroupKey(tuple(range(self.world_size)), "world")

    @classmethod
    def build(
        cls,
        world_size: int,
        listed: Mapping[int, Sequence[NamedGroup]],
        given: Mapping[str, Ranks],
        counts: Counter[str],
    ) -> GroupBook:
        """Unite what the files list.

        Args:
            world_size: ranks of the job.
            listed: rank -> groups in its file.
            given: groups that the user named.
            counts: assumptions are counted here.

        Raises:
            GroupError: a group has ranks outside the world.
        """
        book = cls(world_size, counts)
        for name, ranks in given.items():
            for rank in ranks:
                book._add(name, rank, GroupKey(ranks, name), "")
        for (rank, group), key in _unified(
            _gathered(listed, world_size, counts), world_size, counts
        ).items():
            book._add(group.name, rank, key, group.desc)
        return book

    def _add(self, name: str, rank: int, key: GroupKey, desc: str) -> None:
        outside = [member for member in key.ranks if not 0 <= member < self.world_size]
        if outside:
            raise GroupError(
                f"process group {name!r} has ranks {format_ranks(outside)} outside the world of "
                f"{self.world_size} ranks",
                where=f"rank {rank}",
                hint="convert the files of one job only; ranks in --groups count from 0",
            )
        if len(set(key.ranks)) < len(key.ranks):
            raise GroupError(
                f"process group {name!r} lists a rank twice: {format_ranks(key.ranks)}",
                where=f"rank {rank}",
                hint="the file was changed or is damaged: record again",
            )
        entries = self._named.setdefault((name, rank), [])
        if key not in entries:
            entries.append(key)
            self._of_rank.setdefault(rank, []).append(key)
        if desc and desc != "undefined":
            self._desc.setdefault(key, desc)

    def assign(self, rank: int, comm: CommOp) -> GroupKey:
        """The group of one communication of a rank.

        Raises:
            GroupError: none or several fit, or it has ranks outside the world.
        """
        if comm.group_name is not None:
            return self._by_name(rank, comm, comm.group_name)
        if comm.group_ranks:
            return self._learn(rank, comm.group_ranks, format_ranks(comm.group_ranks), comm)
        return self._by_size(rank, comm)

    def _by_name(self, rank: int, comm: CommOp, name: str) -> GroupKey:
        known = self._named.get((name, rank), [])
        fitting = [
            key
            for key in known
            if comm.group_ranks is None or set(key.ranks) == set(comm.group_ranks)
        ]
        if comm.group_size is not None:
            fitting = [key for key in fitting if len(key.ranks) == comm.group_size]
        if len(fitting) == 1:
            return fitting[0]
        if comm.group_ranks:
            return self._learn(rank, comm.group_ranks, name, comm)
        if not fitting and comm.group_size == self.world_size:
            return self._learn(rank, tuple(range(self.world_size)), name, comm)
        raise self._refusal(
            rank,
            f"process group {name!r} of {comm.kind} is "
            + ("ambiguous" if fitting else "not listed in any file"),
            fitting or known,
        )

    def _learn(self, rank: int, ranks: Ranks, name: str, comm: CommOp) -> GroupKey:
        if rank not in ranks:
            raise GroupError(
                f"{comm.kind} of process group {name!r}, to which the rank does not belong: "
                f"ranks {format_ranks(ranks)}",
                where=f"rank {rank}",
                hint="is the file's rank right? correct it with --rank FILE=N",
            )
        key = GroupKey(ranks, name)
        self._add(name, rank, key, comm.group_desc or "")
        return key

    def _by_size(self, rank: int, comm: CommOp) -> GroupKey:
        candidates = [
            key for key in self._of_rank.get(rank, []) if comm.group_size in (None, len(key.ranks))
        ]
        if not candidates and comm.group_size is None and comm.communicators > 1:
            raise self._refusal(
                rank,
                f"{comm.kind} names no process group, and the rank seems to be in several: it "
                f"communicates on {comm.communicators} streams",
            )
        if not candidates and comm.group_size in (None, self.world_size):
            # Nothing in the file says otherwise: one group that spans the job.
            if comm.group_size is None:
                return self.assumed
            candidates = [GroupKey(self.assumed.ranks, self.assumed.name)]
        sets = sorted({key.ranks for key in candidates})
        if len(sets) != 1:
            raise self._refusal(
                rank,
                f"{comm.kind} names no process group and "
                + (f"{len(sets)} fit" if sets else "none of its size is known"),
                candidates,
                message_of_two=comm.kind.is_p2p,
            )
        named = [key for key in candidates if key.ranks == sets[0]]
        return self._nth_local(rank, comm, named)

    def _nth_local(self, rank: int, comm: CommOp, named: list[GroupKey]) -> GroupKey:
        """Groups with equal ranks, told apart by their process-local number."""
        numbers = self._local.setdefault((rank, named[0].ranks), [])
        if comm.local_group is None:
            return named[0]
        if comm.local_group not in numbers:
            numbers.append(comm.local_group)
        nth = numbers.index(comm.local_group)
        if nth < len(named):
            return named[nth]
        return GroupKey(named[0].ranks, f"{named[0].name}#{nth}")

    def _refusal(
        self,
        rank: int,
        message: str,
        candidates: Iterable[GroupKey] = (),
        *,
        message_of_two: bool = False,
    ) -> GroupError:
        names = [
            f"{key.name!r}"
            + (f" ({self._desc[key]})" if key in self._desc else "")
            + f" = ranks {format_ranks(key.ranks)}"
            for key in sorted(set(candidates), key=lambda key: (key.name, key.ranks))
        ]
        listed = f"; candidates: {', '.join(names)}" if names else ""
        keep = "keep such communications as local spans with --unmatched keep"
        if not names:
            hint = f"name the groups with --groups FILE.json, or {keep}"
        elif self.counts["unused-flight-recorder"]:
            hint = (
                "nothing in the trace tells them apart, and nothing in the flight-recorder dumps fits: "
                f"are these of the same ranks and run? Or {keep}"
            )
        elif self.counts["group-from-flight-recorder"]:
            hint = f"nothing in the trace or in the dumps tells them apart; {keep}"
        elif message_of_two:
            hint = (
                "nothing in the trace tells them apart, nor would dumps of the flight recorder: "
                "`prismreplay record` the job, which notes the group of everything; or keep sends and "
                "receives as local spans with --unmatched keep; such dumps, as further inputs, then "
                "tell the groups of collectives"
            )
        else:
            hint = (
                "nothing in the trace tells them apart; dumps of the job's flight recorder, as "
                f"further inputs, tell the groups of collectives; or {keep}"
            )
        return GroupError(message + listed, where=f"rank {rank}", hint=hint)

    def table(
        self, used: Iterable[GroupKey]
    ) -> tuple[tuple[ProcessGroup, ...], dict[GroupKey, int]]:
        """Header entries of the listed and used groups, and the id of each group."""
        keys = sorted({*used, *(key for keys in self._of_rank.values() for key in keys)})
        groups = tuple(
            ProcessGroup(id=number, name=key.name, desc=self._desc.get(key, ""), ranks=key.ranks)
            for number, key in enumerate(keys)
        )
        return groups, {key: number for number, key in enumerate(keys)}


def _gathered(
    listed: Mapping[int, Sequence[NamedGroup]], world_size: int, counts: Counter[str]
) -> Mapping[int, Sequence[NamedGroup]]:
    """Give groups that only have an identifier the ranks that know it.

    In the order of their places if all of them tell theirs, else in ascending order.
    """
    members: dict[str, dict[int, NamedGroup]] = {}
    for rank, groups in listed.items():
        for group in groups:
            if group.shared_name and group.ranks is None:
                members.setdefault(group.name, {})[rank] = group
    ranks_of: dict[str, Ranks] = {}
    for name, group_of in members.items():
        places = {
            group.position: rank for rank, group in group_of.items() if group.position is not None
        }
        size = max((group.size or 0 for group in group_of.values()), default=0)
        if len(group_of) != size if size else len(listed) < world_size:
            continue  # not all of its members were recorded, or nobody knows
        if sorted(places) == list(range(len(group_of))):
            ranks_of[name] = tuple(places[place] for place in sorted(places))
        else:
            counts["group-of-communicator-users"] += 1
            ranks_of[name] = tuple(sorted(group_of))
    return {
        rank: [
            replace(group, ranks=ranks_of[group.name])
            if group.ranks is None and group.name in ranks_of
            else group
            for group in groups
        ]
        for rank, groups in listed.items()
    }


def _unified(
    listed: Mapping[int, Sequence[NamedGroup]], world_size: int, counts: Counter[str]
) -> dict[tuple[int, NamedGroup], GroupKey]:
    """One key per group although ranks may call it differently.

    Names come from a counter in each process. Where ranks that share a set of ranks disagree
    about its names, the n-th group of that set is the same group on all of them.
    """
    by_set: dict[Ranks, dict[int, list[NamedGroup]]] = {}
    for rank in sorted(listed):
        for group in listed[rank]:
            ranks = group.ranks
            if ranks is None and (group.name == "0" or group.desc == "default_pg"):
                ranks = tuple(range(world_size))
            if ranks is None:
                counts["group-without-ranks"] += 1
                continue
            by_set.setdefault(ranks, {}).setdefault(rank, []).append(group)
    keys: dict[tuple[int, NamedGroup], GroupKey] = {}
    for ranks, members in by_set.items():
        names = {rank: [group.name for group in groups] for rank, groups in members.items()}
        agree = len({frozenset(entry) for entry in names.values()}) == 1
        equal_counts = len({len(entry) for entry in names.values()}) == 1
        first = names[min(names)]
        if not agree and equal_counts:
            counts["group-names-differ"] += 1
        for rank, groups in members.items():
            for position, group in enumerate(groups):
                name = first[position] if not agree and equal_counts else group.name
                keys[rank, group] = GroupKey(ranks, name)
    return keys
