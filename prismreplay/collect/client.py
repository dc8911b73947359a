"""The rank's end of a collection: hand inputs over, get results back, sleep in between."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch import distributed

from prismreplay.collect.handover import Parcel, ParcelWriter, Place, Span, bytes_of
from prismreplay.collect.messages import Channel, Message, pack_op
from prismreplay.collect.rank_memory import RankMemory
from prismreplay.collect.staging import cuda_staging
from prismreplay.errors import ReplayError, UnsupportedOperationError
from prismreplay.runtime.operations import Group, Op
from prismreplay.runtime.payloads import calling_line
from prismreplay.runtime.roles import Pending
from prismreplay.runtime.stores import RemoteStore

__all__ = [
    "CollectPending",
    "CollectRole",
    "Connection",
    "StoreConnection",
    "fill",
    "fill_all",
    "pack",
]

Tensor = Any

MOST_AHEAD_BYTES = 256 << 20
"""What a rank sends before it waits for a receiver; until then sends are over at once."""


class Connection:
    """The channel to the coordinator, shared by the threads of this rank.

    Any thread may ask; one of those that wait reads for all. A rank gives its turn up by asking
    a question, and has it again when the answer comes.

    Args:
        channel: to the coordinator.
        on_stop: called when nobody needs this rank any more.
        memory: of the rank on its GPU, which the coordinator has to know of.
    """

    def __init__(
        self, channel: Channel, on_stop: Callable[[], None], memory: RankMemory | None = None
    ) -> None:
        self._channel = channel
        self._memory = memory
        self._on_stop = on_stop
        self._sending = threading.Lock()
        self._answers: dict[int, tuple[Message, int | None]] = {}
        self._changed = threading.Condition()
        self._reading = False
        self._asking = 0
        self._requests = 0
        self._pid = os.getpid()

    def tell(self, message: Message, file: int | None = None) -> None:
        """Send a message that needs no answer.

        Raises:
            UnsupportedOperationError: in a process that the rank has forked.
        """
        self._refuse_forks()
        with self._sending:
            self._send(message, file)

    def ask(self, name: str, *fields: Any) -> tuple[Message, int | None]:
        """Send a question and wait for its answer.

        Raises:
            UnsupportedOperationError: in a process that the rank has forked.
        """
        self._refuse_forks()
        with self._sending:
            self._requests += 1
            request = self._requests
            self._asking += 1
            self._tell_memory()
            self._send((name, request, *fields, self._helpers()), None)
        try:
            return self._answer(request)
        finally:
            with self._sending:
                self._asking -= 1

    def begin_asking(self, name: str, *fields: Any) -> int:
        """Send a question, and go on: `answer` waits for its answer. Does not give the turn up.

        Raises:
            UnsupportedOperationError: in a process that the rank has forked.
        """
        self._refuse_forks()
        with self._sending:
            self._requests += 1
            self._send((name, self._requests, *fields), None)
            return self._requests

    def answer(self, request: int) -> tuple[Message, int | None]:
        """Wait for the answer to a question; once for each."""
        return self._answer(request)

    def await_turn(self) -> None:
        """Wait until the coordinator lets this rank begin."""
        self._answer(0)

    def tell_memory(self) -> None:
        """Tell what the rank has on its GPU: of one that never had to ask, nobody knows otherwise."""
        with self._sending:
            self._tell_memory()

    def _tell_memory(self) -> None:
        if self._memory is not None and (note := self._memory.note()):
            self._send(note, None)

    def _refuse_forks(self) -> None:
        """A forked process has this channel, too; two that use it would mix their answers up."""
        if os.getpid() != self._pid:
            raise UnsupportedOperationError(
                "communication in a process that a rank has forked",
                where=calling_line() or None,
                hint="communicate in the rank itself; gloo and NCCL do not survive a fork either",
            )

    def _send(self, message: Message, file: int | None) -> None:
        try:
            self._channel.send(message, file)
        except (BrokenPipeError, ConnectionResetError):
            # Nobody is there to work for. The coordinator says why.
            self._on_stop()
            raise
        except OSError as error:
            raise ReplayError(
                f"the rank cannot reach the coordinator: {os.strerror(error.errno or 0)}",
                hint="does the program close files that it did not open (os.closerange)?",
            ) from error

    def _helpers(self) -> int:
        """Threads of this rank, other than those that wait here, that may still communicate."""
        alive = sum(not thread.daemon for thread in threading.enumerate())
        return max(0, alive - self._asking)

    def _answer(self, request: int) -> tuple[Message, int | None]:
        with self._changed:
            while request not in self._answers:
                if self._reading:
                    self._changed.wait()
                    continue
                self._reading = True
                self._changed.release()
                try:
                    received = self._receive()
                finally:
                    self._changed.acquire()
                    self._reading = False
                    self._changed.notify_all()
                self._answers[received[0][1]] = received
            return self._answers.pop(request)

    def _receive(self) -> tuple[Message, int | None]:
        while True:
            try:
                message, file = self._channel.receive()
            except EOFError:
                self._on_stop()
                raise
            if message[0] == "stop":
                self._on_stop()
            if self._memory is None or message[0] not in ("trim", "spill"):
                return message, file
            # Not an answer: the coordinator needs room for another rank.
            done = self._memory.trim() if message[0] == "trim" else self._memory.spill()
            with self._sending:
                self._send(done, None)


class CollectPending:
    """An operation that the coordinator has; see `prismreplay.runtime.roles.Pending`."""

    def __init__(self, connection: Connection, ticket: int, outputs: Sequence[Tensor]) -> None:
        self.source: int | None = None
        self._connection = connection
        self._ticket = ticket
        self._outputs: Sequence[Tensor] | None = outputs
        self._issued = cuda_staging().mark(outputs[0]) if _on_gpu(outputs) else None
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Block until the outputs are filled in."""
        with self._lock:
            if self._outputs is None:
                return
            answer, file = self._connection.ask("wait", self._ticket)
            _, _, data, nbytes, spans, self.source = answer
            parcel = Parcel(data, file, nbytes)
            fill_all(
                [
                    (output, Span(*span))
                    for output, span in zip(self._outputs, spans, strict=True)
                    if span is not None
                ],
                parcel,
                self._issued,
            )
            parcel.close()
            self._outputs = None

    def done(self) -> bool:
        """True once `wait` would not block."""
        if self._outputs is None:
            return True
        return bool(self._connection.ask("poll", self._ticket)[0][2])


