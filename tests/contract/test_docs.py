"""Every code block of the README and the docs runs.

The bash and python blocks of one page run in order, in one folder that holds `rank0.json.gz`
to `rank3.json.gz`, a small recorded job. A block that cannot run here says why, in an HTML
comment on the line before it: `<!-- skip: reason -->`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import util
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
PAGES = sorted([REPO / "README.md", *(REPO / "docs").rglob("*.md")])
RUNNERS = {"bash": ["bash", "-euo", "pipefail", "-c"], "python": ["python", "-c"]}
SHOWN_ONLY = {"text", "json", "toml"}

STARTS_PROGRAMS = re.compile(
    r"^prismreplay (?:collect|comm-bench|emulate|record|run|slice)\b", re.MULTILINE
)

FENCE = re.compile(
    r"(?:^<!-- skip: (?P<skip>[^\n]+) -->\n)?^```(?P<language>\w*)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    language: str
    code: str
    skip: str | None


def _blocks(page: Path) -> list[Block]:
    return [
        Block(match["language"], match["code"], match["skip"])
        for match in FENCE.finditer(page.read_text(encoding="utf-8"))
    ]


def _page_id(page: Path) -> str:
    return str(page.relative_to(REPO))


@pytest.mark.parametrize("page", PAGES, ids=_page_id)
def test_every_block_names_its_language(page):
    languages = {block.language for block in _blocks(page)}
    assert languages <= {*RUNNERS, *SHOWN_ONLY}


@pytest.mark.parametrize("page", PAGES, ids=_page_id)
def test_links_inside_the_repository_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    broken = [
        target
        for target in targets
        if not re.match(r"[a-z]+:|#", target)
        and not (page.parent / target.partition("#")[0]).exists()
    ]
    assert broken == []


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if any(b.language in RUNNERS and not b.skip for b in _blocks(page))],
    ids=_page_id,
)
def test_blocks_run(page, tmp_path, run_command, write_gloo_traces):
    code = "".join(block.code for block in _blocks(page) if not block.skip)
    if STARTS_PROGRAMS.search(code) and util.find_spec("torch") is None:
        pytest.skip("needs torch: pip install 'prismllm-toolkit[replay]'")
    write_gloo_traces(tmp_path)
    for block in _blocks(page):
        if block.language not in RUNNERS or block.skip:
            continue
        done = run_command(*RUNNERS[block.language], block.code)
        assert done.returncode == 0, f"{block.code}\n{done.stdout}\n{done.stderr}"
