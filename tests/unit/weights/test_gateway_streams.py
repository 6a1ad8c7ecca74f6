"""Streams of weights at the gateway, over a channel of this process: every message's answer, and what an end frees."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from tests.loops import turns

from jurybox.protocol import remote_weights_pb2 as pb
from jurybox.protocol.errors import Code, ModelNotFound, ServerGone
from jurybox.protocol.weights import WeightsChannel
from jurybox.protocol.weights.channel import encode_extra
from jurybox.protocol.weights.publisher import Publisher
from jurybox.protocol.weights.reader import WeightsReader
from jurybox.protocol.weights.transfer import Assembly, chunks, transfer_layout
from jurybox.server.gateway import remote_weights
from jurybox.server.gateway.remote_weights import RemoteWeights
from jurybox.server.security.doors import Doors

LIMIT = 30.0  # seconds, of whatever a broken stream would wait for


class Host:
    """The server of a channel, as the gateway connects to it."""

    def __init__(self, channel):
        self.channel, self.open, self.connections = channel, 0, 0
        self._closed = threading.Semaphore(0)
        self.gone = None

    def connect(self, address, timeout):
        self.open += 1
        self.connections += 1
        made = []

        def publisher(name):
            if name != "m":
                raise ModelNotFound(f"no model {name!r}")
            made.append(Publisher(self.channel))
            return made[0]

        def weights(name):
            reader = WeightsReader(WeightsChannel.attach(self.channel.name), max_lag=3)
            reader.require_owner = self.require_owner
            return reader

        def close():
            for one in made:
                one.close()
            self.open -= 1
            self._closed.release()

        return SimpleNamespace(publisher=publisher, weights=weights, close=close)

    async def freed(self, connections=1):
        """Wait until so many connections were closed, of all that were open."""
        for _ in range(connections):
            assert await asyncio.to_thread(self._closed.acquire, timeout=LIMIT)
        assert self.open == 0

    def require_owner(self):
        if self.gone is not None:
            raise self.gone


@pytest.fixture
def host(make, monkeypatch):
    host = Host(make({"w": np.zeros(400_000, np.float32), "b": np.zeros(3, np.float32)}))
    monkeypatch.setattr(remote_weights, "connect", host.connect)
    return host


class Context:
    """A call's, whose abort notes why."""

    details = ""

    def set_trailing_metadata(self, trailing):
        pass

    async def abort(self, code, details):
        self.details = details
        raise RuntimeError(details)


class Stream:
    """One stream, as its client sees it."""

    def __init__(self, method):
        self.asked = asyncio.Queue()
        self.answers = method(self._requests(), Context())

    async def _requests(self):
        while (request := await self.asked.get()) is not None:
            yield request

    def send(self, request):
        self.asked.put_nowait(request)

    async def answer(self):
        return await asyncio.wait_for(anext(self.answers), LIMIT)

    async def ask(self, request):
        self.send(request)
        return await self.answer()

    async def end(self):
        """End the requests; the stream ends without a further answer."""
        self.send(None)
        await self.over()

    async def over(self):
        with pytest.raises(StopAsyncIteration):
            await self.answer()


OPEN = pb.PublishRequest(open=pb.OpenPublisher(model="m"))


def begin(layout, **more):
    bfloat16 = more.get("bfloat16", False)
    announced = bytes.fromhex(transfer_layout(layout, bfloat16=bfloat16).hash)
    return pb.PublishRequest(begin=pb.BeginPublication(layout_hash=announced, **more))


def publication(layout, value, base=None, **more):
    """Return the messages of a publication whose bytes all have this value."""
    flat = np.full(transfer_layout(layout, bfloat16=more.get("bfloat16", False)).nbytes, value, np.uint8)
    parts = [pb.PublishRequest(chunk=chunk) for chunk in chunks(flat, base)]
    size = sum(len(part.chunk.data) for part in parts)
    return [begin(layout, **more), *parts, pb.PublishRequest(end=pb.EndPublication(bytes=size))]


async def published(stream, requests):
    for request in requests:
        stream.send(request)
    return await stream.answer()


