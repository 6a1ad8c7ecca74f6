"""A reader of weights over gRPC that was closed, or whose process was forked, opens no stream any more."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.weights.test_remote_ends import gateway, reader  # noqa: F401  fixtures

from jurybox.protocol.errors import Refused


@pytest.mark.parametrize("why", ["was closed: take another one", "was made before a fork: connect in this process"])
def test_a_reader_that_cannot_be_used_any_more_says_why_and_opens_nothing(
    gateway: Any,  # noqa: F811
    reader: Any,  # noqa: F811
    why: str,
) -> None:
    if "closed" in why:
        reader.close()
    else:
        reader._after_fork_in_child()
    streams, sent = len(gateway.streams), [len(stream.sent) for stream in gateway.streams]
    for ask in (reader.read, lambda: reader.newest, lambda: reader.newer_than(0), lambda: reader.read(timeout=1.0)):
        with pytest.raises(Refused, match=why):
            ask()
    assert len(gateway.streams) == streams and [len(stream.sent) for stream in gateway.streams] == sent
