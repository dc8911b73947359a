"""docs/reference/api.md says all that a call needs; `--regenerate` writes what is generated."""

from __future__ import annotations

import inspect
import re
from enum import Enum

import pytest
from pydantic import BaseModel

from prismtrace.errors import PrismError
from tests.contract.api_page import Entry, named, public, render, said_below

MARKER = "<!-- Below this line the page is generated: `pytest tests/contract --regenerate`. -->\n"
PUBLIC = [entry for entries in public().values() for entry in entries]
ENTRIES = [*PUBLIC, *named(PUBLIC)]


def _title(entry: Entry) -> str:
    return entry.title


def test_the_page_lists_every_public_name(repo, regenerate):
    page = repo / "docs/reference/api.md"
    written = page.read_text(encoding="utf-8")
    text = f"{written.partition(MARKER)[0]}{MARKER}\n{render()}"
    if regenerate:
        page.write_text(text, encoding="utf-8")
    assert page.read_text(encoding="utf-8") == text


def test_every_link_of_the_page_leads_to_one_heading(repo):
    text = (repo / "docs/reference/api.md").read_text(encoding="utf-8")
    headings = re.findall(
        r"^##+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE
    )
    places = [re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings]
    assert sorted(set(places)) == sorted(places)
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) - set(places) == set()


def test_every_name_that_a_text_points_to_is_on_the_page(repo):
    text = (repo / "docs/reference/api.md").read_text(encoding="utf-8").partition(MARKER)[2]
    named = set(re.findall(r"`((?:prismtrace|prismcalib|prismreplay)(?:\.\w+)+)", text))
    assert named - {entry.title for entry in ENTRIES} == set()


@pytest.mark.parametrize("entry", ENTRIES, ids=_title)
def test_every_name_says_what_it_is(entry):
    assert "\n\n" in entry.text


@pytest.mark.parametrize("entry", ENTRIES, ids=_title)
def test_every_argument_and_field_is_described(entry):
    value = entry.value
    told_elsewhere = (Enum, PrismError)
    if inspect.isclass(value) and issubclass(value, BaseModel):
        assert [name for name, field in value.model_fields.items() if not field.description] == []
    elif inspect.isfunction(value) or (
        inspect.isclass(value) and not issubclass(value, told_elsewhere)
    ):
        names = [name for name in inspect.signature(value).parameters if not name.startswith("_")]
        text = entry.text.partition("\n\n")[2]
        below = said_below(value) if inspect.isclass(value) else {}
        in_text = [name for name in names if f"`{name}`" in text or _listed(name, text)]
        assert [name for name in names if name not in {*in_text, *below}] == []


def _listed(name: str, text: str) -> bool:
    """Whether a section of the docstring names it, alone or with others: `name, other: ...`."""
    return bool(re.search(rf"^ *(?:\w+, )*{name}(?:, \w+)*: ", text, re.MULTILINE))
