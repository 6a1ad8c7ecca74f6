"""The locks of the client. Publishers use them, too, so they are part of the protocol's package."""

from jurybox.protocol.locks import IN_SERVICE, NESTED, Taken, TimedLock, Turn, is_serving

__all__ = ["IN_SERVICE", "NESTED", "Taken", "TimedLock", "Turn", "is_serving"]
