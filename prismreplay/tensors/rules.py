"""Rules that say what communications give a rank without its partners. No torch in here.

    otherwise = "error"

    [[rule]]
    name = "tokens"
    kind = "broadcast"
    dtype = "int64"
    min_bytes = 1024
    uniform = [0, "vocabulary"]

    [parameters]
    vocabulary = 50257

Everything that a rule says about an operation has to hold; the first rule that holds counts.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from enum import StrEnum
from fnmatch import fnmatchcase
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import parse_qsl

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from prismreplay.errors import TensorRulesError
from prismreplay.runtime.axes import axis_of
from prismreplay.runtime.operations import Call, Op, TensorSpec
from prismtrace.errors import InputFileError
from prismtrace.input_files import read_text
from prismtrace.ranks import parse_ranks
from prismtrace.schema import DType

__all__ = ["BUILTIN", "Produce", "Rule", "RuleSet", "builtin_names", "read_rules"]

BUILTIN = "builtin:"
"""How names of the rule sets that come with the package begin."""


class Produce(StrEnum):
    """What a rule gives; those with a value are keys of their own in the file."""

    REAL = "real"
    """Perform the operation with its partners."""
    ZEROS = "zeros"
    OWN = "own"
    """The rank's own contribution, as if all partners did the same."""
    MIRROR = "mirror"
    """All partners contribute what the rank does: sums are so many times its share. What it has
    nothing to give for (messages, what a root scatters) are random numbers."""
    KEEP = "keep"
    """Leave the rank's tensors as they are."""
    RECORDED = "recorded"
    """From the recording given beside the rules."""


