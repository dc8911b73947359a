"""What an export says about the session: when it began, on which host, with which environment."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from prismtrace.converters.nsys.database import Database

__all__ = ["Session", "read_session"]

_ASSIGNMENT = re.compile(r"(\w+)=(.*)", re.DOTALL)
_OPTION = re.compile(r"--([\w-]+)=(.*)", re.DOTALL)
_DIGITS = 9


@dataclass(frozen=True)
class Session:
    """Facts of one export; null where it does not say."""

    epoch_ns: int
    """Wall clock time at which its own times are 0."""
    host: str | None
    environment: Mapping[str, str]
    """Of the program that was started, or else of the machine."""
    options: Mapping[str, str]
    """Command line options of the program, such as those of torchrun."""

    def number(self, *names: str) -> int | None:
        """The first of some environment variables that is a number."""
        return _first_number(self.environment, names)

    def option(self, *names: str) -> int | None:
        """The same for options, in which - and _ are one."""
        return _first_number(self.options, names)


def _first_number(values: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    for name in names:
        text = values.get(name, "")
        if text.isascii() and text.isdecimal() and len(text) <= _DIGITS:
            return int(text)
    return None


def read_session(database: Database, counts: Counter[str]) -> Session:
    """Read the tables of metadata that are there."""
    epochs = _column(database, "TARGET_INFO_SESSION_START_TIME", "utcEpochNs")
    known = [value for (value,) in epochs if type(value) is int and 0 <= value < 2**62]
    counts["unknown-epoch"] += not known
    target = {
        str(k): str(v) for k, v in _column(database, "TARGET_INFO_SYSTEM_ENV", "name", "value")
    }
    environment = {
        match[1]: match[2]
        for part in target.get("DeviceEnvironment", "").split(";")
        if (match := _ASSIGNMENT.fullmatch(part))
    }
    options: dict[str, str] = {}
    arguments: list[str] = []
    for name, value in _column(database, "META_DATA_CAPTURE", "name", "value"):
        _, _, what = str(name).partition(":")
        if what == "ENVIRONMENT_VARIABLE" and (match := _ASSIGNMENT.fullmatch(str(value))):
            environment[match[1]] = match[2].strip('"')
        elif what.startswith("ARGUMENT_"):
            arguments.append(str(value))
    for argument, following in pairwise([*arguments, ""]):
        match = _OPTION.fullmatch(argument)
        if match:
            options.setdefault(match[1].replace("-", "_"), match[2])
        elif argument.startswith("--"):
            options.setdefault(argument[2:].replace("-", "_"), following)
    host = target.get("Hostname") or None
    return Session(known[0] if known else 0, host, environment, options)


def _column(database: Database, table: str, *names: str) -> list[tuple[object, ...]]:
    present = database.columns(table)
    if not {name.lower() for name in names} <= set(present):
        return []
    return database.rows(f"SELECT {', '.join(names)} FROM {table}")  # noqa: S608 - our names
