"""Sandbox ranks of other hosts: what they say travels through a proxy here and a relay there.

    hub  <-socketpair->  proxy  <-TCP->  relay  <-socketpair->  rank
    '------- first host ------'          '------ other host -------'

To the hub a proxy is the rank's process: it says what the rank says, and ends as the rank ends. To
the rank the relay is the hub. Bytes of large tensors, which are files between processes of one
host, go over the network inside the message. When either side is gone, so is the other.

All times are those of the first host's clock. A relay measures by how much its own is apart, at
the beginning and then every second, and its ranks read their clock through that.

=========  ===========================  ===================================================
name       fields                       says
=========  ===========================  ===================================================
say        message, bytes or None       a message of the rank, or to it
ready      -                            the rank waits for its turn
origin     time                         when all ranks begin, before the rank's first turn
clock      number                       what time is it at the hub?
time       number, time                 the answer
file       name, bytes                  a piece of what the rank has recorded
exit       status                       the rank has ended, as `wait` tells it
=========  ===========================  ===================================================
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from prismreplay.collect.forking import fork
from prismreplay.collect.handover import Place
from prismreplay.collect.logs import RankLogs
from prismreplay.collect.messages import Channel, Message
from prismreplay.collect.pool import RankProcess
from prismreplay.errors import HostsError, RankFailedError
from prismreplay.run.ledger import Ledger

__all__ = ["ClockOffset", "Proxies", "relay_ranks"]

_PIECE = 1 << 22
_PINGS = 20
_MOST_PINGS_KEPT = 8
_PING_SECONDS = 1.0


# --- on the first host -------------------------------------------------------------------------


class Proxies:
    """Makes and knows the proxies of ranks of other hosts.

    Args:
        channels: connections to their relays, by rank.
        folder: where recordings go.
        ledger: tells when ranks begin.
        place: where the bytes of tensors are kept.
    """

    def __init__(
        self, channels: dict[int, Channel], folder: Path, ledger: Ledger, place: Place
    ) -> None:
        self._channels = channels
        self._folder = folder
        self._ledger = ledger
        self._place = place
        self._ready = mmap.mmap(-1, max(1, len(channels)))
        self._started: dict[int, RankProcess] = {}

    def __contains__(self, rank: int) -> bool:
        return rank in self._channels

    @property
    def descriptors(self) -> list[int]:
        """Everything open here, for children to close."""
        return [one.fileno() for one in self._channels.values()]

    def start(self, rank: int, inherited: Iterable[int]) -> RankProcess:
        """Fork the proxy of a rank; it need not keep what is `inherited`."""
        far = self._channels[rank]
        child = fork(
            lambda near: self._pass_on(rank, near, far),
            {*inherited, *self.descriptors} - {far.fileno()},
        )
        started = RankProcess(rank, *child)
        self._started[rank] = started
        return started

    def hang_up(self) -> None:
        """Let go of the connections here: they are the proxies'."""
        for channel in self._channels.values():
            channel.close()

    def await_ready(self, seconds: float) -> None:
        """Until all of them wait for their turns.

        Raises:
            HostsError: one is not ready in time, or gone.
        """
        deadline = time.monotonic() + seconds
        for number, rank in enumerate(self._channels):
            while not self._ready[number]:
                gone = select.select([self._started[rank].pidfd], [], [], 0.01)[0]
                if gone or time.monotonic() > deadline:
                    raise HostsError(
                        f"rank {rank} of another host " + ("is gone" if gone else "is not ready"),
                        hint="see what the command says on that host",
                    )

    def _pass_on(self, rank: int, near: Channel, far: Channel) -> NoReturn:
        """The proxy: never returns."""
        sending = threading.Lock()

        def outward() -> None:
            while True:
                try:
                    message, file = near.receive()
                except EOFError:
                    os._exit(0)
                with sending:
                    if message[0] == "go":
                        far.send(("origin", self._ledger.origin_ns))
                    far.send(("say", message, _bytes_of(file)))

        threading.Thread(target=outward, daemon=True).start()
        number = list(self._channels).index(rank)
        while True:
            try:
                name, *fields = far.receive()[0]
            except EOFError:
                print(f"rank {rank}: its host is gone", file=sys.stderr)
                os._exit(1)
            if name == "say":
                _say(near, fields[0], fields[1], self._place)
            elif name == "clock":
                with sending:
                    far.send(("time", fields[0], time.monotonic_ns()))
            elif name == "ready":
                self._ready[number] = 1
            elif name == "file":
                with (self._folder / Path(fields[0]).name).open("ab") as file:
                    file.write(fields[1])
            elif name == "exit":
                near.close()
                _end_as(fields[0])


