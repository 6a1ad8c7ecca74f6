"""A lane's rows in this process's own memory, where the server's is out of reach."""

from __future__ import annotations

from jurybox.protocol.arena import Columns
from jurybox.protocol.errors import Refused
from jurybox.protocol.spec import ModelSpec


class RowsHere:
    """What Lane asks of an arena.

    What is written to them is copied into a message when a ticket is sent, and answers are copied to them.
    """

    def __init__(self, spec: ModelSpec, rows: int) -> None:
        self.rows = rows
        self.columns = Columns.here(spec, rows)

    def close(self) -> None:
        """Forget them; who still holds one of the arrays keeps it."""
        self.columns = self.columns.nothing()


def out_of_reach(model: str) -> Refused:
    """The error for whoever asks for a weights channel over tcp://."""
    return Refused(
        f"the weights of {model!r} are not published over tcp://: connect with the server's grpc:// address, or "
        "with its ipc:// address on its host"
    )
