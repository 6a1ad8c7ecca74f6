"""The ends of a stream of weights over gRPC, and what they make of a gateway's words; the gateway is scripted."""

from __future__ import annotations

import numpy as np
import pytest
from tests.clocks import Clock, given

pytest.importorskip("grpc")
from jurybox.client.remote import weights
from jurybox.client.remote.weights import RemotePublisher, RemoteWeightsReader
from jurybox.protocol import remote_weights_pb2 as pb
from jurybox.protocol.errors import (
    Busy,
    Code,
    Error,
    ModelNotFound,
    ProtocolMismatch,
    Refused,
    ServerGone,
    SpecMismatch,
    Timeout,
)
from jurybox.protocol.weights import WeightsLayout
from jurybox.protocol.weights.channel import encode_extra
from jurybox.protocol.weights.transfer import chunks

STATE = {"w": np.arange(4, dtype=np.float32), "n": np.array(7, np.int64)}
LAYOUT = WeightsLayout.of(STATE)


def flat_of(state):
    flat = np.zeros(LAYOUT.nbytes, np.uint8)
    for name, view in LAYOUT.views(flat).items():
        view[...] = state[name]
    return flat


def opened(newest=5, extra=1000):
    return pb.PublishReply(opened=pb.Opened(layout=LAYOUT.to_json(), newest=newest, extra_bytes=extra))


def published(version):
    return pb.PublishReply(published=version)


def head(newest=3, version=0, *, first=False, **more):
    layout = {"layout": LAYOUT.to_json(), "max_lag": 9} if first else {}
    return pb.ReadReply(head=pb.WeightsHead(newest=newest, version=version, **layout, **more))


def chunk_of(state):
    (chunk,) = chunks(flat_of(state))
    return pb.ReadReply(chunk=chunk)


class Stream:
    """A stream to the gateway of a test."""

    def __init__(self, gateway, metadata):
        self.gateway, self.metadata, self.alive, self.refused, self.sent = gateway, metadata, True, False, []

    def send(self, request, until=None):
        self.refused = False
        self.sent.append(request)
        self.gateway.untils.append(until)

    def receive(self, until=None):
        reply = self.gateway.replies.pop(0)
        if callable(reply):
            reply = reply()
        if isinstance(reply, BaseException):
            self.refused = isinstance(reply, Error) and reply.code in self.gateway.refusals
            raise reply
        return reply

    def close(self):
        self.alive = False


class Gateway(Clock):
    """Answers with what `replies` has, on any stream; time passes only while somebody sleeps."""

    def __init__(self):
        super().__init__()
        self.streams, self.replies, self.untils = [], [], []
        self.refusals = (Code.REFUSED, Code.SPEC_MISMATCH, Code.TIMEOUT)

    def open(self, channel, method, message, metadata, timeout):
        self.streams.append(Stream(self, metadata))
        return self.streams[-1]

    @property
    def parts(self):
        """What was sent on the last stream."""
        return [request.WhichOneof("part") for request in self.streams[-1].sent]


@pytest.fixture
def gateway(monkeypatch):
    made = given(Gateway(), monkeypatch, weights)
    monkeypatch.setattr(weights, "RemoteStream", made.open)
    return made


@pytest.fixture
def publisher(gateway):
    gateway.replies = [opened()]
    return RemotePublisher(None, "m", metadata=(("a", "b"),))


@pytest.fixture
def reader(gateway):
    gateway.replies = [head(first=True)]
    return RemoteWeightsReader(None, "m", metadata=(("a", "b"),))


def test_a_publication_is_begun_sent_and_ended(gateway, publisher):
    assert publisher.version == 5 and publisher.layout.hash == LAYOUT.hash and publisher.sent_bytes == 0
    gateway.replies = [published(6)]
    assert publisher.publish(STATE, {"why": 1}, check_finite=True) == publisher.version == 6
    open_, begin, chunk, end = gateway.streams[0].sent
    assert open_.open.model == "m" and gateway.streams[0].metadata == (("a", "b"),)
    begun = begin.begin
    assert begun.layout_hash.hex() == LAYOUT.hash and begun.extra == encode_extra({"why": 1}) and begun.check_finite
    assert (begun.version, begun.changed_only, begun.bfloat16, list(begun.only)) == (0, False, False, [])
    assert chunk.chunk.data == flat_of(STATE).tobytes() and end.end.bytes == len(chunk.chunk.data)
    assert publisher.sent_bytes == len(chunk.chunk.data)


