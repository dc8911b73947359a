"""What docs/reference/api.md says below its marker, made from the code.

Every public name is shown as `help()` would: its call, docstring, properties and methods. Types
that signatures name are described too, as far as they are ours, so that nothing leads nowhere.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from prismtrace.errors import PrismError

PACKAGES = ("prismtrace", "prismcalib", "prismcalib.synth", "prismreplay")
NO_PART_OF_IT = {"apply"}
"""Methods that only the packages themselves call: an edit's, on a draft."""

_REFERENCE = re.compile(r"`((?:prismtrace|prismcalib|prismreplay)(?:\.\w+)*)\.(\w+)`")
"""A name in a docstring that says where it is."""

_WIDTH = 100
_SHORT = 40


@dataclass(frozen=True)
class Place:
    """Where something is defined: `prismtrace.trace`, `Trace`."""

    module: str
    name: str


@dataclass(frozen=True)
class Entry:
    """One name of the page; `title` is what its heading says."""

    title: str
    place: Place

    @cached_property
    def value(self) -> Any:
        return getattr(importlib.import_module(self.place.module), self.place.name)

    @property
    def name(self) -> str:
        return self.title.rpartition(".")[2]

    @property
    def link(self) -> str:
        return f"[`{self.name}`](#{self.title.replace('.', '').lower()})"

    @cached_property
    def text(self) -> str:
        """Call, docstring, properties and methods."""
        value = self.value
        if not inspect.isclass(value):
            return (
                _of_function(self.name, value) if inspect.isfunction(value) else _of_constant(self)
            )
        parts = [_of_class(self.name, value), _body(value)]
        parts += [_of_member(value, *member) for member in members(value)]
        return "\n\n".join(part for part in parts if part)

    @cached_property
    def annotations(self) -> list[tuple[str, str]]:
        """All that signatures and fields are annotated with, and the module that says so."""
        value = self.value
        if not inspect.isfunction(value) and not inspect.isclass(value):
            _, assigned = _definition(self.place)
            return [(ast.unparse(assigned), self.place.module)]
        if not inspect.isclass(value):
            return _annotations(value)
        if issubclass(value, Enum | PrismError) or value.__name__ == "Node":
            return []
        found = [] if issubclass(value, BaseModel) else _annotations(value.__init__)
        for owner in value.__mro__:
            own = inspect.get_annotations(owner)
            found += [
                (str(text), owner.__module__)
                for name, text in own.items()
                if not name.startswith("_")
            ]
        for _, _, function in members(value):
            found += _annotations(function)
        return found


# --- what there is --------------------------------------------------------------------


def public() -> dict[str, list[Entry]]:
    """Every public name of every package."""
    entries = {}
    for package in PACKAGES:
        module = importlib.import_module(package)
        entries[package] = [
            Entry(f"{package}.{name}", home(Place(package, name)) or Place(package, name))
            for name in sorted(module.__all__)
        ]
    return entries


def named(entries: list[Entry]) -> list[Entry]:
    """Types of ours that these name, and those that those name, which are not among them."""
    known = {entry.place: entry for entry in entries}
    left = list(entries)
    while left:
        for place in _places(left.pop()):
            if place not in known:
                known[place] = Entry(f"{place.module}.{place.name}", place)
                left.append(known[place])
    return sorted(set(known.values()) - set(entries), key=lambda entry: entry.title)


def _places(entry: Entry) -> list[Place]:
    """What an entry names, in order."""
    found = {}
    for module, name in _REFERENCE.findall(entry.text):
        place = home(Place(module, name)) if importlib.util.find_spec(module) else None
        if place and place != entry.place:
            found[place] = None
    for text, module in entry.annotations:
        bare = ast.parse(_plain(ast.parse(text, mode="eval").body), mode="eval")
        names = [node for node in ast.walk(bare) if isinstance(node, ast.Name)]
        for node in sorted(names, key=lambda node: node.col_offset):
            if not node.id.startswith("_"):
                place = home(Place(module, node.id))
                if place and place != entry.place:
                    found[place] = None
    return list(found)


def home(place: Place) -> Place | None:
    """Where a name that a module uses is defined, if that is here."""
    for node in _statements(place.module):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == place.name:
                    ours = (node.module or "").startswith(PACKAGES)
                    return home(Place(str(node.module), alias.name)) if ours else None
        elif place.name in _defined(node):
            return None if isinstance(node, ast.Import) else place
    return None


