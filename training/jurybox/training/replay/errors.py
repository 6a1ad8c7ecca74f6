"""What a replay raises beside the shared errors: `SpecMismatch` for a wrong row, `Timeout` for a wait that ran out."""

from __future__ import annotations

from jurybox.protocol.errors import Code, Refused


class NotEnoughRows(Refused):
    """The replay holds fewer rows that fit the request than were asked for."""

    code = Code.NOT_READY


class Damaged(Refused, ValueError):
    """A saved file is cut, changed or of another format; the message names the place."""

    code = Code.MALFORMED
