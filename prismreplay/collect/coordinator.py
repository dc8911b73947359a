"""What a run's ranks have done, who may go on, and what they get. No input or output in here.

Messages of ranks go in through the methods, what is to be sent to them comes out of `outbox`.
`prismreplay.collect.serving` connects it with processes and sockets; tests play ranks by hand.

A rank is *running* while it holds a turn, *blocked* from a question that cannot be answered yet,
*ready* when it can, until it is given a turn with the answer, and finally *ended*.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from prismreplay.collect.deadlock import Blocked, describe, lost, who_waits
from prismreplay.collect.key_value import awaited_keys
from prismreplay.collect.matching import Matcher, Request
from prismreplay.collect.questions import Question, Sent, as_blocked
from prismreplay.collect.scheduling import Policy, Program, Turns, thrifty
from prismreplay.collect.store_questions import StoreQuestions
from prismreplay.errors import DeadlockError, MismatchError
from prismreplay.runtime.operations import MESSAGES, Call, Group, Op

__all__ = ["Coordinator", "Counts", "Performer"]

_POLLS_BEFORE_YIELD = 3


class Performer(Protocol):
    """Makes results; a result is (bytes, where each output is in them)."""

    def supply(self, rank: int, op: Op, inputs: Any) -> tuple[Any, Sequence[Any]] | None:
        """The result for one rank without its partners, or None."""

    def perform(self, members: Sequence[Request]) -> Sequence[tuple[Any, Sequence[Any]]]:
        """The results of a collective, for its members in group order."""


@dataclass
class Counts:
    """What has happened so far; `mirrored` are calls, one for each rank."""

    collectives: int = 0
    messages: int = 0
    supplied: int = 0
    mirrored: int = 0
    store: int = 0

    @property
    def communications(self) -> int:
        """That were performed, or answered without partners."""
        return self.collectives + self.messages + self.supplied


@dataclass(slots=True)
class _Rank:
    groups: dict[str, Group] = field(default_factory=dict)
    requests: dict[int, Request] = field(default_factory=dict)
    questions: dict[int, Question] = field(default_factory=dict)
    answers: deque[Sent] = field(default_factory=deque)
    idle_polls: int = 0
    lent: bool = False


class Coordinator:
    """The state of a run.

    Args:
        ranks: that take part; each has to be `begin`ned.
        slots: how many may compute at a time.
        performer: makes results.
        policy: decides who is next.
        stands_for: ranks that do not run, and those whose inputs are theirs too.
        patient: of two ranks that differ, let a third one tell which is wrong; see `dispute`.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        slots: int,
        performer: Performer,
        *,
        policy: Policy = thrifty,
        stands_for: Mapping[int, int] | None = None,
        patient: bool = False,
    ) -> None:
        self.outbox: deque[Sent] = deque()
        self.counts = Counts()
        self.turns = Turns(slots, policy)
        self.program = Program.of(ranks)
        self.ended: dict[int, int] = {}
        """Ranks that have ended, with their exit codes."""
        self._performer = performer
        self._watch: Callable[[int, Op, Any], None] | None = None
        self._stands_for = dict(stands_for or {})
        self._matcher = Matcher(self._stands_for, patient=patient)
        self._store = StoreQuestions(self.program)
        self._ranks = {rank: _Rank() for rank in ranks}

    def use(self, performer: Performer) -> None:
        """Have another one make results from now on."""
        self._performer = performer

    def watch(self, see: Callable[[int, Op, Any], None]) -> None:
        """Call `see` with each operation and its inputs, when it arrives."""
        self._watch = see

    def watch_store(self, see: Callable[[int, str, tuple[Any, ...]], None]) -> None:
        """Call `see` with each operation of the key-value store that was done."""
        self._store.watch(see)

    # --- what ranks say ---------------------------------------------------------------

    def begin(self, rank: int) -> None:
        """The process of `rank` is there and waits for its first turn."""
        self._ranks[rank].answers.append(Sent(rank, ("go", 0)))
        self.turns.make_ready(rank)

    def join(self, rank: int, group: Group, site: str = "") -> None:
        """`rank` is a member of `group`, which it made at `site`.

        Raises:
            MismatchError: another rank says that others are in it.
        """
        self._matcher.join(rank, group, site)
        self._ranks[rank].groups[group.key] = group

    def groups_of(self, rank: int) -> dict[str, Group]:
        """The groups of `rank`, by key."""
        return self._ranks[rank].groups

    def submit(self, rank: int, ticket: int, op: Op, inputs: Any, *, waits: bool = True) -> None:
        """`rank` started an operation, and will wait for it or not.

        Raises:
            MismatchError: it does not fit what other members did.
        """
        if self._watch is not None:
            self._watch(rank, op, inputs)
        own = self._performer.supply(rank, op, inputs)
        if own is not None:
            self.counts.supplied += 1
            request = self._matcher.alone(rank, ticket, op, inputs)
            if waits:
                self._ranks[rank].requests[ticket] = request
            self.program.issued(rank, request.instance.number, (rank,))
            self._finish(request, own)
            return
        request, complete = self._matcher.arrive(rank, ticket, op, inputs)
        request.waits = waits
        if waits:
            self._ranks[rank].requests[ticket] = request
        self.program.issued(rank, request.instance.number, request.instance.ranks)
        if complete:
            self._complete(request)

    def wait(self, rank: int, number: int, ticket: int, helpers: int = 0) -> None:
        """`rank` cannot go on without the outputs of an operation."""
        state = self._ranks[rank]
        request = state.requests.get(ticket)
        if request is None:
            raise ValueError(f"rank {rank} waits for an operation it did not start")
        self.program.waited(rank, request.instance.number)
        question = Question(rank, number, helpers, request=request, site=request.op.site)
        if request.done:
            self.outbox.append(self._answer(question))
            return
        self._block(question)

    def poll(self, rank: int, number: int, ticket: int, helpers: int = 0) -> None:
        """`rank` asks whether it would have to wait.

        A rank that keeps asking would keep its turn for ever: others go first then.
        """
        state = self._ranks[rank]
        request = state.requests.get(ticket)
        done = request is None or request.done
        self._poll(Question(rank, number, helpers, request=request), "polled", done)

    def ask_store(
        self,
        rank: int,
        number: int,
        op: str,
        args: tuple[Any, ...],
        site: str = "",
        helpers: int = 0,
    ) -> None:
        """`rank` uses the key-value store."""
        self.counts.store += 1
        question = Question(rank, number, helpers, store=(op, args), site=site)
        answer = self._store.answer(question)
        if answer is None:
            self._block(question)
            return
        if op == "check":
            self._poll(question, "value", bool(answer.message[2]))
            return
        self.outbox.append(answer)
        if self._store.changes(op):
            self._retry_store()

    def end(self, rank: int, code: int = 0) -> None:
        """The process of `rank` has ended, and all that it said was passed on.

        Raises:
            DeadlockError: another rank waits for it.
            MismatchError: two others differ, and it does not tell which of them is wrong.
        """
        self.ended[rank] = code
        state = self._ranks[rank]
        state.requests.clear()
        state.questions.clear()
        state.answers.clear()
        self._store.forget_rank(rank)
        self.turns.release(rank, ended=True)
        if self.dispute is not None:
            raise self.dispute
        for question in self._blocked():
            self._refuse_lost(question)

    # --- turns ------------------------------------------------------------------------

    def grant(self) -> None:
        """Give out turns; the messages that start ranks are in the outbox."""
        for rank in self.turns.grant(self.awaited):
            state = self._ranks[rank]
            self.outbox.extend(state.answers)
            state.answers.clear()

    def lend(self, rank: int) -> None:
        """`rank` holds a turn but does not compute (it sleeps, or waits for a file)."""
        self.turns.release(rank)
        self._ranks[rank].lent = True

    @property
    def lent(self) -> list[int]:
        """Ranks that have lent their turn to others."""
        return [rank for rank, state in self._ranks.items() if state.lent]

    @property
    def finished(self) -> bool:
        """True when all ranks have ended."""
        return len(self.ended) == len(self._ranks)

    @property
    def stuck(self) -> bool:
        """True when nobody computes and nobody could."""
        return not (
            self.finished
            or self.turns.running
            or self.turns.ready
            or any(state.lent for state in self._ranks.values())
        )

    @property
    def unsure(self) -> bool:
        """Whether a blocked rank has threads that may still communicate."""
        return any(question.helpers for question in self._blocked())

    def time_out(self) -> bool:
        """When stuck: fail the most impatient wait on the store; False if none is impatient.

        Time stands still for a rank that is not computing, so waits do not time out by the clock.
        """
        first = self._store.most_impatient()
        if first is None:
            return False
        keys = ", ".join(awaited_keys(first.store[1] if first.store else ()))
        self._unblock(first, Sent(first.rank, ("refused", first.number, f"timed out: {keys}")))
        return True

    @property
    def dispute(self) -> MismatchError | None:
        """Two ranks differ, and a third one may tell which of them is wrong."""
        return self._matcher.dispute

    def deadlock(self) -> DeadlockError:
        """What to say when it is stuck, unless there is a `dispute`."""
        return describe(self._all_blocked(), self.ended, self._matcher.unreceived())

    def standing(self) -> str:
        """Who waits for whom at the moment; empty when nobody does."""
        blocked = self._all_blocked()
        return who_waits(blocked, self.ended, self._going_on()) if blocked else ""

    def unreceived(self) -> int:
        """Messages that nobody has received."""
        return self._matcher.unreceived()

    # --- inside -----------------------------------------------------------------------

    def _complete(self, last: Request) -> None:
        members = last.instance.requests
        if last.op.call in MESSAGES:
            self.counts.messages += 1
            send = next(one for one in members.values() if one.op.call is Call.SEND)
            receive = last if last.op.call is Call.RECV else _other(last)
            self.program.members[last.instance.number] = last.instance.ranks
            sent = send.inputs
            self._finish(receive, (sent, [(0, sent.nbytes)]))
            if send.waits:
                self._finish(send, (None, []))
            return
        self.counts.collectives += 1
        ranks = last.op.group.ranks
        ordered = [members[self._stands_for.get(rank, rank)] for rank in ranks]
        results = self._performer.perform(ordered)
        for rank, request, result in zip(ranks, ordered, results, strict=True):
            if request.rank == rank:
                self._finish(request, result)

    def _finish(self, request: Request, result: tuple[Any, Sequence[Any]]) -> None:
        request.done = True
        request.result = result
        request.inputs = None
        for question in list(self._ranks[request.rank].questions.values()):
            if question.request is request:
                self._unblock(question, self._answer(question))

    def _answer(self, question: Question) -> Sent:
        """The outputs of an operation, to the rank that waits for them."""
        request = question.request
        if request is None:
            raise ValueError("no operation is asked for")
        parcel, spans = request.result
        request.result = None
        del self._ranks[question.rank].requests[request.ticket]
        source = request.source
        data, nbytes = (b"", 0) if parcel is None else (parcel.data, parcel.nbytes)
        message = ("result", question.number, data, nbytes, spans, source)
        return Sent(question.rank, message, parcel)

    def _block(self, question: Question) -> None:
        state = self._ranks[question.rank]
        state.questions[question.number] = question
        state.lent = False
        if question.request is None:
            self._store.wait(question)
        self.turns.release(question.rank)
        self._refuse_lost(question)

    def _unblock(self, question: Question, answer: Sent) -> None:
        state = self._ranks[question.rank]
        del state.questions[question.number]
        if question.request is None:
            self._store.forget(question)
        if question.rank in self.turns.running:
            self.outbox.append(answer)  # another thread of it computes
            return
        state.answers.append(answer)
        self.turns.make_ready(question.rank)

    def _poll(self, question: Question, name: str, answer: bool) -> None:
        state = self._ranks[question.rank]
        sent = Sent(question.rank, (name, question.number, answer))
        state.idle_polls = 0 if answer else state.idle_polls + 1
        if state.idle_polls < _POLLS_BEFORE_YIELD:
            self.outbox.append(sent)
            return
        state.answers.append(sent)
        state.lent = False
        self.turns.release(question.rank)
        self.turns.make_ready(question.rank, patient=True)

    def _retry_store(self) -> None:
        for question, answer in self._store.answers():
            self._unblock(question, answer)

    # --- who waits for whom -------------------------------------------------------------

    def awaited(self, rank: int) -> list[int]:
        """Ranks that `rank`, which is blocked, waits for."""
        return [
            missing
            for question in self._ranks[rank].questions.values()
            if question.request is not None
            for missing in question.request.instance.missing
        ]

    def _blocked(self) -> list[Question]:
        return [one for state in self._ranks.values() for one in state.questions.values()]

    def _all_blocked(self) -> list[Blocked]:
        return [as_blocked(question) for question in self._blocked()]

    def _going_on(self) -> list[int]:
        """Ranks that neither wait nor have ended."""
        waiting = {question.rank for question in self._blocked()}
        return [rank for rank in self._ranks if rank not in self.ended and rank not in waiting]

    def _refuse_lost(self, question: Question) -> None:
        """Tell at once when a rank waits for one that has ended."""
        if question.request is None or not self.ended:
            return
        gone = [rank for rank in question.request.instance.missing if rank in self.ended]
        if gone:
            blocked = self._all_blocked()
            raise lost(as_blocked(question), gone, blocked, self.ended, self._going_on())


def _other(request: Request) -> Request:
    return next(one for one in request.instance.requests.values() if one is not request)
