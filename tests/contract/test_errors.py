"""Every error class has a code of its own and a heading in docs/reference/errors.md."""

from __future__ import annotations

import ast
import importlib
import pickle
import re
import traceback

import pytest

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


def _tree(kind: type[PrismError], depth: int = 0) -> list[str]:
    line = f"{'    ' * depth}{kind.__name__}  {kind.code}"
    below = sorted(kind.__subclasses__(), key=lambda child: child.__name__)
    own = [child for child in below if child.__module__ in MODULES]
    return [line, *(text for child in own for text in _tree(child, depth + 1))]


def test_the_tree_is_drawn(repo, regenerate):
    _classes()
    page = repo / "docs/reference/errors.md"
    text = page.read_text(encoding="utf-8")
    head, tail = re.split(r"(?<=## The tree\n\n)```text\n.*?```(?=\n)", text, flags=re.DOTALL)
    drawn = "\n".join(["```text", *_tree(PrismError), "```"])
    if regenerate:
        page.write_text(f"{head}{drawn}{tail}", encoding="utf-8")
    assert page.read_text(encoding="utf-8") == f"{head}{drawn}{tail}", "run `make docs`"


# Errors of the Python interface, whose callers gave arguments that do not fit together.
OF_ARGUMENTS = {"CalibError"}


@pytest.mark.parametrize("package", ["prismtrace", "prismcalib", "prismreplay"])
def test_every_error_says_what_to_do_next(package, repo):
    kinds = {kind.__name__: kind for kind in _classes()}
    silent = []
    for path in sorted((repo / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            kind = kinds.get(ast.unparse(node.func).rpartition(".")[2])
            given = {keyword.arg for keyword in node.keywords} & {"hint", None}
            if kind and not given and kind.usual_hint is None:
                silent.append((kind.__name__, f"{path.name}:{node.lineno}"))
    assert [one for one in silent if one[0] not in OF_ARGUMENTS] == []


def test_errors_survive_pickling():
    for kind in _classes():
        copy = pickle.loads(pickle.dumps(kind("it broke", where="row 3", hint="mend it")))
        assert (type(copy), copy.message, copy.where, copy.hint) == (
            kind,
            "it broke",
            "row 3",
            "mend it",
        )


def test_a_traceback_ends_with_the_hint():
    error = PrismError("it broke", hint="mend it")
    error.add_note("in a worker")
    error.hint = "mend that"
    told = traceback.format_exception(error)
    assert told[-3:] == [
        "prismtrace.errors.PrismError: it broke\n",
        "in a worker\n",
        "hint: mend that\n",
    ]
    assert traceback.format_exception(pickle.loads(pickle.dumps(error)))[-1] == told[-1]
