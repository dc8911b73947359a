"""Questions to the run's key-value store, and those of them that wait for other ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from prismreplay.collect.key_value import (
    KeyValueStore,
    NotYet,
    StoreFailure,
    awaited_keys,
    patience,
)
from prismreplay.collect.questions import Question, Sent
from prismreplay.collect.scheduling import Program

__all__ = ["StoreQuestions"]

USUAL_PATIENCE = 1800.0
"""Seconds that stores wait unless the program says otherwise."""


class StoreQuestions:
    """The store, and who waits for it.

    Args:
        program: is told who set a key and who needed it: for the count of context switches.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._store = KeyValueStore()
        self._watch: Callable[[int, str, tuple[Any, ...]], None] | None = None
        self._set_by: dict[str, int] = {}
        self._keys_set = itertools.count(1 << 40)
        self._waits: list[Question] = []

    def watch(self, see: Callable[[int, str, tuple[Any, ...]], None]) -> None:
        """Call `see` with each operation that was done."""
        self._watch = see

    @property
    def waiting(self) -> bool:
        """Whether there are questions that wait."""
        return bool(self._waits)

    def play(self, op: str, args: tuple[Any, ...]) -> None:
        """Do what a rank without a process did.

        What cannot be done again has no effect that others could miss.
        """
        with suppress(NotYet, StoreFailure):
            self._store.perform(op, args)

    def answer(self, question: Question) -> Sent | None:
        """Do what is asked; None: it has to wait."""
        if question.store is None:
            return None
        op, args = question.store
        try:
            value = self._store.perform(op, args)
        except NotYet:
            return None
        except StoreFailure as failure:
            return Sent(question.rank, ("refused", question.number, str(failure)))
        self._note(question.rank, op, args)
        if self._watch is not None:
            self._watch(question.rank, op, args)
        return Sent(question.rank, ("value", question.number, value))

    def changes(self, op: str) -> bool:
        """Whether questions that wait may have an answer after this operation."""
        return self._store.changes(op)

    def answers(self) -> Iterator[tuple[Question, Sent]]:
        """Questions that waited and have an answer now; whoever takes it forgets the question."""
        for question in list(self._waits):
            answer = self.answer(question)
            if answer is not None:
                yield question, answer

    def wait(self, question: Question) -> None:
        """There is no answer yet."""
        self._waits.append(question)

    def forget(self, question: Question) -> None:
        """It waits no more."""
        self._waits = [one for one in self._waits if one is not question]

    def forget_rank(self, rank: int) -> None:
        """Nor does any of this rank."""
        self._waits = [one for one in self._waits if one.rank != rank]

    def most_impatient(self) -> Question | None:
        """Of the questions that wait for less long than usual, the one that does so the least."""
        waits = [
            (patience(question.store[1]), question) for question in self._waits if question.store
        ]
        seconds, first = min(waits, key=lambda one: one[0], default=(USUAL_PATIENCE, None))
        return first if seconds < USUAL_PATIENCE else None

    def _note(self, rank: int, op: str, args: tuple[Any, ...]) -> None:
        if op in ("set", "add", "compare_set"):
            if args[0] not in self._set_by:
                number = self._set_by[args[0]] = next(self._keys_set)
                self._program.issued(rank, number, (rank,))
        elif op in ("get", "wait"):
            for key in awaited_keys(args):
                if key in self._set_by:
                    self._program.waited(rank, self._set_by[key])
