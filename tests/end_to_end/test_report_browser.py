"""The report in a real browser: it draws, its scripts run, keys and pointer move it.

Needs Chromium; without it these tests skip, unless PRISM_REQUIRE_BROWSER=1.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from prismcalib import synth
from prismcalib.merging import merge
from prismcalib.report import write_report
from prismtrace.converters import convert

REQUIRED = os.environ.get("PRISM_REQUIRE_BROWSER") == "1"
if REQUIRED:
    from PIL import Image
else:
    Image = pytest.importorskip("PIL.Image", reason="needs Pillow (part of the dev extra)")

# No service of the browser's own may use the network or a profile of the user.
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars", "--enable-logging=stderr", "--virtual-time-budget=10000",
)  # fmt: skip
DARK = "--blink-settings=preferredColorScheme=0"
LIGHT = "--blink-settings=preferredColorScheme=1"


@pytest.fixture(scope="session")
def browser() -> Callable[..., str]:
    """Call Chromium on a page: `browser(page, "--dump-dom")` returns what it prints."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    program = next((found for name in names if (found := shutil.which(name))), None)
    if program is None:
        reason = "no Chromium found (Debian: apt-get install chromium)"
        if REQUIRED:
            pytest.fail(reason)
        pytest.skip(reason)

    def call(page: Path, *flags: str, hash: str = "") -> str:
        # Shared memory is too small in many containers; a profile of its own keeps runs apart.
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
            done = subprocess.run(
                [program, *FLAGS, "--disable-dev-shm-usage", f"--user-data-dir={profile}", *flags,
                 f"{page.as_uri()}{hash}"],
                capture_output=True, text=True, timeout=120, check=True,
            )  # fmt: skip
        complaints = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
        assert complaints == []
        return done.stdout

    return call


@pytest.fixture(scope="session")
def pages(data_dir, tmp_path_factory) -> dict[int, Path]:
    """Reports of 8 real ranks and of 1 024 made-up ones."""
    folder = tmp_path_factory.mktemp("reports")
    convert([data_dir / "kineto/megatron-tp8"], folder / "recorded.parquet")
    write_report(merge(folder / "recorded.parquet").trace, folder / "8.html")
    spec = synth.JobSpec(
        pp=8, tp=8, dp=16, microbatches=4, layers_per_stage=1, stragglers={300: 1.5},
        launch_gap_ns=1000,
    )  # fmt: skip
    write_report(merge(synth.generate(spec)).trace, folder / "1024.html")
    return {8: folder / "8.html", 1024: folder / "1024.html"}