@pytest.mark.parametrize("version", [0, -1, 2**63])
def test_a_version_that_none_can_have_is_refused_before_anything_is_sent(gateway, publisher, version):
    with pytest.raises(Refused, match=f"^version {version} was to be published: expected 1 to 2"):
        publisher.publish(STATE, version=version)
    assert gateway.parts == ["open"]
    for able in (1, 2**63 - 1):
        gateway.replies = [published(able)]
        assert publisher.publish(STATE, version=able) == able
        assert gateway.streams[0].sent[-3].begin.version == able


def test_an_extra_has_as_many_bytes_as_the_channel_and_no_more(gateway):
    room, more = (len(encode_extra({"a": "x" * n})) for n in (30, 40))
    gateway.replies = [opened(extra=room), published(6)]
    publisher = RemotePublisher(None, "m")
    publisher.publish(STATE, {"a": "x" * 30})
    sent = len(gateway.streams[0].sent)
    with pytest.raises(SpecMismatch, match=f"extra takes {more} bytes, .* of 'm' has room for {room}"):
        publisher.publish(STATE, {"a": "x" * 40})
    assert len(gateway.streams[0].sent) == sent


def test_only_what_changed_since_the_last_complete_publication_of_a_stream_is_sent(gateway):
    gateway.replies = [opened(), *map(published, range(6, 20))]
    publisher = RemotePublisher(None, "m", changed_only=True)
    size = LAYOUT.nbytes
    for state, partial, changed, chunked in (
        (STATE, False, False, True),
        (STATE, False, True, False),
        ({"n": np.array(8, np.int64)}, True, False, True),
        (STATE, False, True, False),
    ):
        before = publisher.sent_bytes
        publisher.publish(state, partial=partial)
        begin = next(each.begin for each in reversed(gateway.streams[0].sent) if each.WhichOneof("part") == "begin")
        assert begin.changed_only == changed and list(begin.only) == (["n"] if partial else [])
        assert publisher.sent_bytes - before == (LAYOUT.only(["n"]).nbytes if partial else size if chunked else 0)
    gateway.replies.insert(0, Refused("not finite"))
    with pytest.raises(Refused):
        publisher.publish(STATE)
    publisher.publish(STATE)
    assert not gateway.streams[0].sent[-3].begin.changed_only, "what the gateway has is unknown after a refusal"
    gateway.streams[0].close()
    gateway.replies.insert(0, opened())
    publisher.publish(STATE)
    assert len(gateway.streams) == 2 and not gateway.streams[1].sent[1].begin.changed_only


