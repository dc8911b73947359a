"""What ranks and coordinator say to each other, and how it travels.

A message is a tuple that begins with its name; it goes through a Unix socket in one piece, with
at most one open file beside it (the bytes of large tensors). From a rank:

=============  ===============================================  =====================
name           fields                                           answered by
=============  ===============================================  =====================
join           key, name, ranks, place, backend, generation,    -
               desc
submit         ticket, packed operation, bytes or None, waits   -
wait           request, ticket, helpers                         result
poll           request, ticket, helpers                         polled
store          request, operation, arguments, site, helpers     value or refused
mirrored                                                        -
memory         reserved, allocated, peak bytes on the GPU       -
trimmed        as memory                                        -
spilled        bytes                                            -
failed         code, message, where, hint, traceback            -
=============  ===============================================  =====================

From the coordinator come `go` (begin), the answers above with their request first, and `stop`
(end now, nobody needs you any more). To a blocked rank it may also say `trim` (give back the GPU
memory that your allocator only keeps) and `spill` (let your memory go to disk), which the rank
answers with `trimmed` and `spilled`. `ticket` numbers the operations of a rank, `request` its
questions; `waits` is false for a send that nobody will wait for; `mirrored` says that the
rank has answered a collective by itself; `helpers` says how many other threads of the rank may
still communicate.

Both ends are processes of one run, forked from one another, so pickle is safe between them.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import struct
from collections import deque
from collections.abc import Mapping
from typing import Any

from prismreplay.runtime.operations import Group, Op

__all__ = ["Channel", "Message", "pack_op", "unpack_op"]

Message = tuple[Any, ...]

_HEADER = struct.Struct("<IB")  # length of the pickle, number of files with it
_READ_SIZE = 1 << 18
_FILES_SPACE = socket.CMSG_SPACE(16 * struct.calcsize("i"))


class Channel:
    """One end of the socket between a rank and the coordinator. Not safe to use from threads."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray()
        self._files: deque[int] = deque()

    def fileno(self) -> int:
        """For selectors."""
        return self._sock.fileno()

    def send(self, message: Message, file: int | None = None) -> None:
        """Send one message; `file` stays open here. Blocks while the other end is slow."""
        body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        data = memoryview(_HEADER.pack(len(body), file is not None) + body)
        if file is not None:
            # The file rides on the first bytes, so it is there once the message is whole.
            data = data[socket.send_fds(self._sock, [data], [file]) :]
        self._sock.sendall(data)

    def receive(self) -> tuple[Message, int | None]:
        """Wait for the next message, and the file that came with it (now the caller's).

        Raises:
            EOFError: the other end is gone.
        """
        while (found := self._next()) is None:
            self._read(0)
        return found

    def receive_available(self) -> list[tuple[Message, int | None]]:
        """The messages that are there already.

        Raises:
            EOFError: the other end is gone, and all its messages have been given out.
        """
        try:
            self._read(socket.MSG_DONTWAIT)
        except BlockingIOError:
            pass
        except EOFError:
            if not self._buffer:
                raise
        messages = []
        while (found := self._next()) is not None:
            messages.append(found)
        if not messages:
            # What is left of a message whose sender is gone.
            with contextlib.suppress(BlockingIOError):
                if not self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                    raise EOFError
        return messages

    def close(self) -> None:
        """Close the socket and the files that nobody took."""
        self._sock.close()
        while self._files:
            os.close(self._files.popleft())

    def _read(self, flags: int) -> None:
        try:
            # Not socket.recv_fds, which forgets its flags.
            data, extra, _, _ = self._sock.recvmsg(_READ_SIZE, _FILES_SPACE, flags)
        except ConnectionResetError as error:
            raise EOFError from error
        for level, kind, content in extra:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self._files.extend(memoryview(content).cast("i"))
        if not data:
            raise EOFError
        self._buffer += data

    def _next(self) -> tuple[Message, int | None] | None:
        if len(self._buffer) < _HEADER.size:
            return None
        length, files = _HEADER.unpack_from(self._buffer)
        end = _HEADER.size + length
        if len(self._buffer) < end:
            return None
        message = pickle.loads(memoryview(self._buffer)[_HEADER.size : end])  # noqa: S301  see above
        del self._buffer[:end]
        return message, self._files.popleft() if files else None


def pack_op(op: Op, step: int | None = None) -> Message:
    """`op` of a step, without its group, which the coordinator knows since the rank joined it."""
    return (
        op.call,
        op.group.key,
        op.seq,
        op.inputs,
        op.outputs,
        op.payload_bytes,
        op.dtype,
        op.root,
        op.peer,
        op.tag,
        op.reduce_op,
        op.premul_factor,
        op.input_splits,
        op.output_splits,
        op.batch,
        op.site,
        step,
    )


def unpack_op(packed: Message, groups: Mapping[str, Group]) -> Op:
    """Inverse of `pack_op`; `groups` are those of the rank that sent it, by key."""
    return Op(packed[0], groups[packed[1]], *packed[2:])
