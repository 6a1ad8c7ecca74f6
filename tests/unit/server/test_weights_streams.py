"""Publishers of weights over gRPC whose streams are cancelled: no channel stays open, and none is closed in use."""

import asyncio
import threading

import pytest

from jurybox.protocol import remote_weights_pb2 as pb
from jurybox.server.gateway import remote_weights
from jurybox.server.gateway.remote_weights import RemoteWeights


class Slow:
    """A publisher that opens, or handles a message, when the test says so."""

    def __init__(self):
        self.go_on, self.begun, self.closed = threading.Event(), threading.Event(), threading.Event()

    def __call__(self, *_):
        self.begun.set()
        assert self.go_on.wait(10)
        return self

    def close(self):
        self.closed.set()


async def requests():
    yield pb.PublishRequest(open=pb.OpenPublisher(model="m"))
    await asyncio.sleep(60)


async def test_a_publisher_whose_stream_is_cancelled_during_its_opening_is_closed(monkeypatch):
    slow = Slow()
    monkeypatch.setattr(remote_weights, "_Publisher", slow)
    stream = asyncio.ensure_future(anext(RemoteWeights("ipc:///nowhere").publish(requests(), None)))
    await asyncio.to_thread(slow.begun.wait, 10)
    stream.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stream
    assert not slow.closed.is_set()
    slow.go_on.set()
    assert await asyncio.to_thread(slow.closed.wait, 10)


def test_a_publisher_is_not_closed_while_it_publishes():
    publisher = remote_weights._Publisher.__new__(remote_weights._Publisher)
    slow = Slow()
    publisher._server, publisher._turn = slow, threading.Lock()
    publisher._start, publisher.receiving = slow, False
    taking = threading.Thread(target=publisher.take, args=(pb.PublishRequest(begin=pb.BeginPublication()),))
    closing = threading.Thread(target=publisher.close)
    taking.start()
    assert slow.begun.wait(10)
    closing.start()
    assert not slow.closed.wait(0.2)
    slow.go_on.set()
    assert slow.closed.wait(10)
    taking.join(10)
    closing.join(10)


async def test_a_stream_ends_if_a_message_is_not_received_in_time_and_not_because_one_was(monkeypatch):
    loop, timers = asyncio.get_running_loop(), []
    later = loop.call_later
    monkeypatch.setattr(loop, "call_later", lambda *given: timers.append(later(*given)) or timers[-1])
    with RemoteWeights("ipc:///nowhere", stall=600.0)._stalling():
        assert len(timers) == 1 and not timers[0].cancelled()
    assert timers[0].cancelled(), "received: the stream may go on as long as it likes"
    with pytest.raises(asyncio.CancelledError):
        with RemoteWeights("ipc:///nowhere", stall=0.01)._stalling():
            await asyncio.sleep(60)