def newest(host):
    return WeightsReader(WeightsChannel.attach(host.channel.name)).read()


async def test_a_publisher_is_told_what_it_opens_and_each_version(host):
    stream, layout = Stream(RemoteWeights("ipc:///here").publish), host.channel.layout
    opened = (await stream.ask(OPEN)).opened
    assert (opened.layout, opened.newest) == (layout.to_json(), 0)
    assert (opened.extra_bytes, opened.chunk_bytes) == (host.channel.extra_bytes, 1 << 20)
    extra = encode_extra({"epsilon": 0.5})
    assert (await published(stream, publication(layout, 0, extra=extra))).published == 1
    assert (await published(stream, publication(layout, 1, version=7))).published == 7
    state, version, extra = newest(host)
    assert version == 7 and extra == {} and set(state["w"].view(np.uint8)) == {1}
    await stream.end()
    await host.freed()


async def test_changed_chunks_need_a_complete_publication_of_their_kind_before_them(host):
    layout = host.channel.layout
    whole = [("whole", {}), ("halved", {"bfloat16": True})]
    for kind, more in whole:
        other = {} if more else {"bfloat16": True}
        stream = Stream(RemoteWeights("ipc:///here").publish)
        await stream.ask(OPEN)
        await published(stream, publication(layout, 5, **more))
        await published(stream, publication(layout.only(["b"]), 1, only=["b"]))
        base = np.full(transfer_layout(layout, bfloat16=bool(more)).nbytes, 5, np.uint8)
        base[-1] = 9  # only the last chunk differs from it
        changed = publication(layout, 5, base, changed_only=True, **more)
        assert len(changed) == 3
        assert (await published(stream, changed)).published, f"a part between them changes nothing ({kind})"
        weights = newest(host)[0]["w"]
        assert weights[0] == weights[-1] != 0, "the chunks that were not sent are those of the publication before"
        refused = (await stream.ask(begin(layout, changed_only=True, **other))).refusal
        assert (refused.code, "before any complete publication" in refused.message) == (Code.MALFORMED, True)
        await stream.over()
        await host.freed()


async def test_a_refused_publication_is_no_base_for_changed_chunks(host):
    layout = host.channel.layout
    stream = Stream(RemoteWeights("ipc:///here").publish)
    await stream.ask(OPEN)
    await published(stream, publication(layout, 0))
    refused = (await published(stream, publication(layout, 1, version=1))).refusal
    assert "versions only grow" in refused.message
    assert (await published(stream, publication(layout, 2))).published == 2, "the stream goes on"
    await stream.end()


@pytest.mark.parametrize(
    ("wrong", "code", "says"),
    [
        (lambda _: OPEN, Code.MALFORMED, "unexpected message 'open'"),
        (lambda _: pb.PublishRequest(end=pb.EndPublication()), Code.MALFORMED, "unexpected message 'end'"),
        (lambda _: pb.PublishRequest(chunk=pb.WeightsChunk()), Code.MALFORMED, "unexpected message 'chunk'"),
        (lambda _: pb.PublishRequest(), Code.MALFORMED, "unexpected message None"),
        (lambda layout: begin(layout, only=["nothing"]), Code.MALFORMED, "tensors that the channel's layout does not"),
        (lambda layout: begin(layout, only=["w", "b", "b"]), Code.MALFORMED, "tensors that the channel's layout does"),
        (lambda layout: begin(layout.only(["b"])), Code.MALFORMED, "is not the channel's"),
        (
            lambda layout: begin(layout, extra=bytes(1 << 20)),
            Code.TOO_LARGE,
            "extra takes 1048576 bytes, there is room",
        ),
        (lambda layout: begin(layout, changed_only=True), Code.MALFORMED, "before any complete publication"),
    ],
)
async def test_a_message_out_of_order_is_named_and_ends_the_stream(host, wrong, code, says):
    stream = Stream(RemoteWeights("ipc:///here").publish)
    await stream.ask(OPEN)
    refused = (await stream.ask(wrong(host.channel.layout))).refusal
    assert refused.code == code and says in refused.message
    await stream.over()
    await host.freed()
    assert host.channel.newest == 0


