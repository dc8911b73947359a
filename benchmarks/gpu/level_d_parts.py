"""Parts of level D: measured once each, kept at once, within a time that is known before."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.gpu.level_d import report
from benchmarks.gpu.level_d_forks import Runner, wait, warm

TRIES = 2
MOST_CUTS = 4
CUT_S = 20
"""What fails when so little is left of a call may have been cut short."""
COLD = 1.8
"""A part takes so many times as long with fresh interpreters."""
LONG, MORE_S = 5, 30.0
"""A part that takes more than so many times what was expected, and seconds, hangs: it is ended."""
EXPECTED_S = {
    "machine": 5.0,
    "collect": 16.0,
    "losses emulated": 18.0,
    "losses true": 12.0,
    "table": 14.0,
    "slices": 14.0,
    "true": 9.0,
    "emulated": 11.0,
    "record": 12.0,
    "compare": 2.0,
    "kernels": 24.0,
    "peers": 30.0,
    "kineto": 40.0,
    "vanilla": 60.0,
}
"""Seconds that a part of a kind takes before one of the kind was measured (0.3 billion parameters, 2 GPUs)."""


@dataclass(frozen=True)
class Part:
    """Something to be measured; `needs` are parts without which it cannot be."""

    name: str
    work: Callable[[], Any]
    needs: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """What parts of other layouts have in common with it."""
        layout, _, what = self.name.partition("/")
        if what.startswith("run "):
            return what.split()[2]
        return layout if layout in EXPECTED_S else what


@dataclass(frozen=True)
class Stage:
    """Parts in order; up to `at_once` beside each other, where no times are looked at."""

    name: str
    parts: tuple[Part, ...]
    at_once: int = 1


class Parts:
    """Measures part after part, each in a fork of this process, until `budget` is over."""

    def __init__(self, options: argparse.Namespace, settings: dict[str, Any]) -> None:
        self.out, self.work = options.out, options.work
        self.deadline = time.monotonic() + options.budget
        self.settings = settings
        kept = self.work / "state.json"
        self.state: dict[str, Any] = {"settings": settings, "machine": {}, "parts": {}}
        earlier = kept if kept.is_file() else options.earlier
        if earlier is not None:
            self.state = json.loads(earlier.read_text())
            if self.state["settings"] != settings:
                refuse(f"{earlier} is of other settings: {self.state['settings']}")
        self.parts: dict[str, Any] = self.state["parts"]
        self.missing: list[str] = []
        self.cold: bool = options.cold
        """Whether all parts have fresh interpreters."""
        self._cold_kinds: set[str] = set()
        self.runner = Runner("", self.work / "logs", self.cold)

    def left_s(self) -> float:
        """Until the deadline."""
        return self.deadline - time.monotonic()

    def save(self) -> None:
        """State and report, in both folders."""
        for folder in (self.work, self.out):
            folder.mkdir(parents=True, exist_ok=True)
        self.state["missing"] = self.missing
        text = json.dumps(self.state, indent=1)
        (self.work / "state.json").write_text(text)
        (self.out / "level-d.json").write_text(text)
        try:
            shown = report(self.state)
        except Exception:  # noqa: BLE001  what was measured is what counts
            shown = traceback.format_exc()
        (self.out / "level-d.md").write_text(shown)

    def settled(self, name: str) -> bool:
        """Whether there is nothing more to do about a part."""
        part = self.parts.get(name)
        return part is not None and (part["state"] == "done" or part["tries"] >= TRIES)

    def expected_s(self, part: Part, *, cold: bool) -> float:
        """What it will take: as parts of its kind have."""
        seen = [
            found["wall_s"]
            for name, found in self.parts.items()
            if found["state"] == "done"
            and Part(name, list).kind == part.kind
            and found.get("cold", True) == cold
        ]
        if seen:
            return 1.1 * statistics.median(seen) + 1
        return EXPECTED_S.get(part.kind, 10.0) * (COLD if cold else 1)

    def estimate(self, stages: Sequence[Stage]) -> str:
        """What stages will take, and when each will be over."""
        lines, over = ["still to do, in seconds: what it takes, when it is over"], 0.0
        for stage in stages:
            due = [part for part in stage.parts if not self.settled(part.name)]
            if not due:
                continue
            each = [self.expected_s(part, cold=self._cold(part)) for part in due]
            takes = max(*each, sum(each) / min(stage.at_once, len(due)))
            over += takes
            late = "" if over <= self.left_s() else "  beyond this call's budget"
            lines.append(f"{stage.name:<22} {len(due):>3} parts {takes:5.0f} {over:5.0f}{late}")
        return "\n".join(lines)

    def measure(self, stage: Stage) -> None:
        """All parts of a stage that are not settled, and for which there is time.

        One that fails is tried again at once, with fresh interpreters. If that helps, those of its
        kind that follow have them, too.
        """
        waiting = [(part, self._cold(part)) for part in stage.parts if not self.settled(part.name)]
        running: list[tuple[Part, bool, warm.Fork]] = []
        while waiting or running:
            while waiting and len(running) < stage.at_once:
                part, cold = waiting.pop(0)
                cold = cold or self._cold(part)
                if self._may_begin(part, cold=cold):
                    running.append((part, cold, self._start(part, cold=cold)))
            for one in list(running):
                part, cold, fork = one
                code = fork.wait(0.05 / len(running))
                spent_s = time.monotonic() - fork.started
                most_s = LONG * self.expected_s(part, cold=cold) + MORE_S
                if code is None and spent_s < most_s and self.left_s() > 0:
                    continue
                running.remove(one)
                how = f"exit code {code}" * bool(code)
                if code is None:
                    how = f"{spent_s:.0f} s, {wait(fork, 0.0)}"
                self._keep(part, how, time.monotonic() - fork.started, cold=cold)
                state = self.parts[part.name]["state"]
                if state == "failed" and not self.settled(part.name):
                    waiting.insert(0, (part, True))
                elif state == "done" and cold:
                    self._cold_kinds.add(part.kind)

    def _cold(self, part: Part) -> bool:
        return self.cold or part.kind in self._cold_kinds

    def _may_begin(self, part: Part, *, cold: bool) -> bool:
        for name in part.needs:
            if self.parts.get(name, {}).get("state") != "done":
                self.missing.append(f"{part.name} (needs {name})")
                return False
        if self.left_s() < self.expected_s(part, cold=cold):
            self.missing.append(part.name)
            return False
        return True

    def _files(self, part: Part) -> list[Path]:
        """What a part gave, printed, and said on stderr."""
        name = part.name.replace("/", "-")
        folder = self.runner.folder
        return [folder / f"{name}.{end}" for end in ("json", "out", "err")]

    def _start(self, part: Part, *, cold: bool) -> warm.Fork:
        result, out, err = self._files(part)
        result.parent.mkdir(parents=True, exist_ok=True)
        for one in (result, out, err):
            one.unlink(missing_ok=True)

        def run() -> int:
            self.runner = Runner(part.name.replace("/", "-"), self.runner.folder, cold)
            try:
                result.write_text(json.dumps(part.work()))
            except BaseException:  # noqa: BLE001  told here, whatever stands for stderr
                result.unlink(missing_ok=True)
                with err.open("a") as file:
                    file.write(traceback.format_exc())
                return 1
            return 0

        return warm.start(part.name, run, output=out, errors=err)

    def _keep(self, part: Part, how: str, wall_s: float, *, cold: bool) -> None:
        """Keep what a part gave, or how it failed."""
        result, _, err = self._files(part)
        earlier = self.parts.get(part.name, {})
        tries, cuts = earlier.get("tries", 0) + 1, earlier.get("cuts", 0)
        if result.is_file() and not how:
            found = {"state": "done", "tries": tries, "result": json.loads(result.read_text())}
        else:
            error = f"{err.read_text(errors='replace')[-9000:]}\n{how}"
            found = {"state": "failed", "tries": tries, "cuts": cuts, "error": error}
            print(f"=== {part.name} failed\n{error}", flush=True)
            if self.left_s() < CUT_S and cuts < MOST_CUTS:
                # Perhaps for want of time only.
                found |= {"state": "cut", "tries": tries - 1, "cuts": cuts + 1}
                self.missing.append(part.name)
        found |= {"wall_s": round(wall_s, 1), "cold": cold}
        self.parts[part.name] = found
        print(f"{part.name}: {found['state']}, {found['wall_s']} s", flush=True)
        self.save()

    # --- commands -------------------------------------------------------------------------

    def ours(
        self,
        *words: object,
        limit_s: float = 150,
        package: str = "prismreplay",
        variables: Mapping[str, str] | None = None,
    ) -> Any:
        """The report of one of our commands."""
        name, *rest = words
        limit_s = min(limit_s, self.left_s())
        printed = self.runner.command(package, [name, "--json", *rest], limit_s, variables or {})
        return json.loads(printed)


def refuse(why: str) -> NoReturn:
    """End the program: nothing was begun."""
    print(why, file=sys.stderr)
    sys.exit(2)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))