def _definition(place: Place) -> tuple[int, ast.expr]:
    """The number of the statement that assigns a constant, and its value."""
    for number, node in enumerate(_statements(place.module)):
        if place.name in _defined(node) and isinstance(node, ast.Assign | ast.AnnAssign):
            assert node.value is not None
            return number, node.value
    raise AssertionError(f"{place} is not assigned")


@cache
def _statements(module: str) -> list[ast.stmt]:
    """Statements of a module, those for type checkers among them."""
    path = importlib.import_module(module).__file__
    body = ast.parse(Path(str(path)).read_text(encoding="utf-8")).body
    return [inner for node in body for inner in (node.body if isinstance(node, ast.If) else [node])]


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return [node.name]
    if isinstance(node, ast.Import):
        return [alias.asname or alias.name for alias in node.names]
    if isinstance(node, ast.AnnAssign):
        return [ast.unparse(node.target)]
    return [ast.unparse(target) for target in node.targets] if isinstance(node, ast.Assign) else []


def _annotations(function: Any) -> list[tuple[str, str]]:
    module = getattr(function, "__module__", "")
    if not str(module).startswith(PACKAGES):
        # What `dataclass` made: its fields are looked at by themselves.
        return []
    return [
        (text, module)
        for name, text in function.__annotations__.items()
        if isinstance(text, str) and not name.startswith("_")
    ]


def members(value: type) -> Iterator[tuple[str, str, Any]]:
    """Name, sort and function of properties and public methods, inherited ones of ours too."""
    seen = set()
    told_once = PrismError in value.__mro__[1:]
    for owner in value.__mro__[:1] if told_once else value.__mro__:
        if not owner.__module__.startswith(PACKAGES):
            continue
        for name, member in vars(owner).items():
            if name in seen or name.startswith("_") or name in NO_PART_OF_IT:
                continue
            seen.add(name)
            function = getattr(member, "fget", None) or getattr(member, "func", None)
            if function:
                yield name, "property", function
            elif isinstance(member, classmethod | staticmethod):
                yield name, "class", member.__func__
            elif inspect.isfunction(member):
                yield name, "method", member


# --- text -----------------------------------------------------------------------------


