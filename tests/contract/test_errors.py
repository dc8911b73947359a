"""Every error class has a code of its own and a heading in docs/reference/errors.md."""

from __future__ import annotations

import importlib
import pickle
import re

from prismtrace.errors import PrismError

MODULES = ("prismtrace.errors", "prismcalib.errors", "prismreplay.errors")


def _classes() -> list[type[PrismError]]:
    for module in MODULES:
        importlib.import_module(module)
    found: list[type[PrismError]] = []
    waiting = [PrismError]
    while waiting:
        kind = waiting.pop()
        found.append(kind)
        waiting.extend(kind.__subclasses__())
    return [kind for kind in found if kind.__module__.startswith("prism")]


def test_all_classes_live_in_the_errors_modules():
    assert {kind.__module__ for kind in _classes()} <= set(MODULES)


def test_codes_are_unique_and_kebab_case():
    codes = [kind.code for kind in _classes()]
    assert len(codes) == len(set(codes))
    assert [code for code in codes if not re.fullmatch(r"[a-z]+(-[a-z0-9]+)*", code)] == []


def test_every_code_has_its_heading_and_no_heading_lacks_a_code(repo):
    text = (repo / "docs/reference/errors.md").read_text(encoding="utf-8")
    headings = re.findall(r"^### (\S+)$", text, re.MULTILINE)
    assert len(headings) == len(set(headings))
    assert set(headings) == {kind.code for kind in _classes()}


def test_errors_survive_pickling():
    for kind in _classes():
        copy = pickle.loads(pickle.dumps(kind("it broke", where="row 3", hint="mend it")))
        assert (type(copy), copy.message, copy.where, copy.hint) == (
            kind,
            "it broke",
            "row 3",
            "mend it",
        )
