"""What the doors of a process ask of its frontend, and what they get: rows of a model, without any wire format."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from numpy.typing import NDArray

from jurybox.protocol.errors import RowFailed
from jurybox.protocol.scoreboard import NORMAL
from jurybox.protocol.spec import ModelSpec
from jurybox.server.security.access import ClientConnection

Rows = NDArray[Any] | list[Any]  # (n, *row shape); a list of n arrays or bytes if the rows differ in size
GET, SET = "get", "set"  # what may be done with the state of sequences instead of computing a step


@dataclass(frozen=True, slots=True)
class Steps:
    """The sequences of a request to a stateful model, one for each row.

    Attributes:
        sequences: their names: (id,) for a sequence as in Triton, (client, slot) for a session of our own client.
        steps: for each, the number of the request since the sequence began, 0 if it begins; None: the next number.
        end: whether they end after the request.
        reports_loss: whether a lost sequence is reported in a parameter of the answer, as to our own client; otherwise
            by an error.
    """

    sequences: tuple[tuple[Any, ...], ...]
    steps: tuple[int | None, ...]
    end: bool = False
    reports_loss: bool = False


class ReadRows(NamedTuple):
    """The rows of a request, fully checked, so that they cannot fail other requests of the same ticket.

    Attributes:
        inputs: n rows of every input, by name.
        answer: bytes that the answer takes, as far as it is not written to memory of the client.
    """

    inputs: Mapping[str, Rows]
    n: int
    answer: int = 0


@dataclass(slots=True)
class RowsRequest:
    """Rows for a model, or for a panel.

    Attributes:
        model: the name of the model or panel.
        read: returns the rows for a spec, and raises Error if they do not fit it. It is called again if the model has
            another spec meanwhile. The second argument is true for a member of a panel: then it leaves out inputs that
            this model does not have.
        until: when nobody waits for the answer any more, s of the monotonic clock.
        version: of the weights that must compute it; None: the newest.
        priority: one of scoreboard.PRIORITIES.
        steps: the steps of its sequences; None: it belongs to none.
        state: GET to return the state of the sequences, SET to replace it by the rows; then nothing is computed.
        names: of the inputs that came, which a panel checks.
        client: the connection that sent it and has no other request in flight; None: unknown.
        patient: whether it waits for a model that is loading, and for rows, as long as for an answer.
    """

    model: str
    read: Callable[[ModelSpec, bool], ReadRows]
    until: float
    version: int | None = None
    priority: int = NORMAL
    steps: Steps | None = None
    state: str = ""
    names: Collection[str] = ()
    client: ClientConnection | None = None
    patient: bool = False


@dataclass(slots=True)
class RowsReply:
    """The answer. Failed rows and lost sequences are data; a door that cannot say them raises `error`.

    Attributes:
        outputs: n rows of every output, by name; those of failed rows have no meaning.
        version: of the weights, the oldest of all rows.
        spec: that of the model that computed it; None: a panel's, whose outputs are float32, with NaN for no score.
        error: names the rows that failed, with the reasons; None: none has.
        lost: the rows whose sequences have lost their state; then nothing was computed.
    """

    outputs: Mapping[str, Rows]
    version: int
    spec: ModelSpec | None = None
    error: RowFailed | None = None
    lost: Sequence[int] = field(default=())

    @property
    def failed(self) -> Mapping[int, str]:
        """The failed rows, with the reasons."""
        return {} if self.error is None else self.error.errors