@pytest.mark.parametrize(
    ("error", "stays"),
    [
        (Refused("not finite"), True),
        (SpecMismatch("another layout"), True),
        (Refused("no", Code.NOT_READY), False),
        (Timeout("late"), False),
        (ServerGone("gone"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_a_stream_stays_open_after_a_refusal_and_after_nothing_else_that_ends_a_publication(
    gateway, publisher, error, stays
):
    gateway.replies = [error]
    with pytest.raises(type(error)):
        publisher.publish(STATE)
    assert gateway.streams[0].alive == stays and publisher.version == 5 and publisher.sent_bytes == 0
    gateway.replies = [published(6)] if stays else [opened(5), published(6)]
    assert publisher.publish(STATE) == 6 and len(gateway.streams) == (1 if stays else 2)


@pytest.mark.parametrize("error", [ServerGone("gone"), Refused("another publisher")])
def test_a_publisher_waits_for_its_gateway_some_seconds_and_raises_its_last_words(gateway, publisher, error):
    gateway.streams[0].close()
    gateway.replies = [error] * 3 + [opened(), published(6)]
    assert publisher.publish(STATE) == 6 and gateway.slept == [0.1] * 3
    assert [stream.alive for stream in gateway.streams] == [False] * 4 + [True], "those that were refused are closed"
    gateway.streams[-1].close()
    gateway.slept.clear()
    gateway.replies = [error] * 100
    with pytest.raises(type(error)):
        publisher.publish(STATE)
    assert sum(gateway.slept) == pytest.approx(5.0, abs=0.15)


@pytest.mark.parametrize("error", [ModelNotFound("no such model"), Refused("bye", Code.NOT_READY), Busy("full")])
def test_a_publisher_does_not_wait_for_what_does_not_pass(gateway, publisher, error):
    gateway.streams[0].close()
    gateway.replies = [error, opened()]
    with pytest.raises(type(error)):
        publisher.publish(STATE)
    assert not gateway.slept and not gateway.streams[-1].alive


def test_a_publisher_of_little_patience_waits_no_longer_than_that(gateway):
    gateway.replies = [opened()]
    publisher = RemotePublisher(None, "m", timeout=1.0)
    gateway.streams[0].close()
    gateway.replies = [ServerGone("gone")] * 100
    with pytest.raises(ServerGone):
        publisher.publish(STATE)
    assert sum(gateway.slept) == pytest.approx(1.0, abs=0.15)


def test_a_part_is_added_only_to_the_version_that_this_publisher_left(gateway, publisher):
    part = {"n": np.array(8, np.int64)}
    gateway.streams[-1].close()
    gateway.replies = [opened(5), published(6)]
    assert publisher.publish(part, partial=True) == 6
    gateway.streams[-1].close()
    gateway.replies = [opened(7)]
    for _ in range(2):
        with pytest.raises(Refused, match="the server has version 7, which may have other tensors"):
            publisher.publish(part, partial=True)
    gateway.streams[-1].close()
    gateway.replies = [opened(7)]
    with pytest.raises(Refused, match="publish all of them first"):
        publisher.publish(part, partial=True)
    gateway.replies = [published(8), published(9)]
    publisher.publish(STATE)
    assert publisher.publish(part, partial=True) == 9


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"other": np.zeros(1)}, "have no tensor 'other'"),
        ({"w": np.zeros(3, np.float32)}, "don't fit weights channel m"),
    ],
)
def test_tensors_that_are_no_part_of_the_model_are_refused_with_the_difference(gateway, publisher, wrong, told):
    with pytest.raises(SpecMismatch, match="without a tensor"):
        publisher.publish({}, partial=True)
    with pytest.raises(SpecMismatch, match=told):
        publisher.publish(wrong, partial=True)
    with pytest.raises(SpecMismatch, match="don't fit weights channel m"):
        publisher.publish(wrong)
    assert gateway.parts == ["open"]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda torch, w: w.reshape(2, 2),
        lambda torch, w: w.double(),
        lambda torch, w: np.zeros(4, np.float64),
        lambda torch, w: np.zeros((2, 2), np.float32),
    ],
)
def test_a_tensor_is_sent_in_any_order_of_its_memory_if_its_shape_and_dtype_are_the_models(gateway, publisher, spoil):
    torch = pytest.importorskip("torch")
    strided = torch.arange(8, dtype=torch.float32, requires_grad=True)[::2]
    gateway.replies = [published(6)]
    publisher.publish({"w": strided, "n": torch.tensor(3)})
    sent = gateway.streams[0].sent[-2].chunk.data
    assert sent == flat_of({"w": [0, 2, 4, 6], "n": 3}).tobytes()
    with pytest.raises(SpecMismatch):
        publisher.publish({"w": spoil(torch, strided.detach()), "n": torch.tensor(3)})
    assert gateway.parts == ["open", "begin", "chunk", "end"]


