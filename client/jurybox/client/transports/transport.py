"""The interface of the transports between a lane and its engines."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeGuard

import numpy as np
from numpy.typing import NDArray

from jurybox.client.in_flight import Answer, InFlight
from jurybox.protocol.errors import ProtocolMismatch
from jurybox.protocol.scoreboard import ENGINE, EngineState
from jurybox.protocol.spec import BYTES, VARIABLE, TensorSpec
from jurybox.protocol.wire import PACK_REPLY, PREFIX, prefix_error

if TYPE_CHECKING:
    import asyncio

# Results of a Caller that are not an answer's code. The native core uses the same values.
NOT_SENT = -1
NOT_ANSWERED = -2
NOT_FIT = -3

SERVING = int(EngineState.SERVING)
# Of a reply's bytes: the length, the length of prefix and sequence, and the last bytes if its code is OK.
HEAD = len(PREFIX) + PACK_REPLY.size
NAMED = len(PREFIX) + 8
OK = bytes(4)


def read_reply(frame: bytes, sender: str) -> Answer:
    """Parse a frame of wire.PACK_REPLY. Raises ProtocolMismatch, naming the sender, if it is not a reply."""
    if len(frame) < HEAD or frame[: len(PREFIX)] != PREFIX:
        wrong = prefix_error(frame) or f"{len(frame)} bytes"
        raise ProtocolMismatch(f"{sender} answered what is no reply: {wrong}")
    sequence, version, incarnation, code = PACK_REPLY.unpack_from(frame, len(PREFIX))
    return Answer(sequence, code, frame[HEAD:].decode(errors="replace") if code else "", version, incarnation)


def number_in(reply: bytes) -> int:
    """Return the number in a reply's bytes; 0 if they are too few."""
    return int.from_bytes(reply[len(PREFIX) : NAMED], "little") if len(reply) >= NAMED else 0


class Watching:
    """An event loop that is notified when answers may have arrived. Create it in the loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, arrived: Callable[[], None]) -> None:
        self.loop = loop
        self._arrived = arrived
        self._thread = threading.get_ident()
        self._reader = -1

    @property
    def on(self) -> bool:
        """False once the loop is closed: asyncio.run has returned, but the client may still be in use."""
        return not self.loop.is_closed()

    def tell(self) -> None:
        """Make the loop check for answers. May be called from any thread."""
        if self._thread == threading.get_ident():
            self.loop.call_soon(self._arrived)
        elif self.on:
            self.loop.call_soon_threadsafe(self._arrived)

    def read(self, descriptor: int) -> None:
        """Notify the loop when the descriptor becomes readable."""
        self._do(lambda: self.loop.add_reader(descriptor, self._arrived))

    def unread(self, descriptor: int) -> None:
        """Stop watching a descriptor that is about to be closed."""
        self._do(lambda: self.loop.remove_reader(descriptor))

    def _do(self, action: Callable[[], object]) -> None:
        if not self.on:
            return
        if self._thread == threading.get_ident():
            action()
        else:
            self.loop.call_soon_threadsafe(action)


class RowPlace(NamedTuple):
    """Rows of the arena that are reused from call to call, and the engine that computes them, which `Lane.caller` adds.

    Attributes:
        first, rows: the first row and the number of rows.
        spec: the spec of the model's only input; None if it has several.
        input: the array to write the input to; None if inputs are written before the call.
        extents: the array for the sizes of a row of variable size, int64 (k,); None if rows have a fixed shape.
        outputs: the rows of the only output, or of all outputs by name; None if they are read after the call.
        engine: the engine's record of scoreboard.ENGINE, shape (1,).
        incarnation: the engine's incarnation that the calls are for.
        number: the engine's index on the scoreboard.
    """

    first: int
    rows: int
    spec: TensorSpec | None
    input: NDArray[Any] | None
    extents: NDArray[np.int64] | None
    outputs: NDArray[Any] | dict[str, NDArray[Any]] | None
    engine: NDArray[Any] = np.zeros(0, ENGINE)
    incarnation: int = 0
    number: int = 0

    def form(self) -> tuple[tuple[int, ...], np.dtype[Any] | type[bytes] | None]:
        """Return what fits: the shape, with VARIABLE for any size; the dtype, or the type `bytes`, or None: nothing."""
        if self.input is None or self.spec is None:
            return (), None
        if self.extents is None:
            return self.input.shape, self.input.dtype
        if self.spec.dtype == BYTES:
            return (VARIABLE,), bytes
        return self.spec.shape, self.input.dtype

    def takes(self, row: object) -> TypeGuard[NDArray[Any]]:
        """Return whether a row of fixed shape has their `form` and lies in one piece: its bytes can be sent."""
        like = self.input
        return (
            type(row) is np.ndarray
            and like is not None
            and row.shape == like.shape
            and row.dtype == like.dtype
            and row.flags.c_contiguous
        )

    def write(self, row: object) -> bool:
        """Copy the input to the rows; return False if it has not their `form`: the codec converts or refuses it."""
        if (to := self.input) is None or self.spec is None:
            return False
        if type(row) is np.ndarray:
            if row.dtype != to.dtype or self.spec.dtype == BYTES:
                return False
            if self.extents is None:
                if row.shape != to.shape:
                    return False
                np.copyto(to, row)
                return True
            array = row
        elif type(row) is bytes and self.spec.dtype == BYTES:
            array = np.frombuffer(row, np.uint8)
        else:
            return False
        sizes = self.spec.extents_of(array.shape)
        if sizes is None or self.extents is None:
            return False
        to[: array.size] = array.reshape(-1)
        self.extents[:] = sizes
        return True

    def copied(self) -> Any:
        """Return copies of the outputs."""
        if type(self.outputs) is dict:
            return {name: array.copy() for name, array in self.outputs.items()}
        return None if self.outputs is None else self.outputs.copy()


class Caller(Protocol):
    """Makes whole calls: copies rows in, sends their ticket and waits at most LOOK_AFTER seconds for the answer.

    Answers to other tickets stay with the transport.
    """

    def __call__(self, row: object, sequence: int, seconds: float) -> Any:
        """Send a request for the rows of a RowPlace and wait for its answer.

        Args:
            row: whatever the caller gave; None if it is already written.

        Returns:
            The result of RowPlace.copied, or an int if there are no outputs: a failure's code, NOT_FIT if the row has
            not exactly the place's form, NOT_SENT if the engine is no longer serving, or NOT_ANSWERED if no answer
            arrived in time, or a signal or the end of the connection ended the wait.
        """

    @property
    def deadline(self) -> int:
        """The deadline of the last ticket that was sent, ns of CLOCK_MONOTONIC."""

    @property
    def version(self) -> int:
        """The weights version of the last answer."""

    def message(self) -> str:
        """Return the message of the last failure."""


class SocketCaller(Caller):
    """The common part of callers that read replies from a socket: the engine's record and the last reply."""

    deadline: int = 0

    def __init__(self, place: RowPlace, engine: NDArray[Any]) -> None:
        self._place = place
        self._states = engine["state"]
        self._incarnations = engine["incarnation"]
        self._message = ""
        self._reply: bytes | Answer = b""  # the last reply; parsed only if its version is read

    @property
    def version(self) -> int:
        reply = self._reply
        return reply.version if isinstance(reply, Answer) else read_reply(reply, "an engine").version

    def message(self) -> str:
        return self._message


