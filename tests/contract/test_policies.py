"""docs/reference/policies.md explains every count that `convert` and `merge` can print."""

from __future__ import annotations

import re

# What a family of names is completed with: `counts[f"edge-{origin}"]`.
FAMILIES = {
    "edge": ("comm-input", "host-wait", "inferred-wait", "record-wait", "stream-wait"),
    "matched": ("by-comms-id", "by-seq", "by-order", "alone"),
    "contradicting": ("comms-id", "seq"),
}
COUNT = re.compile(r'counts\[(?:"([a-z0-9-]+)"|f"([a-z]+)-\{)')
OTHER = re.compile(
    r'"((?:(?:dropped|kept|early|exported|unmatched|cut)-|merge\.)[a-z0-9-]+)"'
    r'|"((?:ended|operations|ranks)-[a-z-]+)": '
)


def _sources(repo):
    folders = ("prismtrace/converters", "prismcalib")
    paths = [path for name in folders for path in (repo / name).rglob("*.py")]
    return {path: path.read_text() for path in [*paths, repo / "prismtrace/cutting.py"]}


def _counted(repo):
    names = set()
    for path, text in _sources(repo).items():
        if "converters" in str(path):
            for name, family in COUNT.findall(text):
                names |= {name} if name else {f"{family}-{end}" for end in FAMILIES[family]}
        names |= {one or other for one, other in OTHER.findall(text)}
    return names


def test_every_count_is_explained_and_nothing_else(repo):
    page = (repo / "docs/reference/policies.md").read_text(encoding="utf-8")
    explained = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert len(explained) == len(set(explained))
    assert set(explained) == _counted(repo)


def test_families_are_complete(repo):
    text = "\n".join(_sources(repo).values())
    for family, ends in FAMILIES.items():
        for end in ends:
            words = end.removeprefix("by-")
            assert {f'"{words}"', f'"{words.replace("-", "_")}"', f'"{end}"'} & {
                *re.findall(r'"[a-z_-]+"', text)
            }, f"{family}-{end}"
    edges = (repo / "prismtrace/converters/kineto/edges.py").read_text()
    assert set(re.findall(r'"([a-z]+-(?:wait|input))"', edges)) == set(FAMILIES["edge"])


def test_what_commands_print_leads_to_the_page(repo):
    from prismtrace.printing import WHERE_EXPLAINED

    assert (repo / WHERE_EXPLAINED.rpartition(" ")[2]).is_file()