def test_bfloat16_takes_half_the_bytes_of_floats_and_leaves_whole_numbers(gateway):
    gateway.replies = [opened(), published(6)]
    publisher = RemotePublisher(None, "m", bfloat16=True)
    publisher.publish(STATE)
    begin, chunk = gateway.streams[0].sent[1:3]
    assert begin.begin.bfloat16 and begin.begin.layout_hash.hex() != LAYOUT.hash
    assert np.frombuffer((np.arange(4, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)).tobytes() in (
        chunk.chunk.data
    )


def test_a_publisher_that_is_closed_within_its_publication_is_closed_at_its_end(gateway, publisher):
    def close():
        publisher.close()
        assert gateway.streams[0].alive, "the publication is under way"
        return published(6)

    gateway.replies = [close]
    assert publisher.publish(STATE) == 6 and not gateway.streams[0].alive
    with pytest.raises(Refused, match="this publisher of 'm' was closed; make another one"):
        publisher.publish(STATE)
    assert len(gateway.streams) == 1


def test_a_publisher_publishes_nothing_within_its_own_publication(gateway, publisher):
    def nested():
        with pytest.raises(Refused, match="a transfer of the weights of 'm' is under way in this thread"):
            publisher.publish(STATE)
        return published(6)

    gateway.replies = [nested]
    assert publisher.publish(STATE) == 6 and gateway.parts == ["open", "begin", "chunk", "end"]


def test_a_publisher_that_cannot_open_leaves_no_stream(gateway):
    gateway.replies = [Refused("another publisher")]
    with pytest.raises(Refused, match="another publisher"):
        RemotePublisher(None, "m")
    assert not gateway.streams[0].alive and not gateway.slept


# ---- readers


def test_a_reader_reads_the_newest_weights_in_new_arrays(gateway, reader):
    assert (reader.max_lag, reader.layout.hash, reader.age_seconds) == (9, LAYOUT.hash, 0.0)
    gateway.replies = [head(4, 4, extra=encode_extra({"why": 1}), age=2.5), chunk_of(STATE)]
    state, version, extra = reader.read()
    assert version == 4 and extra == {"why": 1} and reader.age_seconds == 2.5
    assert all((state[name] == STATE[name]).all() for name in STATE)
    assert [(each.model, each.look) for each in gateway.streams[0].sent] == [("m", True), ("m", False)]
    gateway.replies = [head(4), head(4), head(4)]
    assert reader.newest == 4 and reader.newer_than(3) and not reader.newer_than(4)
    assert gateway.streams[0].metadata == (("a", "b"),) and len(gateway.streams) == 1 and reader.max_lag == 9
    reader.close()
    assert not gateway.streams[0].alive
    with pytest.raises(Refused, match="this reader of 'm' was closed: take another one"):
        reader.read()


@pytest.mark.parametrize(
    ("replies", "told"),
    [
        ([chunk_of(STATE)], "answered with 'chunk', expected 'head'"),
        ([head(0, 0)], "the gateway answered without weights of 'm'"),
    ],
)
def test_an_answer_out_of_turn_ends_the_stream_and_the_next_call_opens_another(gateway, reader, replies, told):
    gateway.replies = replies
    with pytest.raises(ProtocolMismatch, match=told):
        reader.read()
    assert not gateway.streams[0].alive
    gateway.replies = [head(4, first=True)]
    assert reader.newest == 4 and len(gateway.streams) == 2


def test_a_reader_keeps_its_stream_after_a_refusal(gateway, reader):
    gateway.replies = [Refused("no"), head(4)]
    with pytest.raises(Refused, match="no"):
        reader.read()
    assert reader.newest == 4 and len(gateway.streams) == 1


def test_a_reader_waits_for_a_first_publication_only_if_it_has_a_time_for_it(gateway, reader):
    gateway.replies = [Timeout("nothing has been published")]
    with pytest.raises(Timeout):
        reader.read()
    assert not gateway.slept and gateway.untils[-1] is None
    gateway.replies = [Timeout("nothing has been published")] * 2 + [head(1, 1), chunk_of(STATE)]
    assert reader.read(timeout=1.0).version == 1 and gateway.slept == [0.1] * 2
    assert gateway.untils[-1] == pytest.approx(101.0)
    gateway.slept.clear()
    gateway.replies = [Timeout("nothing has been published")] * 100
    with pytest.raises(Timeout):
        reader.read(timeout=1.0)
    assert 0.85 < sum(gateway.slept) < 1.05


@pytest.mark.parametrize(("timeout", "waits"), [(None, 5.0), (2.0, 2.0)])
def test_a_reader_waits_some_seconds_for_a_gateway_that_is_being_restarted(gateway, reader, timeout, waits):
    gateway.replies = [ServerGone("gone")] * 2 + [head(4, 4, first=True), chunk_of(STATE)]
    assert reader.read(timeout=timeout).version == 4 and gateway.slept == [0.1] * 2
    assert [stream.alive for stream in gateway.streams] == [False] * 2 + [True]
    gateway.slept.clear()
    gateway.replies = [ServerGone("gone")] * 100
    with pytest.raises(ServerGone):
        reader.read(timeout=timeout)
    assert waits - 0.15 < sum(gateway.slept) < waits + 0.05


def test_a_new_reader_does_not_wait_for_a_gateway(gateway):
    gateway.replies = [ServerGone("gone")] * 2
    with pytest.raises(ServerGone):
        RemoteWeightsReader(None, "m")
    assert not gateway.slept and not gateway.streams[0].alive and len(gateway.replies) == 1
    gateway.replies = [Busy("full")]
    with pytest.raises(Busy):
        RemoteWeightsReader(None, "m")
    assert not gateway.streams[1].alive


def test_a_reader_that_another_thread_closes_says_so_and_does_not_ask_again(gateway, reader):
    def close():
        reader.close()
        return ServerGone("gone")

    gateway.replies = [close]
    with pytest.raises(Refused, match="this reader of 'm' was closed"):
        reader.read()
    assert not gateway.slept and len(gateway.streams) == 1


def test_a_reader_that_is_closed_while_its_stream_opens_leaves_none_open(gateway, reader, monkeypatch):
    gateway.streams[0].close()
    opens = gateway.open

    def closing(*arguments):
        stream = opens(*arguments)
        reader.close()
        return stream

    monkeypatch.setattr(weights, "RemoteStream", closing)
    gateway.replies = [ServerGone("it was closed")]
    with pytest.raises(Refused, match="this reader of 'm' was closed"):
        reader.read()
    assert len(gateway.streams) == 2 and not gateway.streams[1].alive