async def test_a_publication_within_a_publication_ends_the_stream(host):
    stream, layout = Stream(RemoteWeights("ipc:///here").publish), host.channel.layout
    await stream.ask(OPEN)
    stream.send(begin(layout))
    assert "unexpected message 'begin'" in (await stream.ask(begin(layout))).refusal.message
    await stream.over()


@pytest.mark.parametrize(
    ("first", "says"),
    [
        (pb.PublishRequest(end=pb.EndPublication()), "expected 'open' as the first message"),
        (pb.PublishRequest(open=pb.OpenPublisher(model="other")), "no model 'other'"),
        (pb.PublishRequest(open=pb.OpenPublisher(model="m" * 1000)), "a model's name has at most"),
    ],
)
async def test_a_publisher_that_cannot_open_leaves_nothing_open(host, first, says):
    stream = Stream(RemoteWeights("ipc:///here").publish)
    assert says in (await stream.ask(first)).refusal.message
    await stream.over()
    assert host.open == 0


async def test_weights_of_exactly_the_most_are_accepted_and_larger_ones_are_not(host):
    size = host.channel.layout.nbytes
    stream = Stream(RemoteWeights("ipc:///here", most_bytes=size).publish)
    assert (await stream.ask(OPEN)).opened.chunk_bytes
    await stream.end()
    await host.freed()
    stream = Stream(RemoteWeights("ipc:///here", most_bytes=size - 1).publish)
    refused = (await stream.ask(OPEN)).refusal
    assert (refused.code, f"at most {size - 1}" in refused.message) == (Code.TOO_LARGE, True)
    await stream.over()
    assert host.open == 0


@pytest.mark.parametrize("method", ["publish", "read"])
async def test_streams_end_that_say_nothing_and_leave_room_for_others(host, method):
    service = RemoteWeights("ipc:///here", stall=0.02, most_streams=1)
    await Stream(getattr(service, method)).over()
    service = RemoteWeights("ipc:///here", most_streams=1)
    first, second = Stream(getattr(service, method)), Stream(getattr(service, method))
    waiting = asyncio.ensure_future(first.answer())
    await turns()
    with pytest.raises(
        RuntimeError, match=f"1 {'publish' if method == 'publish' else 'read'}ers of weights are connected"
    ):
        await second.answer()
    first.send(None)
    with pytest.raises(StopAsyncIteration):
        await waiting
    third = Stream(getattr(service, method))
    await third.end()


async def test_a_publication_that_stalls_ends_and_one_that_waits_for_the_next_does_not(host):
    stream, layout = Stream(RemoteWeights("ipc:///here", stall=0.01).publish), host.channel.layout
    await stream.ask(OPEN)
    await asyncio.sleep(0.04)
    assert (await published(stream, publication(layout, 0))).published == 1
    await asyncio.sleep(0.04)
    assert (await published(stream, publication(layout, 0))).published == 2
    stream.send(begin(layout))
    await stream.over()
    await host.freed()


async def received(stream, layout):
    """Return the weights that follow a head."""
    assembly = Assembly(np.zeros(layout.nbytes, np.uint8), gaps=False)
    while assembly.received < layout.nbytes:
        assembly.put(pb.ReadReply.FromString(await stream.answer()).chunk)
    return layout.views(assembly.flat)