def _end_as(status: int) -> None:
    """End this process as the one of that wait status."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


# --- on the other hosts ------------------------------------------------------------------------


@dataclass
class ClockOffset:
    """What to add to this host's clock, in ns, to have the hub's; shared with forked ranks."""

    _memory: mmap.mmap = field(default_factory=lambda: mmap.mmap(-1, 8))

    def __post_init__(self) -> None:
        self._words = memoryview(self._memory).cast("q")
        self._pings: list[tuple[int, int]] = []

    def now(self) -> int:
        """The hub's clock."""
        return time.monotonic_ns() + self._words[0]

    def learn(self, sent_ns: int, hub_ns: int, received_ns: int) -> None:
        """An answer came; the quickest of the last ones counts."""
        self._pings.append((received_ns - sent_ns, hub_ns - (sent_ns + received_ns) // 2))
        # Clocks drift apart: old answers count no more.
        del self._pings[:-_MOST_PINGS_KEPT]
        self._words[0] = min(self._pings)[1]


@dataclass(eq=False)
class _Relay:
    """Between a rank of this host and its proxy."""

    process: RankProcess
    far: Channel
    ledger: Ledger
    offset: ClockOffset
    place: Place
    folder: Path
    sending: threading.Lock = field(default_factory=threading.Lock)
    answered: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    status: int | None = None
    stopped: bool = False
    """The hub ended it early: a rank that is told to stop may still end with status 0."""
    _asked: dict[int, int] = field(default_factory=dict)

    def start(self) -> None:
        threading.Thread(target=self._inward, daemon=True).start()

    def listen(self) -> None:
        """Pass on what the rank says, from now on."""
        threading.Thread(target=self._outward, daemon=True).start()

    def send(self, message: Message) -> None:
        with contextlib.suppress(OSError), self.sending:
            self.far.send(message)

    def ask_time(self) -> None:
        """Measure how far the clocks are apart."""
        number = len(self._asked)
        self.answered.clear()
        self._asked[number] = time.monotonic_ns()
        self.send(("clock", number))

    def _outward(self) -> None:
        while True:
            try:
                message, file = self.process.channel.receive()
            except (EOFError, OSError):
                break
            self.send(("say", message, _bytes_of(file)))
        _, self.status = os.waitpid(self.process.pid, 0)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)  # workers that it has left
        for path in sorted(self.folder.glob(f"rank{self.process.rank}.*")):
            with path.open("rb") as file_:
                while piece := file_.read(_PIECE):
                    self.send(("file", path.name, piece))
        self.send(("exit", self.status))
        self.ended.set()

    def _inward(self) -> None:
        while True:
            try:
                name, *fields = self.far.receive()[0]
            except (EOFError, OSError):
                break
            if name == "say":
                self.stopped = self.stopped or fields[0][0] == "stop"
                with contextlib.suppress(OSError):  # it has just ended
                    _say(self.process.channel, fields[0], fields[1], self.place)
            elif name == "origin":
                self.ledger.origin_ns = fields[0]
            elif name == "time":
                self.offset.learn(self._asked[fields[0]], fields[1], time.monotonic_ns())
                self.answered.set()
        if not self.ended.is_set():  # the hub needs it no more
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)


def relay_ranks(
    ranks: Sequence[RankProcess],
    channels: dict[int, Channel],
    *,
    ledger: Ledger,
    offset: ClockOffset,
    place: Place,
    folder: Path,
    logs: RankLogs,
    outputs: Sequence[int],
) -> None:
    """Stand between the ranks of this host and the hub, until all have ended.

    Args:
        ranks: they wait for their first turns.
        channels: connections to the hub, by rank.
        ledger, offset: what the ranks read.
        place: where the bytes of tensors are kept.
        folder: where they record.
        logs: their output.
        outputs: descriptors to pump.

    Raises:
        RankFailedError: one of them failed; the hub says why.
    """
    relays = [_Relay(one, channels[one.rank], ledger, offset, place, folder) for one in ranks]
    for relay in relays:
        relay.start()
    for _ in range(_PINGS):
        relays[0].ask_time()
        relays[0].answered.wait(1.0)
    for relay in relays:
        relay.send(("ready",))
        relay.listen()
    pipes = set(outputs)
    next_ping = time.monotonic() + _PING_SECONDS
    while not all(relay.ended.is_set() for relay in relays):
        for pipe in select.select(sorted(pipes), [], [], 0.05)[0]:
            if not logs.pump(pipe):
                pipes.discard(pipe)
        if time.monotonic() > next_ping:
            next_ping += _PING_SECONDS
            next(relay for relay in relays if not relay.ended.is_set()).ask_time()
    logs.close()
    failed = [relay.process.rank for relay in relays if relay.status or relay.stopped]
    if failed:
        raise RankFailedError(
            f"rank {failed[0]} of this host has failed, or was ended",
            where=str(logs.path(failed[0])),
            hint="the first host says which rank failed first, and why",
        )


def _bytes_of(file: int | None) -> bytes | None:
    """All bytes of a file, which is closed."""
    if file is None:
        return None
    size, pieces, offset = os.fstat(file).st_size, [], 0
    while offset < size:
        piece = os.pread(file, size - offset, offset)
        pieces.append(piece)
        offset += len(piece)
    os.close(file)
    return b"".join(pieces)


def _say(channel: Channel, message: Message, data: bytes | None, place: Place) -> Any:
    """Send a message on, its bytes as a file."""
    if data is None:
        channel.send(message)
        return
    file = place.open()
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(file, view) :]
        channel.send(message, file)
    finally:
        os.close(file)
