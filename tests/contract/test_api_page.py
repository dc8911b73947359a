"""docs/reference/api.md lists every public name; `--regenerate` writes it."""

from __future__ import annotations

import importlib
import inspect
from enum import EnumMeta

import pytest

PACKAGES = ("prismtrace", "prismcalib", "prismcalib.synth", "prismreplay")
HEAD = """# Python API

Generated from the code: the public names of the packages, their signatures and what they are for.
Names with more to say lead to it; it is what `help(prismcalib.merge)` says, too. Paths may be `str`
or `Path`; a `source` is a trace that is open, or the path of one.

Where does a rank spend its time, its exposed (not hidden) communication and its idle time among it?
`prismcalib.predict(source).ranks` says it. Rows of a trace alone do not: a row of computation is a
span of many kernels at the default grain, and gaps between rows miss the idle time inside it
(`dur_ns - x_busy_ns`, see [columns](columns.md)).
"""


def _signature(value: object) -> str:
    if isinstance(value, EnumMeta):
        return ""
    try:
        found = inspect.signature(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return ""
    names = []
    for parameter in found.parameters.values():
        bare = parameter.replace(annotation=inspect.Parameter.empty)
        if parameter.default is not inspect.Parameter.empty:
            bare = bare.replace(default=inspect.Parameter.empty)
            names.append(f"{bare}=…")
        else:
            names.append(str(bare))
    kinds = [parameter.kind for parameter in found.parameters.values()]
    keyword = [kind is inspect.Parameter.KEYWORD_ONLY for kind in kinds]
    if any(keyword) and inspect.Parameter.VAR_POSITIONAL not in kinds:
        names.insert(keyword.index(True), "*")
    return f"({', '.join(names)})"


def _docstring(name: str, value: object) -> tuple[str, str]:
    """The first paragraph, and the rest."""
    text = (inspect.getdoc(value) or "") if callable(value) else "A table of constants."
    first, _, rest = text.partition("\n\n")
    if first.startswith(f"{name}("):  # a dataclass without docstring
        return "", ""
    return " ".join(first.split()), rest.strip()


def _anchor(package: str, name: str) -> str:
    return f"{package}.{name}".replace(".", "").lower()


def _entry(package: str, name: str, value: object) -> str:
    first, rest = _docstring(name, value)
    signature = "" if isinstance(value, type) else _signature(value)
    shown = f"`{name}{signature}`"
    shown = f"[{shown}](#{_anchor(package, name)})" if rest else shown
    return f"| {shown} | {first.replace('|', chr(92) + '|')} |"


def render() -> str:
    parts = [HEAD]
    details = []
    for package in PACKAGES:
        module = importlib.import_module(package)
        values = {name: getattr(module, name) for name in sorted(module.__all__)}
        rows = [_entry(package, name, value) for name, value in values.items()]
        parts += [f"## {package}\n", "| name | what it is |\n|---|---|", "\n".join(rows) + "\n"]
        for name, value in values.items():
            rest = _docstring(name, value)[1]
            if rest:
                details += [f"### {package}.{name}\n", f"```text\n{rest}\n```\n"]
    return "\n".join([*parts, "## Details\n", *details])


def test_the_page_lists_every_public_name(repo, regenerate):
    page = repo / "docs/reference/api.md"
    text = render()
    if regenerate:
        page.write_text(text, encoding="utf-8")
    assert page.read_text(encoding="utf-8") == text


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_says_what_it_is(package):
    module = importlib.import_module(package)
    values = {name: getattr(module, name) for name in module.__all__}
    silent = [name for name, value in values.items() if callable(value) and not value.__doc__]
    assert silent == []
