"""Length-prefixed messages over stream sockets, with a bound on size and on waiting.

Knows bytes. Must not know what they mean.
"""

from __future__ import annotations

import socket
import struct

__all__ = ["Inbox", "WireError", "receive", "send"]

_LENGTH = struct.Struct("<4sI")
_MAGIC = b"rank"
MAX_MESSAGE_BYTES = 256 * 2**20


class WireError(Exception):
    """The stream does not hold a message: another writer, a closed end, or a nonsensical length."""


def send(sock: socket.socket, payload: bytes) -> None:
    """Send one message on a blocking socket.

    Raises:
        WireError: the message is larger than the receiver accepts.
        OSError: the peer is gone, or the socket's timeout passed.
    """
    if len(payload) > MAX_MESSAGE_BYTES:
        raise WireError(
            f"message of {len(payload)} bytes; at most {MAX_MESSAGE_BYTES} are accepted"
        )
    sock.sendall(_LENGTH.pack(_MAGIC, len(payload)) + payload)


def receive(sock: socket.socket) -> bytes | None:
    """Receive one message on a blocking socket; None when the peer has closed it.

    Raises:
        WireError: the stream ends inside a message, or is none.
        OSError: the socket's timeout passed.
    """
    inbox = Inbox()
    while True:
        chunk = sock.recv(inbox.missing)
        if not chunk:
            if inbox.pending:
                raise WireError(f"the peer closed after {inbox.pending} bytes of a message")
            return None
        messages = inbox.feed(chunk)
        if messages:
            return messages[0]


class Inbox:
    """Reassembles messages from chunks of any size."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    @property
    def pending(self) -> int:
        """Bytes of the unfinished message."""
        return len(self._buffer)

    @property
    def missing(self) -> int:
        """Bytes up to the next boundary: never reads into a following message."""
        if len(self._buffer) < _LENGTH.size:
            return _LENGTH.size - len(self._buffer)
        return min(_LENGTH.size + self._length() - len(self._buffer), 2**20)

    def feed(self, chunk: bytes) -> list[bytes]:
        """Add bytes; gives the messages that are now complete.

        Raises:
            WireError: the bytes are no message.
        """
        self._buffer += chunk
        messages = []
        while len(self._buffer) >= _LENGTH.size:
            end = _LENGTH.size + self._length()
            if len(self._buffer) < end:
                break
            messages.append(bytes(self._buffer[_LENGTH.size : end]))
            del self._buffer[:end]
        return messages

    def _length(self) -> int:
        magic, length = _LENGTH.unpack_from(self._buffer)
        if magic != _MAGIC or length > MAX_MESSAGE_BYTES:
            raise WireError(f"not a message: it begins with {bytes(self._buffer[:16])!r}")
        return int(length)
