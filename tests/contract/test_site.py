"""The documentation as a site: every page is in its navigation, and it builds without a fault."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tomllib

import pytest


@pytest.fixture(scope="module")
def builder(repo):
    spec = importlib.util.spec_from_file_location("build_site", repo / "docs/site/build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _leaves(entry):
    if isinstance(entry, str):
        return [entry]
    values = entry if isinstance(entry, list) else entry.values()
    return [leaf for value in values for leaf in _leaves(value)]


def test_every_page_is_in_the_navigation_once(repo, builder):
    config = tomllib.loads((repo / "docs/site/zensical.toml").read_text(encoding="utf-8"))
    named = sorted(_leaves(config["project"]["nav"]))
    pages = [str(path.relative_to(repo)) for path in (repo / "docs").rglob("*.md")]
    assert named == sorted([*pages, "README.md", "CHANGELOG.md", builder.SAMPLE])


def test_every_page_is_in_the_index(repo):
    index = (repo / "docs/index.md").read_text(encoding="utf-8")
    linked = re.findall(r"^\| \[[^\]]+\]\(([^)]+)\) \|", index, re.MULTILINE)
    pages = [str(path.relative_to(repo / "docs")) for path in (repo / "docs").rglob("*.md")]
    assert sorted([*linked, "index.md"]) == sorted(pages)


def test_faults_of_pages_are_found(builder, tmp_path):
    (tmp_path / "a.html").write_text(
        '<p id="here"><a href="#here"><a href="b.html#there"><a href="https://example.org">'
        '<a href="#nowhere"><a href="c.html"><img src="d.png"><script src="https://e.org/f.js">'
    )
    (tmp_path / "b.html").write_text('<h1 id="there"><img src="data:image/png;base64,AAAA">')
    assert sorted(builder.faults(tmp_path)) == [
        "a.html: #nowhere names no place there",
        "a.html: c.html leads nowhere",
        "a.html: d.png leads nowhere",
        "a.html: loads https://e.org/f.js",
    ]


def test_the_site_builds(repo, builder, tmp_path):
    if importlib.util.find_spec("zensical") is None:
        pytest.skip("needs Zensical: pip install 'prismllm-toolkit[docs]'")
    site = tmp_path / "site"
    command = [sys.executable, str(repo / "docs/site/build.py"), "-o", str(site)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (site / builder.SAMPLE).is_file()
    assert list(tmp_path.iterdir()) == [site]
