"""The locks of the client. Publishers use them, too, so they are part of the protocol's package."""

from jurybox.protocol.locks import NESTED, Taken, TimedLock, Turn

__all__ = ["NESTED", "Taken", "TimedLock", "Turn"]