class _Done:
    """A send that is over at once, as the coordinator keeps its bytes."""

    source: int | None = None

    def wait(self) -> None:
        """Nothing to wait for."""

    def done(self) -> bool:
        """True."""
        return True


class StoreConnection:
    """The run's key-value store; a `prismreplay.runtime.stores.StoreClient`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def call(self, operation: str, *arguments: Any) -> Any:
        """Perform an operation; blocks until it can be done.

        Raises:
            torch.distributed.DistStoreError: it timed out, or does not fit what is stored.
        """
        site = calling_line() if operation in _BLOCKING else ""
        answer, _ = self._connection.ask("store", operation, arguments, site)
        if answer[0] == "refused":
            raise distributed.DistStoreError(answer[2])
        return answer[2]


_BLOCKING = ("get", "wait", "queue_pop")


class CollectRole:
    """What becomes of communications while a graph is collected: the coordinator does them."""

    wants_real_groups = False
    wants_sites = True

    def __init__(
        self, connection: Connection, place: Place, step: Callable[[], int | None] = lambda: None
    ) -> None:
        """Take part through `connection`; `step` tells the training step the program is in."""
        self._connection = connection
        self._place = place
        self._step = step
        self._tickets = 0
        self._sent_ahead = 0
        self._lock = threading.Lock()

    def join(self, group: Group) -> None:
        """Tell the coordinator who is in the group."""
        self._connection.tell(
            (
                "join",
                group.key,
                group.name,
                group.ranks,
                group.rank,
                group.backend,
                group.generation,
                group.desc,
                calling_line(),
            )
        )

    def submit(
        self,
        op: Op,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        call: Callable[[], Any],  # noqa: ARG002  part of the protocol
    ) -> Pending:
        """Hand the inputs over; see `prismreplay.runtime.roles.Role`.

        Raises:
            HandoverError: no space is left for them.
        """
        parcel = pack(inputs, self._place)
        with self._lock:
            waits = op.call is not op.call.SEND or self._is_far_ahead(parcel.nbytes)
            self._tickets += 1
            ticket = self._tickets
            packed = pack_op(op, self._step())
            self._connection.tell(("submit", ticket, packed, parcel.data, waits), parcel.file)
        parcel.close()
        return CollectPending(self._connection, ticket, outputs) if waits else _Done()

    def _is_far_ahead(self, nbytes: int) -> bool:
        """Whether so much was sent that the program should wait until this is received.

        Without, a rank that only sends would hand over all its messages before anyone runs.
        """
        self._sent_ahead += nbytes
        if self._sent_ahead < MOST_AHEAD_BYTES:
            return False
        self._sent_ahead = 0
        return True

    def make_store(self, namespace: str) -> Any:
        """The store that rendezvous hands to the program."""
        return RemoteStore(StoreConnection(self._connection), namespace)


def pack(inputs: Sequence[Tensor], place: Place) -> Parcel:
    """A parcel with the elements of tensors, from whatever device and layout.

    Raises:
        HandoverError: no space is left for them.
    """
    writer = ParcelWriter(place)
    if _on_gpu(inputs):
        cuda_staging().collect(inputs, writer)
    else:
        for tensor in inputs:
            writer.put_tensor(tensor)
    return writer.finish()


def fill_all(outputs: Sequence[tuple[Tensor, Span]], parcel: Parcel, issued: Any = None) -> None:
    """Write bytes of a parcel into tensors of whatever layout and device.

    On a GPU, after what it had been given to do when the communication was `issued`.
    """
    if _on_gpu([output for output, _ in outputs]):
        cuda_staging().deliver(outputs, parcel, issued)
        return
    for output, span in outputs:
        fill(output, parcel, span)


def _on_gpu(tensors: Sequence[Tensor]) -> bool:
    return bool(tensors) and all(tensor.is_cuda for tensor in tensors)


def fill(output: Tensor, parcel: Parcel, span: Span) -> None:
    """Write bytes of a parcel into a tensor of whatever layout and device."""
    if span.nbytes != output.numel() * output.element_size():
        raise AssertionError(f"{span.nbytes} bytes for an output of {tuple(output.shape)}")
    if output.device.type == "cpu" and output.is_contiguous():
        parcel.read_into(bytes_of(output), span.offset)
        return
    # Schemas of communications do not tell autograd that they write; so nor do we.
    output.detach().copy_(parcel.part(span.offset, output.shape, output.dtype))
