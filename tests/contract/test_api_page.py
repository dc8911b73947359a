"""docs/reference/api.md lists every public name; `--regenerate` writes it."""

from __future__ import annotations

import importlib
import inspect
from enum import EnumMeta

import pytest

PACKAGES = ("prismtrace", "prismcalib", "prismcalib.synth", "prismreplay")
HEAD = """# Python API

Generated from the code: the public names of the packages, their signatures and what they are for.
Details stand in the docstrings: `help(prismcalib.merge)`. Paths may be `str` or `Path`.
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


def _entry(name: str, value: object) -> str:
    text = (inspect.getdoc(value) or "") if callable(value) else "A table of constants."
    first = " ".join(text.split("\n\n")[0].split())
    if first.startswith(f"{name}("):  # a dataclass without docstring
        first = ""
    signature = "" if isinstance(value, type) else _signature(value)
    cell = first.replace("|", "\\|")
    return f"| `{name}{signature}` | {cell} |"


def render() -> str:
    parts = [HEAD]
    for package in PACKAGES:
        module = importlib.import_module(package)
        rows = [_entry(name, getattr(module, name)) for name in sorted(module.__all__)]
        parts += [f"## {package}\n", "| name | what it is |\n|---|---|", "\n".join(rows) + "\n"]
    return "\n".join(parts)


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
