"""What a stuck job is told while it runs."""

from __future__ import annotations

from types import SimpleNamespace

from prismreplay.collect.serving import Service


def test_who_waits_for_whom_is_told_once(capsys):
    waits = iter(["a waits", "a waits", "a and b wait"])
    service = SimpleNamespace(
        _coordinator=SimpleNamespace(standing=lambda: next(waits)),
        _silent_since=float("-inf"),
        _told_standing="",
    )
    for _ in range(3):
        Service.tell_standing(service)
    assert capsys.readouterr().err.splitlines() == ["a waits", "a and b wait"]
