"""Remote readers that are slow hold a few publications at the gateway, and no more."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
from tests.loops import turns

from jurybox.protocol import remote_weights_pb2 as pb
from jurybox.protocol.weights import WeightsChannel
from jurybox.protocol.weights.publisher import Publisher
from jurybox.protocol.weights.reader import WeightsReader
from jurybox.server.gateway import remote_weights
from jurybox.server.gateway.remote_weights import RemoteWeights


async def test_who_asks_while_slow_readers_hold_the_most_publications_gets_the_last_one_of_them(make, monkeypatch):
    channel = make({"w": np.zeros(3, np.float32)})

    def weights(_name):
        reader = WeightsReader(WeightsChannel.attach(channel.name))
        reader.require_owner = lambda: None
        return reader

    monkeypatch.setattr(
        remote_weights, "connect", lambda *_, **__: SimpleNamespace(weights=weights, close=lambda: None)
    )
    service, streams = RemoteWeights("ipc:///here"), []

    async def version():
        """The version that a new reader is told, which it does not receive yet."""

        async def requests():
            yield pb.ReadRequest(model="m")
            await asyncio.Event().wait()

        streams.append(service.read(requests(), None))
        head = (await asyncio.wait_for(anext(streams[-1]), 30)).head
        assert head.newest == newest
        return head.version

    with Publisher(channel) as publisher:
        found = []
        for _ in range(6):
            newest = publisher.publish({"w": np.ones(3, np.float32)})
            found.append(await version())
        assert found == [1, 2, 3, 4, 4, 4], "at most four are held"
        await anext(streams[0])
        await streams[0].aclose()
        assert await version() == 6, "one has been received"
    for stream in streams:
        await stream.aclose()
    await turns()