async def test_readers_share_one_connection_until_the_last_one_leaves(host):
    service = RemoteWeights("ipc:///here")
    with Publisher(host.channel) as publisher:
        publisher.publish({"w": np.ones(400_000, np.float32), "b": np.ones(3, np.float32)}, extra={"epsilon": 0.5})
    one, other = Stream(service.read), Stream(service.read)
    heads = [(await stream.ask(pb.ReadRequest(model="m"))).head for stream in (one, other)]
    for stream, head in zip((one, other), heads, strict=True):
        assert (head.newest, head.version, head.max_lag) == (1, 1, 3)
        assert head.layout == host.channel.layout.to_json() and head.extra and head.age >= 0
        assert ((await received(stream, host.channel.layout))["w"] == 1).all()
    head = (await one.ask(pb.ReadRequest(model="m", newer_than=1))).head
    assert (head.newest, head.version, head.layout) == (1, 0, b""), "the layout is told once, and nothing is newer"
    head = (await one.ask(pb.ReadRequest(model="m", look=True))).head
    assert (head.newest, head.version) == (1, 0)
    assert host.connections == 1
    await one.end()
    await turns()
    assert host.open == 1
    assert (await other.ask(pb.ReadRequest(model="m", look=True))).head.newest == 1
    await other.end()
    await host.freed()
    again = Stream(service.read)
    assert (await again.ask(pb.ReadRequest(model="m", look=True))).head.newest == 1
    assert host.connections == 2
    await again.end()


async def test_a_reader_that_has_left_makes_room_for_one_other(host):
    service = RemoteWeights("ipc:///here", most_streams=1)
    for _ in range(2):
        one = Stream(service.read)
        assert (await one.ask(pb.ReadRequest(model="m", look=True))).head.newest == 0
        await one.answers.aclose()
    one, other = Stream(service.read), Stream(service.read)
    await one.ask(pb.ReadRequest(model="m", look=True))
    with pytest.raises(Exception, match="1 readers of weights are connected over gRPC, which is the maximum"):
        await other.ask(pb.ReadRequest(model="m", look=True))
    await one.answers.aclose()


async def test_a_reader_before_the_first_publication_is_told_and_may_ask_again(host):
    stream = Stream(RemoteWeights("ipc:///here").read)
    assert (await stream.ask(pb.ReadRequest(model="m", look=True))).head.newest == 0
    refused = (await stream.ask(pb.ReadRequest(model="m"))).refusal
    assert refused.code == Code.TIMEOUT and "nothing has been published yet" in refused.message
    with Publisher(host.channel) as publisher:
        publisher.publish({"w": np.ones(400_000, np.float32), "b": np.ones(3, np.float32)})
    assert (await stream.ask(pb.ReadRequest(model="m"))).head.version == 1
    await stream.answers.aclose()


async def test_readers_of_a_server_that_is_gone_end_and_the_next_one_connects_anew(host):
    service = RemoteWeights("ipc:///here")
    one, other = Stream(service.read), Stream(service.read)
    for stream in (one, other):
        await stream.ask(pb.ReadRequest(model="m", look=True))
    host.gone = ServerGone("the owner is gone")
    assert (await one.ask(pb.ReadRequest(model="m", look=True))).refusal.code == Code.SERVER_GONE
    await one.over()
    host.gone = None
    third = Stream(service.read)
    assert (await third.ask(pb.ReadRequest(model="m", look=True))).head.layout
    assert host.connections == 2
    await third.end()
    await other.end()
    await host.freed(2)


async def test_a_reader_whose_model_cannot_be_is_refused_and_ends(host):
    stream = Stream(RemoteWeights("ipc:///here").read)
    assert (await stream.ask(pb.ReadRequest(model="m" * 1000))).refusal.code == Code.MODEL_NOT_FOUND
    await stream.over()
    assert host.connections == 0


async def test_closed_doors_end_streams_between_publications_and_not_within_one(host):
    doors, layout = Doors(), host.channel.layout
    service = RemoteWeights("ipc:///here", doors=doors)
    idle, busy, reader = Stream(service.publish), Stream(service.publish), Stream(service.read)
    await reader.ask(pb.ReadRequest(model="m", look=True))
    await busy.ask(OPEN)
    messages = publication(layout, 0)
    for message in messages[:-1]:
        busy.send(message)
    waiting = [asyncio.ensure_future(stream.answer()) for stream in (busy, idle, reader)]
    while not busy.asked.empty():
        await turns()
    doors.close()
    for stream in waiting[1:]:
        with pytest.raises(Exception, match="the server is stopping"):
            await stream
    assert not waiting[0].done()
    busy.send(messages[-1])
    assert (await waiting[0]).published == 1
    with pytest.raises(Exception, match="the server is stopping"):
        await busy.answer()