class NotSent(Exception):
    """A transport cannot take a ticket at present; the lane sends it later. The message states why."""


class Transport(Protocol):
    """Carries tickets of one lane to engines and their answers back. Not thread-safe: the model's lock serializes it.

    A call may be interrupted at any point, for ever by a KeyboardInterrupt, or by a nested call of a signal handler or
    a destructor, which uses the same transport. So a transport always knows which tickets it has sent, and an answer
    stays with it until it is settled: `receive` returns it again.

    `send`, `exchange` and `caller` raise TooManyFiles if a connection to the engine is needed and cannot be opened, and
    NotSent.
    """

    def send(self, ticket: InFlight) -> None:
        """Send without waiting."""

    def exchange(self, ticket: InFlight, timeout: float) -> Answer | None:
        """Send a ticket and wait for its answer; return None if none arrived in time.

        The answer is settled. Those to other tickets stay.
        """

    def caller(self, place: RowPlace) -> Caller | None:
        """Return a caller for these rows to the model's only engine.

        None if it would not be faster, for example over a network.
        """
        return None

    def receive(self, timeout: float) -> Sequence[Answer]:
        """Return all answers that are not settled, also those returned before.

        If there are none, wait at most `timeout` seconds for some.
        """

    def settled(self, answer: Answer) -> None:
        """Drop an answer that `receive` returned; it may be dropped already."""

    def holds(self, ticket: InFlight) -> bool:
        """Return whether the incarnation it was sent to may have the ticket, or its answer is not settled."""

    def is_reading(self, ticket: InFlight) -> bool:
        """Return whether a call has the answer, or may have it, and only that call can go on with it."""
        return False

    def watch(self, loop: asyncio.AbstractEventLoop, arrived: Callable[[], None]) -> None:
        """Call `arrived` in the loop's thread whenever answers may have arrived. Call this method in that thread.

        Raises:
            Busy: nothing could be started that calls it; the caller looks for answers itself.
        """

    def close(self) -> None:
        """Release all resources. Tickets in flight are never answered."""

    def forked(self) -> None:
        """Close inherited descriptors in a forked child, without affecting the parent."""