def _listed(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


def _ranks(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        return (value,)
    return parse_ranks(value) if isinstance(value, str) else value


_Number = int | float | str
_Many = BeforeValidator(_listed)
_Numbers = Annotated[tuple[int, ...], BeforeValidator(_ranks)]
_KINDS = {call.value: call for call in Call}
_P2P = "p2p"


def _calls(value: Any) -> Any:
    """A kind, a form, `p2p`, or a list of them."""
    found: list[Call] = []
    for word in _listed(value):
        if word in (_P2P, Call.RECV.value):
            found.append(Call.RECV)
        elif word == Call.SEND.value:
            raise ValueError("a send gives nothing: write 'recv', which covers its send")
        elif word in _KINDS:
            # A kind stands for all of its forms; the names of forms are exact.
            found += [call for call in Call if word in (call.value, call.kind.value)]
        else:
            raise ValueError(f"{word!r} is none of {', '.join([*_KINDS, _P2P])}")
    return tuple(found)


class Rule(BaseModel):
    """Which operations (all of it has to hold; what is absent always holds), and what they give."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    name: str = ""
    """What messages call it."""
    kind: Annotated[tuple[Call, ...], BeforeValidator(_calls)] = ()
    """Kinds of operation, or their forms (``all_gather_single``); `p2p` is the same as `recv`."""
    axis: Annotated[tuple[str, ...], _Many] = ()
    """Axis of the group, as its name or description tells: dp, tp, pp, cp, ep, …, `world`."""
    group: Annotated[tuple[str, ...], _Many] = ()
    """Patterns (``mesh_*``) for the name or the description of the group."""
    dtype: Annotated[tuple[DType, ...], _Many] = ()
    """Element types; all tensors of the operation have one of them."""
    shape: tuple[Annotated[int, Field(ge=0)] | Literal["*"], ...] | None = None
    """Shape of every tensor of the operation; ``"*"`` is any extent."""
    min_bytes: Annotated[int, Field(ge=0)] | None = None
    """Least payload."""
    max_bytes: Annotated[int, Field(ge=0)] | None = None
    """Largest payload."""
    rank: _Numbers | None = None
    """Global ranks (``"0-7,12"``); for p2p the receiver."""
    step: _Numbers | None = None
    """Training steps (``"0-4"``)."""
    in_step: bool | None = None
    """Whether a training step is under way; else the program sets up, or is between steps."""
    root: int | None = None
    """Global rank of the root."""
    peer: int | None = None
    """Global rank of the sender, for p2p."""

    produce: Produce | None = None
    constant: int | float | bool | None = None
    uniform: Annotated[tuple[_Number, ...], Field(min_length=2, max_length=2)] | None = None
    """Random numbers from the first on, below the second."""
    python: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")] | None = None
    """A function ``module:function`` of one `Request` that returns the tensors."""
    recorded: str | None = None
    """Folder of a recording, from the file's folder."""

    @model_validator(mode="after")
    def _one_product(self) -> Self:
        given = [name for name in _PRODUCTS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"needs exactly one of {', '.join(_PRODUCTS)}; it has {' and '.join(given) or 'none'}"
            )
        return self

    def holds(self, rank: int, op: Op) -> bool:
        """True when the operation, as the global rank `rank` issued it, is meant.

        p2p is looked at from the receiver's side.
        """
        group = op.group
        tensors = op.outputs or op.inputs
        return (
            (not self.kind or op.call in self.kind)
            and (not self.axis or axis_of(group.name, group.desc) in self.axis)
            and (not self.group or _fits_any((group.name, group.desc), self.group))
            and (not self.dtype or all(tensor.dtype in self.dtype for tensor in tensors))
            and (self.shape is None or all(_fits(tensor, self.shape) for tensor in tensors))
            and (self.min_bytes is None or op.payload_bytes >= self.min_bytes)
            and (self.max_bytes is None or op.payload_bytes <= self.max_bytes)
            and (self.rank is None or rank in self.rank)
            and (self.step is None or op.step in self.step)
            and (self.in_step is None or self.in_step == (op.step is not None))
            and (self.root is None or op.root == self.root)
            and (self.peer is None or op.peer == self.peer)
        )


_PRODUCTS = ("produce", "constant", "uniform", "python", "recorded")


def _fits_any(texts: Sequence[str], patterns: Sequence[str]) -> bool:
    return any(text and fnmatchcase(text, pattern) for text in texts for pattern in patterns)


def _fits(tensor: TensorSpec, shape: Sequence[int | str]) -> bool:
    return len(tensor.shape) == len(shape) and all(
        wanted in ("*", extent) for wanted, extent in zip(shape, tensor.shape, strict=True)
    )


class RuleSet(BaseModel):
    """A rules file."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    rule: tuple[Rule, ...] = ()
    otherwise: Literal["real", "error"] = "real"
    """Operations that no rule is about: perform them, or stop."""
    seed: int = 0
    """Random numbers depend on it, on the group and the number of the operation in it."""
    parameters: dict[str, int | float] = {}
    """Numbers that `uniform` may name; ``--tensors 'FILE?name=value'`` sets them."""
    source: Annotated[str, Field(exclude=True)] = ""
    """The file, for messages."""

    @model_validator(mode="after")
    def _parameters_known(self) -> Self:
        for number, rule in enumerate(self.rule, 1):
            for word in rule.uniform or ():
                if isinstance(word, str) and word not in self.parameters:
                    raise ValueError(f"rule {number}: [parameters] has no {word!r}")
            if rule.uniform and self.value(rule.uniform[0]) >= self.value(rule.uniform[1]):
                raise ValueError(f"rule {number}: uniform needs a first number below the second")
        return self

    def value(self, number: _Number) -> int | float:
        """A number, or the one that a parameter's name stands for."""
        return self.parameters[number] if isinstance(number, str) else number

    def first(self, rank: int, op: Op) -> tuple[int, Rule] | None:
        """Number, counted from 1, and text of the first rule about an operation."""
        for number, rule in enumerate(self.rule, 1):
            if rule.holds(rank, op):
                return number, rule
        return None

    @property
    def folder(self) -> Path:
        """Where relative paths of the rules start."""
        return Path() if self.source.startswith(BUILTIN) else Path(self.source).parent


def builtin_names() -> list[str]:
    """Names of the rule sets that come with the package."""
    return sorted(
        entry.name.removesuffix(".toml")
        for entry in _builtin_folder().iterdir()
        if entry.name.endswith(".toml")
    )


def _builtin_folder() -> Any:
    return files("prismreplay") / "tensors" / "builtin"


def read_rules(name: str | os.PathLike[str]) -> RuleSet:
    """The rules in a file, or in the package: ``builtin:tokens?vocabulary=50257``.

    Raises:
        TensorRulesError: no such file or set, not TOML, or not as `RuleSet` says; names the
            file, the line, the rule and the field.
    """
    path, _, query = os.fspath(name).partition("?")
    text = _text(path)
    try:
        found: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise TensorRulesError(
            f"not TOML: {error}", where=path, hint="texts need quotes, numbers none"
        ) from error
    _set_parameters(found, query, path)
    try:
        return RuleSet.model_validate({**found, "source": path})
    except ValidationError as error:
        raise _told(error, path, text) from error


def _text(path: str) -> str:
    if path.startswith(BUILTIN):
        name = path.removeprefix(BUILTIN)
        if name not in builtin_names():
            raise TensorRulesError(
                f"no rule set of that name comes with the package: {name or '(no name)'}",
                where=path,
                hint="there are " + ", ".join(BUILTIN + known for known in builtin_names()),
            )
        text: str = (_builtin_folder() / f"{name}.toml").read_text(encoding="utf-8")
        return text
    try:
        return read_text(path)
    except InputFileError as error:
        raise TensorRulesError(
            error.message,
            where=path,
            hint="name a rules file, the folder of a recording, or builtin:NAME",
        ) from error


def _set_parameters(found: dict[str, Any], query: str, path: str) -> None:
    """Replace numbers under [parameters] by those given behind the name."""
    known = found.get("parameters")
    for name, text in parse_qsl(query, keep_blank_values=True):
        if not isinstance(known, Mapping) or name not in known:
            raise TensorRulesError(
                f"the rules have no parameter {name!r}",
                where=path,
                hint=f"parameters: {', '.join(known or ()) or 'none'}",
            )
        try:
            known = found["parameters"] = {**known, name: int(text)}
        except ValueError as error:
            raise TensorRulesError(f"{name}={text!r} is not a whole number", where=path) from error


def _told(error: ValidationError, path: str, text: str) -> TensorRulesError:
    """The first complaint, with its line, rule and field."""
    first = error.errors()[0]
    place = list(first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    where, line = path, None
    if place and place[0] == "rule" and len(place) > 1 and isinstance(place[1], int):
        field = str(place[2]) if len(place) > 2 else ""
        line = _line_of(text, place[1], field)
        where += f", rule {place[1] + 1}" + (f", {field}" if field else "")
    elif place:
        where += f", {place[0]}"
    if line is not None:
        where += f" (line {line})"
    return TensorRulesError(
        message, where=where, hint="see the guide on tensors for what a rule may say"
    )


def _line_of(text: str, rule: int, field: str) -> int | None:
    """Line of a field of the rule with that place in the file, or of the rule's head."""
    head = -1
    found = None
    for number, line in enumerate(text.splitlines(), 1):
        if re.match(r"\s*\[\[\s*rule\s*\]\]", line):
            head += 1
            if head == rule:
                found = number
        elif head == rule and field and re.match(rf"\s*{re.escape(field)}\s*=", line):
            return number
    return found