class Tables(HTMLParser):
    """Captions of all tables, and how many cells of each hold text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.cells: dict[str, int] = {}
        self._caption, self._inside = "", ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):  # noqa: ARG002 - the parser's signature
        self._inside = tag if tag in ("caption", "td") else self._inside
        if tag == "caption":
            self._caption = ""

    def handle_endtag(self, tag):
        if tag in ("caption", "td"):
            self._inside = ""

    def handle_data(self, data):
        if self._inside == "caption":
            self._caption += data
            self.cells[self._caption] = 0
        elif self._inside == "td" and data.strip():
            self.cells[self._caption] += 1


def shot(browser, page: Path, target: Path, *flags: str, hash: str = "") -> np.ndarray:
    browser(page, f"--screenshot={target}", "--window-size=1400,1600", *flags, hash=hash)
    return np.asarray(Image.open(target).convert("RGB")).astype(int)


def colours_in(picture: np.ndarray) -> int:
    return len(np.unique(picture @ [65536, 256, 1]))


def colour_share(picture: np.ndarray, colour: str) -> float:
    """Share of the pixels of a colour, nearly."""
    wanted = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return float((np.abs(picture - wanted).max(axis=2) <= 3).mean())


@pytest.mark.parametrize("ranks", [8, 1024])
def test_scripts_run_and_tables_are_filled(pages, browser, ranks):
    dom = browser(pages[ranks], "--dump-dom")
    assert 'data-timeline="ready"' in dom
    assert "data-script-error" not in dom
    assert "whole window" in re.search(r'<output id="shown">(.*?)</output>', dom)[1]
    assert (" hidden" in re.search(r'<canvas id="map"[^>]*>', dom)[0]) == (ranks == 8)
    tables = Tables(dom).cells
    assert len(tables) >= 12
    assert min(tables.values()) > 0
    assert sum(tables.values()) > 150


@pytest.mark.parametrize("ranks", [8, 1024])
def test_the_picture_is_not_blank(pages, browser, ranks, tmp_path):
    picture = shot(browser, pages[ranks], tmp_path / "light.png", LIGHT)
    assert picture.mean() > 128
    assert colours_in(picture) > 100
    style = pages[ranks].read_text("utf-8")
    colours = dict(re.findall(r"--([\w-]+): (#\w{6})", style.partition("@media")[0]))
    # The timeline shows what the numbers say: both computing and waiting in plain sight.
    assert colour_share(picture, colours["wait"]) > 0.02
    if ranks == 8:
        assert colour_share(picture, colours["compute"]) > 0.004
        assert colour_share(picture, colours["inner-idle"]) > 0.004
    dark = shot(browser, pages[ranks], tmp_path / "dark.png", DARK)
    assert dark.mean() < 110
    assert colours_in(dark) > 100


def test_zooming_changes_the_picture(pages, browser, tmp_path):
    far = shot(browser, pages[1024], tmp_path / "far.png", LIGHT)
    near = shot(
        browser, pages[1024], tmp_path / "near.png", LIGHT, hash="#t=1000000,9000000&r=0,31"
    )
    assert (far != near).any(axis=2).mean() > 0.05


ACTIONS = """
<script>
window.addEventListener("load", () => setTimeout(() => {
  const said = {};
  const note = (name) => (said[name] = [shown.textContent, spoken.textContent, tip.hidden ? "" : tip.innerText]);
  const press = (canvas, ...keys) => keys.forEach((key) =>
    canvas.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true })));
  const point = (canvas, type, x, y, more = {}) => canvas.dispatchEvent(
    new PointerEvent(type, { clientX: canvas.getBoundingClientRect().left + x,
      clientY: canvas.getBoundingClientRect().top + y, pointerId: 1, bubbles: true, ...more }));
  const lanesCanvas = document.getElementById("lanes"), mapCanvas = document.getElementById("map");
  const shown = document.getElementById("shown"), spoken = document.getElementById("spoken");
  const tip = document.getElementById("tip");
  const after = (steps) => {
    if (!steps.length) {
      const result = document.createElement("pre");
      result.id = "said";
      result.textContent = JSON.stringify(said);
      document.body.append(result);
      return;
    }
    const [name, action] = steps[0];
    action();
    setTimeout(() => { note(name); after(steps.slice(1)); }, 60);
  };
  after([
    ["start", () => {}],
    ["critical", () => press(lanesCanvas, "c")],
    ["next", () => press(lanesCanvas, "n")],
    ["lane", () => press(lanesCanvas, "ArrowDown")],
    ["zoomed", () => press(lanesCanvas, "Escape", "+", "+", "+")],
    ["moved", () => press(lanesCanvas, "ArrowRight", "ArrowRight")],
    ["all", () => press(lanesCanvas, "0")],
    ["hover", () => point(lanesCanvas, "pointermove", 600, 32)],
    ["wheel", () => lanesCanvas.dispatchEvent(new WheelEvent("wheel", { deltaY: -1, ctrlKey: true, cancelable: true }))],
    ["scroll", () => lanesCanvas.dispatchEvent(new WheelEvent("wheel", { deltaY: -1, cancelable: true }))],
    ["button", () => document.getElementById("show-all").click()],
    ["path", () => document.getElementById("show-path").click()],
    ["map", () => { if (!mapCanvas.hidden) point(mapCanvas, "pointermove", 500, 100); }],
    ["rank", () => { const box = document.getElementById("go-to"); box.value = "3"; box.dispatchEvent(new Event("change")); }],
  ]);
}, 300));
</script>
"""


@pytest.mark.parametrize("ranks", [8, 1024])
def test_keys_and_pointer(pages, browser, ranks, tmp_path):
    page = tmp_path / "acting.html"
    page.write_text(
        pages[ranks].read_text("utf-8").replace("</body>", ACTIONS + "</body>"), "utf-8"
    )
    dom = browser(page, "--dump-dom", "--window-size=1400,3000")
    assert "data-script-error" not in dom
    said = json.loads(unescape(re.search(r'<pre id="said">(.*?)</pre>', dom, re.DOTALL)[1]))
    shown = {name: texts[0] for name, texts in said.items()}
    assert shown["start"].startswith("whole window")
    assert "on the critical path" in said["critical"][1]
    assert said["next"][1] != said["critical"][1]
    assert "rank 0" not in said["lane"][1].split(";")[1] or ranks == 1024
    assert " to " in shown["zoomed"]
    assert shown["moved"] != shown["zoomed"]
    assert shown["all"].startswith("whole window")
    assert re.search(r"rank \d+", said["hover"][2])
    assert " to " in shown["wheel"]
    assert shown["scroll"] == shown["wheel"], "the page's own scrolling must stay usable"
    assert shown["button"].startswith("whole window")
    if ranks == 1024:
        assert re.search(r"(computing|waiting|transferring|idle) about \d+ %", said["map"][2])
        assert said["rank"][1] == "rank 3 (stage 0)"
