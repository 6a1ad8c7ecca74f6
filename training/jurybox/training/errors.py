"""The base class of errors that are not a failure of the run, but a request that cannot be done."""


class UsageError(Exception):
    """What was asked for cannot be done; the message says what to change. Commands exit with status 2."""
