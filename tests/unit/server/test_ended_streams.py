"""A gRPC stream that ends early gives back what its method holds at once, not when its memory is collected."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from jurybox import native
from jurybox.server.gateway.grpc_call import Call
from jurybox.server.security.limits import budget_of


class Connection:
    """One whose peer reads nothing."""

    def __init__(self):
        self.loop, self.calls, self.full = asyncio.get_running_loop(), {}, lambda _: True
        self.budget = budget_of(1 << 20)
        self.account = native.Account(self.budget, 1)
        self.sent = asyncio.Event()
        self.native = SimpleNamespace(send=self._send, finish=lambda *_: None)

    def _send(self, *_):
        self.sent.set()
        return True

    def flush(self):
        pass

    async def taken_some(self):
        await self.loop.create_future()


@pytest.mark.parametrize("end", ["gone", "refuse"])
def test_a_stream_whose_peer_is_gone_while_its_answers_wait_ends_its_method(end):
    held, kept = [], []

    async def method(_requests, _call):
        held.append("a publication")
        try:
            while True:
                yield b"a piece of it"
        finally:
            held.clear()

    def answers(*arguments):
        kept.append(method(*arguments))  # as the traceback of an error may keep it
        return kept[-1]

    async def run():
        connection = Connection()
        handler = SimpleNamespace(
            request_streaming=True, response_streaming=True, stream_stream=answers, response_serializer=bytes
        )
        call = Call(connection, 1, handler, None, None)
        call.begin()
        await asyncio.wait_for(connection.sent.wait(), 20)
        task = call._task
        assert held
        if end == "gone":
            call.gone()
        else:
            call.refuse(SimpleNamespace(value=(4,)), "too late")
        await asyncio.wait({task}, timeout=20)
        assert not held

    asyncio.run(run())
