"""The table of recorded runs in docs/fidelity.md is what convert and merge give."""

from __future__ import annotations

import re

import pytest

import prismcalib
import prismtrace as pt

LINE = re.compile(r"^\| (?P<name>[^|]+) " + r"\| ([0-9.]+) " * 6 + r"\|$", re.MULTILINE)


@pytest.fixture(scope="module")
def lines(repo):
    text = (repo / "docs/fidelity.md").read_text(encoding="utf-8")
    return {m["name"].split(",")[0].strip("`"): m.groups()[1:] for m in LINE.finditer(text)}


def measured(source, folder, grain):
    pt.convert(source, folder / "run.parquet", grain=grain)
    report = prismcalib.merge(folder / "run.parquet").report
    spread = report.clock.end_spread_after
    assert all(abs(domain.offset_ns) < 1_000 for domain in report.clock.domains)
    return (
        str(report.ranks),
        str(report.instances),
        f"{report.recorded_ns / 1e6:.3f}",
        f"{report.propagated_ns / 1e6:.3f}",
        f"{spread.median_ns / 1e3:.3f}",
        f"{spread.max_ns / 1e3:.3f}",
    )


@pytest.mark.parametrize("grain", ["communication", "kernel"])
@pytest.mark.parametrize("job", ["ddp", "ddp-nosync", "tp", "pp", "pp-nosync", "groups"])
def test_pairs_of_h200(job, grain, lines, repo, tmp_path):
    assert measured(repo / "tests/data/h200" / job, tmp_path, grain) == lines[f"h200/{job}"]


@pytest.mark.parametrize("grain", ["communication", "kernel"])
@pytest.mark.parametrize(("name", "folder"), [("Megatron", "megatron-tp8"), ("DLRM", "dlrm8")])
def test_whole_jobs(name, folder, grain, lines, data_dir, tmp_path):
    assert measured(data_dir / "kineto" / folder, tmp_path, grain) == lines[name]


def test_every_line_is_tested(lines):
    assert set(lines) == {"Megatron", "DLRM"} | {
        f"h200/{job}" for job in ("ddp", "ddp-nosync", "tp", "pp", "pp-nosync", "groups")
    }