def _parameter(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    text = stars + parameter.name
    if parameter.annotation is not parameter.empty:
        # Those of a named tuple are wrapped.
        text += f": {getattr(parameter.annotation, '__forward_arg__', parameter.annotation)}"
    if parameter.default is not parameter.empty:
        shown = str(parameter.default) if isinstance(parameter.default, Enum) else ""
        shown = shown or repr(parameter.default)
        text += f" = {shown if len(shown) <= _SHORT and '<' not in shown else '…'}"
    return text


def call(name: str, function: Any, *, skip_first: bool = False) -> str:
    """How to call something, with types; one parameter a line if they do not fit in one."""
    texts = _arguments(function, _parameter, skip_first=skip_first)
    returned = inspect.signature(function).return_annotation
    says = isinstance(returned, str) and not inspect.isclass(function) and returned != "None"
    end = f") -> {returned}" if says else ")"
    line = f"{name}({', '.join(texts)}{end}"
    if len(line) <= _WIDTH:
        return line
    return "\n".join([f"{name}(", *(f"    {text}," for text in texts), end])


def _arguments(
    function: Any, shown: Callable[[inspect.Parameter], str], *, skip_first: bool = False
) -> list[str]:
    """Each parameter as `shown`, and the star before those that have to be named."""
    parameters = list(inspect.signature(function).parameters.values())[1 if skip_first else 0 :]
    parameters = [each for each in parameters if not each.name.startswith("_")]
    star = any(each.kind is each.VAR_POSITIONAL for each in parameters)
    texts = []
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            texts.append("*")
            star = True
        texts.append(shown(parameter))
    return texts


def _of_function(name: str, value: Any) -> str:
    return f"{call(name, value)}\n\n{inspect.getdoc(value)}"


def _of_class(name: str, value: type) -> str:
    """How one is made; of errors and enums, what they are."""
    if issubclass(value, Enum):
        values = f"{name}: {', '.join(str(member.value) for member in value)}"
        return textwrap.fill(values, _WIDTH, subsequent_indent="    ")
    if issubclass(value, PrismError):
        made = call(name, value) if value is PrismError else name
        return f"{made}, code {value.code}"
    if issubclass(value, BaseModel):
        return name
    return call(name, value)


def _body(value: type) -> str:
    """The docstring, and what is said below fields and values."""
    text = inspect.getdoc(value) or ""
    if value.__name__ == "Node":
        return text
    lines = []
    if issubclass(value, BaseModel):
        for name, field in value.model_fields.items():
            annotation = _plain(ast.parse(value.__annotations__[name], mode="eval").body)
            default = "" if field.is_required() else f" = {field.default!r}"
            lines.append(f"    {name}: {annotation}{default}")
            lines.append(_indented(field.description or "", 8))
    else:
        for name, says in said_below(value).items():
            shown = value[name].value if issubclass(value, Enum) else name
            lines.append(_indented(f"{shown}: {says}", 4, 8))
    return text + "".join(["\n\nFields:", *(f"\n{line}" for line in lines)] if lines else [])


def said_below(value: type) -> dict[str, str]:
    """Docstrings of a class's attributes."""
    found = {}
    for owner in _statements(value.__module__):
        if isinstance(owner, ast.ClassDef) and owner.name == value.__name__:
            for node, says in pairwise(owner.body):
                text = says.value if isinstance(says, ast.Expr) else None
                if isinstance(text, ast.Constant) and isinstance(node, ast.Assign | ast.AnnAssign):
                    found[_defined(node)[0]] = str(text.value)
    return found


def _indented(text: str, first: int, then: int | None = None) -> str:
    then = first if then is None else then
    return textwrap.fill(
        " ".join(text.split()),
        _WIDTH,
        initial_indent=" " * first,
        subsequent_indent=" " * then,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _plain(node: ast.expr) -> str:
    """An annotation without the rules for values."""

    class Bare(ast.NodeTransformer):
        def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
            self.generic_visit(node)
            annotated = isinstance(node.value, ast.Name) and node.value.id == "Annotated"
            return node.slice.elts[0] if annotated and isinstance(node.slice, ast.Tuple) else node

    return ast.unparse(Bare().visit(node))


def _of_member(value: type, name: str, sort: str, function: Any) -> str:
    if sort == "property":
        head = f".{name}: {function.__annotations__.get('return', '')}"
    else:
        head = call(
            f"{value.__name__ if sort == 'class' else ''}.{name}", function, skip_first=True
        )
    return f"{head}\n{textwrap.indent(inspect.getdoc(function) or '', '    ')}"


def _of_constant(entry: Entry) -> str:
    number, assigned = _definition(entry.place)
    value = _plain(assigned)
    says = _statements(entry.place.module)[number + 1]
    text = f"{entry.name} = {value}" if len(value) <= _WIDTH else entry.name
    if isinstance(says, ast.Expr) and isinstance(says.value, ast.Constant):
        text += f"\n\n{inspect.cleandoc(str(says.value.value))}"
    return text


# --- the page -------------------------------------------------------------------------


def _row(entry: Entry) -> str:
    value = entry.value
    constant = not inspect.isclass(value) and not inspect.isfunction(value)
    doc = _of_constant(entry).partition("\n\n")[2] if constant else inspect.getdoc(value) or ""
    first = " ".join(doc.partition("\n\n")[0].split())
    arguments = ""
    if inspect.isfunction(value):
        arguments = f"({', '.join(_arguments(value, _bare))})"
    shown = entry.link.replace(f"`{entry.name}`", f"`{entry.name}{arguments}`")
    return f"| {shown} | {first.replace('|', chr(92) + '|')} |"


def _bare(parameter: inspect.Parameter) -> str:
    star = "*" if parameter.kind is parameter.VAR_POSITIONAL else ""
    given = "" if parameter.default is parameter.empty else "=…"
    return f"{star}{parameter.name}{given}"


def _section(entry: Entry, known: dict[Place, Entry]) -> list[str]:
    parts = [f"### {entry.title}\n", f"```text\n{entry.text.rstrip()}\n```\n"]
    if entry.name == "Node":
        parts.append("Its fields are the [columns of a trace](columns.md).\n")
    links = [known[place].link for place in _places(entry)]
    if links:
        parts.append(f"Named here: {', '.join(links)}\n")
    return parts


def render() -> str:
    """All below the marker."""
    packages = public()
    entries = [entry for listed in packages.values() for entry in listed]
    further = named(entries)
    known = {entry.place: entry for entry in [*entries, *further]}
    parts = []
    for package, listed in packages.items():
        rows = "\n".join(_row(entry) for entry in listed)
        parts += [f"## {package}\n", "| name | what it is |\n|---|---|", rows + "\n"]
    parts.append("## Details\n")
    for entry in entries:
        parts += _section(entry, known)
    parts.append("## Types that they name\n")
    for entry in further:
        parts += _section(entry, known)
    return "\n".join(parts)
