"""The documentation as a site of plain files, without a network; a broken link fails.

    python docs/site/build.py [-o build/site]        wants `pip install 'prismllm-toolkit[docs]'`

README, changelog, docs and examples keep their places, so that links between them stay true.
A sample report is made on the way. Then every page is looked at: each local link, anchor and image
must lead somewhere, and nothing may be loaded from elsewhere.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

REPO = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "CHANGELOG.md", "LICENSE", "docs", "examples")
SAMPLE = "docs/guides/sample-report.html"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-o", "--output", type=Path, default=REPO / "build" / "site")
    output = parser.parse_args().output
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".site-") as folder:
        site = build(Path(folder))
        wrong = sorted(faults(site))
        if wrong:
            sys.exit("\n".join([*wrong, f"error: {len(wrong)} broken links"]))
        if output.exists():
            shutil.rmtree(output)
        site.rename(output)
    print(f"{output / 'index.html'}: open it in any browser")
    print(f"  to search as well: python -m http.server -d {output}")


def build(folder: Path) -> Path:
    """Lay the pages out in a folder and build the site in it; returns the site's folder."""
    pages = folder / "pages"
    pages.mkdir()
    for name in PAGES:
        source = REPO / name
        if source.is_dir():
            shutil.copytree(
                source, pages / name, ignore=shutil.ignore_patterns("__pycache__", "site")
            )
        else:
            shutil.copy(source, pages / name)
    shutil.copy(Path(__file__).with_name("zensical.toml"), folder)
    done = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict", "-f", folder / "zensical.toml"],
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}error: zensical refused the pages")
    write_sample(folder / "site" / SAMPLE)
    return folder / "site"


def write_sample(path: Path) -> None:
    """The report of a made-up job of 8 ranks, one of which computes a quarter too long."""
    import prismcalib
    from prismcalib import synth

    job = synth.JobSpec(
        pp=2, tp=2, dp=2, microbatches=4, layers_per_stage=2, steps=3, stragglers={3: 1.25}
    )
    prismcalib.write_report(prismcalib.merge(synth.generate(job)).trace, path)


# --- looking at what was built --------------------------------------------------------


class Page(HTMLParser):
    """Anchors of a page, where it leads, and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a":
            self.links += [given["href"]] if "href" in given else []
        elif "canonical" not in given.get("rel", ""):
            self.loaded += [given[name] for name in ("src", "href") if name in given]


def faults(site: Path) -> Iterator[str]:
    """What is wrong with links of a site's pages, one line each."""
    paths = [path for path in sorted(site.rglob("*.html")) if path.name != "404.html"]
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in paths}
    for path, page in pages.items():
        name = path.relative_to(site)
        for target in {*page.links, *page.loaded}:
            url, anchor = urldefrag(target)
            split = urlsplit(url)
            if split.scheme or split.netloc:
                if target in page.loaded and split.scheme != "data":
                    yield f"{name}: loads {target}"
                continue
            found = (path.parent / unquote(split.path)).resolve() if split.path else path
            found = found / "index.html" if found.is_dir() else found
            if not found.is_file():
                yield f"{name}: {target} leads nowhere"
            elif anchor and found in pages and unquote(anchor) not in pages[found].anchors:
                yield f"{name}: {target} names no place there"


if __name__ == "__main__":
    main()
