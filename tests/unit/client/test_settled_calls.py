"""What a lane's transport over gRPC keeps of calls that were settled."""

from __future__ import annotations

import gc
import weakref

import grpc
from tests.unit.client.test_grpc_lane import PLAIN, Failure, made, ticket


def test_an_answer_is_let_go_when_it_is_settled() -> None:
    transport, calls, _ = made(PLAIN)
    for sequence in (5, 6):
        transport.send(ticket(sequence))
        calls.told[-1](Failure(grpc.StatusCode.UNAVAILABLE, "later"))
    first, second = (weakref.ref(outcome) for *_, outcome in transport._done)
    one, other = transport.receive(0)
    transport.settled(one)
    gc.collect()
    assert first() is None and second() is not None
    assert list(transport.receive(0)) == [other]
    transport.settled(other)
    gc.collect()
    assert second() is None
