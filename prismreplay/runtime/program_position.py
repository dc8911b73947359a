"""Which step, microbatch, chunk and phase the program is in. No torch in here.

Steps: ranges that the program names (``step 3``, ``ProfilerStep#3``, ``iteration 3``) win. A
program without them is in step 0 once its optimizer is made, and in the next step once an
optimizer has stepped and something else happens than another optimizer's step.

Phases: optimizer while an optimizer steps, backward while autograd runs, what the pipeline's
schedule says, what the program's ranges say (``forward``), in this order; else forward within
a step and other outside.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from prismreplay.runtime.operations import Call, Op
from prismtrace.annotation_names import Annotation, read_annotation

__all__ = ["Place", "ProgramPosition"]

Place = tuple[int | None, int | None, int | None, str | None]
"""Step, microbatch, chunk and phase, as a row of the trace holds them."""

# torch's own ranges around an optimizer's step, which hooks tell more exactly.
_OWN_RANGES = ("Optimizer.step#", "Optimizer.zero_grad#")


@dataclass
class _Message:
    owner: weakref.ref[Any]
    microbatch: int
    chunk: int | None
    phase: str


@dataclass
class ProgramPosition:
    """Where the program is; hooks move it.

    Attributes:
        cut: called with the place that is left, to end the segment there.
        in_backward: whether this thread is in a backward pass that no hook announced.
        named: called when the program names its first step; those counted before are none.
        step_over: called when a step is over.
        step: the current one.
        step_done: the last one that is over.
        note: name of the innermost range that the program is in.
        copying: how many ranges it is in that copy between a device's memory and the host's.
        uncertain: the current step is counted, and no optimizer has stepped in it yet.
    """

    cut: Callable[[Place], None]
    in_backward: Callable[[], bool] | None = None
    named: Callable[[], None] = lambda: None
    step_over: Callable[[], None] = lambda: None
    step: int | None = None
    step_done: int | None = None
    note: str | None = None
    copying: int = 0
    uncertain: bool = False
    _explicit: bool = False
    _last_step: int = -1
    _ending: bool = False
    """Optimizers have stepped, and nothing has happened since."""
    _leaving: bool = False
    """A step that the program named is over, and nothing has happened since."""
    _stepped: set[Hashable] = field(default_factory=set)
    _ranges: list[tuple[str, Annotation]] = field(default_factory=list)
    _chunks: list[tuple[int, int | None, str]] = field(default_factory=list)
    _place: Place = (None, None, None, "other")
    _busy: bool = False
    """A phase is certain: autograd or an optimizer works."""
    _backwards: int = 0
    _optimizing: int = 0
    _messages: dict[tuple[str, int, bool], deque[_Message]] = field(default_factory=dict)

    def place(self) -> Place:
        """Where the program is."""
        if not self._busy and self.in_backward is not None and self.in_backward():
            return (*self._place[:3], "backward")
        return self._place

    def _refresh(self) -> None:
        """Something changed; communications are many more than changes."""
        microbatch, chunk = None, None
        if self._chunks:
            microbatch, chunk, _ = self._chunks[-1]
        else:
            said = [each.microbatch for _, each in self._ranges if each.microbatch is not None]
            microbatch = said[-1] if said else None
        self._busy = bool(self._optimizing or self._backwards)
        self._place = (self.step, microbatch, chunk, self._phase())

    def _phase(self) -> str:
        if self._optimizing:
            return "optimizer"
        if self._backwards:
            return "backward"
        if self._chunks:
            return self._chunks[-1][2]
        for _, said in reversed(self._ranges):
            if said.phase is not None:
                return said.phase.value
        return "other" if self.step is None else "forward"

    def settle(self) -> None:
        """Something happens: if optimizers stepped just before, their step is over.

        What the program did since they stepped belongs to the next one.
        """
        if self._leaving:
            self._leaving = False
            self.step = None
            self._refresh()
        if self._ending:
            self._ending = False
            self._stepped.clear()
            if not self._explicit and self.step is not None:
                self.step_done = self.step
                self.step += 1
                self.uncertain = True
                self._refresh()
                self.step_over()

    def _move(self, change: Callable[[], Any]) -> None:
        """Change the place; if it really differs, the segment ends at the old one."""
        before = self.place()
        change()
        self._refresh()
        if self.place() != before:
            self.cut(before)

    # Ranges that the program names --------------------------------------------------------

    def begin_range(self, name: str) -> None:
        """The program enters a range: `record_function`, NVTX, `torch.profiler`'s steps."""
        if name.startswith(_OWN_RANGES):
            return
        said = read_annotation(name)
        self.note = name
        if said.step is not None:
            self._begin_step(said.step)
        if said.copies:
            # A copy is a segment of its own.
            self.settle()
            self.cut(self.place())
            self.copying += 1
        self._move(lambda: self._ranges.append((name, said)))

    def end_range(self, name: str) -> None:
        """It leaves it. Ranges that overlap instead of nesting are told apart by name."""
        places = [at for at, (known, _) in enumerate(self._ranges) if known == name]
        if not places:
            return
        said = self._ranges[places[-1]][1]
        left = [known for known, _ in self._ranges]
        left.pop(places[-1])
        self.note = left[-1] if left else None
        if said.copies:
            self.cut(self.place())
            self.copying -= 1
        self._move(lambda: self._ranges.pop(places[-1]))
        if said.step is not None:
            self.settle()
            self.cut(self.place())
            self._leaving = True
            self.step_done = self.step
            self.step_over()

    def _begin_step(self, number: int) -> None:
        if self._leaving:
            # Nothing happened between the two: what the program did there belongs to this one.
            self._leaving = False
        else:
            self.settle()
            self.cut(self.place())
        if not self._explicit:
            self._explicit = True
            self.uncertain = False
            self.named()
        # A program that counts anew in every epoch goes on counting here.
        self.step = self._last_step = max(number, self._last_step + 1)
        self._refresh()

    # Autograd and optimizers --------------------------------------------------------------

    def begin_backward(self) -> None:
        """A backward pass begins, maybe within another one."""
        self.settle()
        self._move(lambda: setattr(self, "_backwards", self._backwards + 1))

    def end_backward(self) -> None:
        """It is over."""
        self._move(lambda: setattr(self, "_backwards", self._backwards - 1))

    def optimizer_made(self) -> None:
        """Steps are counted from here, unless the program names them."""
        if self.step is None and not self._explicit:
            self.cut(self.place())
            self.step = 0
            self.uncertain = True
            self._refresh()

    def begin_optimizer(self, optimizer: Hashable) -> None:
        """An optimizer is about to step."""
        if optimizer in self._stepped:
            self.settle()
        self._ending = False
        self._move(lambda: setattr(self, "_optimizing", self._optimizing + 1))

    def end_optimizer(self, optimizer: Hashable) -> None:
        """It has stepped."""
        self._move(lambda: setattr(self, "_optimizing", max(0, self._optimizing - 1)))
        self._stepped.add(optimizer)
        self._ending = True
        self.uncertain = False

    # Pipelines ------------------------------------------------------------------------------

    def begin_chunk(self, microbatch: int, chunk: int | None, phase: str) -> None:
        """A stage begins its work on a microbatch."""
        self.settle()
        self._move(lambda: self._chunks.append((microbatch, chunk, phase)))

    def end_chunk(self) -> None:
        """It is done."""
        self._move(self._chunks.pop)

    def expect_message(
        self, owner: Any, group: str, peer: int, sends: bool, place: tuple[int, int | None, str]
    ) -> None:
        """A message will be sent or received that belongs to a microbatch, chunk and phase.

        `owner` is alive until it is; messages to one partner come in the order announced.
        """
        queue = self._messages.setdefault((group, peer, sends), deque())
        queue.append(_Message(weakref.ref(owner), *place))

    def place_of(self, op: Op) -> Place:
        """Where a communication belongs: where the program is, if nobody said otherwise."""
        place = self.place()
        if op.peer is None:
            return place
        queue = self._messages.get((op.group.name, op.peer, op.call is Call.SEND))
        while queue:
            message = queue.popleft()
            if message.owner() is not None:
                return (place[0], message.microbatch, message.chunk, message.phase)
        return place
