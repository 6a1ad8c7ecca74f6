"""Remote learners and actors: weights over gRPC are published like a local learner's, whole or not at all."""

import contextlib
import gc
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from tests.forking import EndedEarly, in_a_child
from tests.serving import serving, wait_until

from jurybox.client import Busy, ModelNotFound, Refused, ServerGone, SpecMismatch, Timeout
from jurybox.protocol.errors import Code, Error, ProtocolMismatch
from jurybox.protocol.weights import WeightsLayout
from tests import preloaded

grpc = pytest.importorskip("grpc")
from jurybox.client.remote.weights import RemotePublisher, RemoteWeightsReader, _host_array  # noqa: E402
from jurybox.protocol.remote_weights_pb2 import BeginPublication, PublishRequest, ReadReply, ReadRequest  # noqa: E402
from jurybox.protocol.weights.transfer import READ, chunks  # noqa: E402

X = np.ones((2, 4), np.float32)
BACK_SOON = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 500)]


def affine(version):
    return {"scale": np.array(version, np.float32), "offset": np.array(1000 * version, np.float32)}


@contextmanager
def gateway(address, most_bytes=1 << 30, stall=1.0, most_streams=64):
    process, port = start_gateway(address, most_bytes, stall, most_streams)
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}", BACK_SOON) as channel:
            yield process, channel
    finally:
        process.kill()
        process.wait()


def start_gateway(address, most_bytes=1 << 30, stall=1.0, most_streams=64, port=0):
    told, tells = os.pipe()
    arguments = (address, most_bytes, stall, most_streams, port)
    process = preloaded.program("tests.integration.remote_weights_gateway", arguments, tells, 2)
    os.close(tells)
    with os.fdopen(told) as lines:
        return process, int(lines.readline())


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    big = {"factory": "tests.models:big", "publish": "double_buffer"}
    models = {
        "policy": {"factory": "tests.models:affine", "publish": "double_buffer", "max_lag": 3},
        "big": {**big, "max_batch": 1, "rows": 2, "lane_rows": 1},
    }
    models["fixed"] = {"factory": "tests.models:affine"}
    models |= {name: {"factory": "tests.models:affine", "publish": "double_buffer"} for name in ("unseen", "silent")}
    with serving(tmp_path_factory.mktemp("server"), models) as running:
        yield running


@pytest.fixture(scope="module")
def remote(server):
    with gateway(server.address) as (_, channel):
        yield channel


@pytest.fixture
def client(server):
    with server.connect() as connection:
        yield connection


def test_a_remote_publication_answers_the_next_requests(remote, client):
    model = client.model("policy")
    with RemotePublisher(remote, "policy") as publisher:
        for _ in range(3):
            version = publisher.publish(affine(publisher.version + 1), extra={"epsilon": 0.5, "mean": np.arange(3.0)})
            wait_until(lambda: model.infer_reply(X).version == version)  # noqa: B023
            assert (model.infer(X) == version * X + 1000 * version).all()
    state, version, extra = client.weights("policy").read()
    assert version == publisher.version and extra["epsilon"] == 0.5 and (extra["mean"] == np.arange(3.0)).all()
    with RemoteWeightsReader(remote, "policy") as reader:
        remote_state, seen, extra = reader.read()
        assert (reader.newest, reader.max_lag, seen) == (version, 3, version)
        assert reader.newer_than(version - 1) and not reader.newer_than(version)
        assert all((remote_state[name] == state[name]).all() for name in state) and extra["epsilon"] == 0.5


@pytest.mark.parametrize("bfloat16", [False, True])
def test_arrays_of_the_other_byte_order_are_published_as_their_numbers(remote, client, bfloat16):
    wait_until(lambda: freed(client, "policy"), what="the publisher slot")
    with RemotePublisher(remote, "policy", bfloat16=bfloat16) as publisher:
        publisher.publish({name: array.astype(">f4") for name, array in affine(2.0).items()})
    state = client.weights("policy").read().state
    assert (float(state["scale"]), float(state["offset"])) == (2.0, 2000.0)


def test_a_bfloat16_array_of_an_extension_of_numpy_is_sent_as_its_bits():
    bfloat16 = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed").bfloat16
    given = np.array([1.5, -2.0], bfloat16)
    place = WeightsLayout([("weight", "bfloat16", (2,))]).places["weight"]
    sent = _host_array(given, place)
    assert sent.dtype == place.stored and sent.tobytes() == given.tobytes()


def test_there_is_one_publisher_local_or_remote(remote, client):
    with RemotePublisher(remote, "policy"):
        with pytest.raises(Refused, match="one at a time"):
            client.publisher("policy")
        with pytest.raises(Refused, match="one at a time"):
            RemotePublisher(remote, "policy")
    wait_until(lambda: freed(client, "policy"), what="the publisher slot")
    with client.publisher("policy"), pytest.raises(Refused, match="one at a time"):
        RemotePublisher(remote, "policy")


def freed(client, name):
    try:
        client.publisher(name).close()
    except Refused:
        return False
    return True


def test_large_weights_are_sent_exactly_or_halved_or_only_changes(remote, client):
    torch = pytest.importorskip("torch")
    layout = client.weights("big").layout
    rng = np.random.default_rng(0)
    state = {name: rng.normal(size=place.shape).astype(np.float32) for name, place in layout.places.items()}
    module = {name: torch.from_numpy(array.copy()) for name, array in state.items()}
    reader = client.weights("big")
    with RemotePublisher(remote, "big", changed_only=True) as publisher:
        publisher.publish(module)
        whole = publisher.sent_bytes
        assert whole == layout.nbytes > 8 << 20
        module["weight"][0, 0] += 1
        publisher.publish(module)
        assert publisher.sent_bytes - whole == 1 << 20
        np.testing.assert_array_equal(reader.read().state["weight"], module["weight"].numpy())
        with pytest.raises(Refused, match="NaN"):
            publisher.publish({**module, "bias": module["bias"] * torch.nan}, check_finite=True)
        publisher.publish(module)
        np.testing.assert_array_equal(reader.read().state["bias"], module["bias"].numpy())
    wait_until(lambda: freed(client, "big"), what="the publisher slot")
    with RemotePublisher(remote, "big", bfloat16=True) as publisher:
        publisher.publish(state)
        assert publisher.sent_bytes < 0.51 * layout.nbytes
    read = reader.read().state["weight"]
    np.testing.assert_array_equal(read, torch.from_numpy(state["weight"]).bfloat16().float().numpy())


def test_weights_that_do_not_fit_are_refused_like_a_local_learners(remote, client):
    with pytest.raises(ModelNotFound, match="there are"):
        RemotePublisher(remote, "nothing")
    with pytest.raises(Refused, match="takes no publications"):
        RemotePublisher(remote, "fixed")
    with RemotePublisher(remote, "policy") as publisher:
        with pytest.raises(SpecMismatch, match=r"'scale': expected float32\[\], got float32\[2\]"):
            publisher.publish({**affine(1), "scale": np.zeros(2, np.float32)})
        with pytest.raises(SpecMismatch, match="room for"):
            publisher.publish(affine(1), extra={"much": np.zeros(100_000)})
        version = publisher.publish(affine(1))
        with pytest.raises(Refused, match="versions only grow"):
            publisher.publish(affine(1), version=version)
        assert publisher.publish(affine(9), version=publisher.version + 5) == client.weights("policy").newest


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        (lambda part: setattr(part, "crc", part.crc ^ 1), Code.MALFORMED),
        (lambda part: setattr(part, "offset", 1 << 40), Code.TOO_LARGE),
    ],
)
def test_a_damaged_publication_is_not_published_and_the_next_one_is(remote, client, monkeypatch, spoil, code):
    def spoiled(flat, base=None):
        for part in chunks(flat, base):
            spoil(part)
            yield part

    with RemotePublisher(remote, "policy") as publisher:
        before = client.weights("policy").newest
        monkeypatch.setattr("jurybox.client.remote.weights.chunks", spoiled)
        with pytest.raises(Error) as caught:
            publisher.publish(affine(1))
        assert caught.value.code == code
        assert client.weights("policy").newest == before
        monkeypatch.undo()
        wait_until(lambda: freed(client, "policy"), what="the publisher slot")
        assert publisher.publish(affine(2)) == before + 1


def test_another_layouts_publication_is_refused_by_the_server_too(remote, client):
    with RemotePublisher(remote, "policy") as publisher:
        publisher._stream.send(PublishRequest(begin=BeginPublication(layout_hash=bytes(32))))
        with pytest.raises(Error, match="is not the channel's"):
            publisher._stream.receive()


def test_an_interrupted_stream_publishes_nothing_and_frees_the_publisher_slot(remote, client):
    reader = client.weights("big")
    before = reader.newest
    for close in (True, False):
        publisher = RemotePublisher(remote, "big")
        begin = BeginPublication(layout_hash=bytes.fromhex(publisher.layout.hash))
        publisher._stream.send(PublishRequest(begin=begin))
        parts = chunks(np.zeros(publisher.layout.nbytes, np.uint8))
        for _ in range(3):
            publisher._stream.send(PublishRequest(chunk=next(parts)))
        if close:
            publisher.close()  # otherwise it stalls, and the gateway ends it
        wait_until(lambda: freed(client, "big"), 30, "the publisher slot")
        assert reader.newest == before
        publisher.close()


def test_a_learner_may_take_any_time_between_publications(remote, client):
    with RemotePublisher(remote, "policy") as publisher:
        first, stream = publisher.publish(affine(1)), publisher._stream
        time.sleep(2.5)  # more than the gateway waits for the rest of one
        assert publisher.publish(affine(2)) == first + 1 and publisher._stream is stream
    wait_until(lambda: freed(client, "policy"), 30, "the publisher slot")


def test_a_killed_gateway_is_an_error_and_the_next_gateway_takes_publications(server, client):
    with gateway(server.address) as (process, channel):
        publisher = RemotePublisher(channel, "unseen", timeout=10.0)
        assert publisher.publish(affine(1)) == 1
        reader = RemoteWeightsReader(channel, "unseen")
        process.kill()
        process.wait()
        with pytest.raises((ServerGone, Timeout)):
            publisher.publish(affine(2))
        with pytest.raises((ServerGone, Timeout)):
            reader.read()
        assert client.weights("unseen").newest == 1
        publisher.close()
        reader.close()
        with gateway(server.address) as (_, second), RemotePublisher(second, "unseen") as successor:
            assert successor.publish(affine(2)) == 2


def test_weights_too_large_for_a_gateway_are_refused_at_once(server):
    with gateway(server.address, most_bytes=1 << 20) as (_, channel), pytest.raises(Refused, match="at most 1048576"):
        RemotePublisher(channel, "big")


def newest_of(client, name="policy"):
    return client.weights(name).newest


def publish_next(client, name="policy"):
    """Publish something; return its version."""
    with client.publisher(name) as publisher:
        return publisher.publish(affine(publisher.version + 1))


def test_a_reader_that_timed_out_never_gets_an_earlier_answer(server, client):
    with gateway(server.address) as (process, channel), RemoteWeightsReader(channel, "policy", timeout=0.5) as reader:
        version = publish_next(client)
        assert reader.read(timeout=30).version == version
        for ask in (reader.read, lambda: reader.newest, lambda: reader.read(timeout=0.2)):
            os.kill(process.pid, signal.SIGSTOP)
            try:
                with pytest.raises((Timeout, ServerGone)):
                    ask()
            finally:
                os.kill(process.pid, signal.SIGCONT)
            version = publish_next(client)

            def knows(version=version):
                with contextlib.suppress(Timeout, ServerGone):  # it had half a second to answer
                    return reader.newest == version

            wait_until(knows, 60, "the gateway")
            state, seen, _ = reader.read(timeout=30)
            assert (seen, float(state["scale"])) == (version, float(client.weights("policy").read().state["scale"]))


def test_readers_and_publishers_continue_with_a_restarted_gateway(server, client):
    process, port = start_gateway(server.address)
    channel = grpc.insecure_channel(f"127.0.0.1:{port}", BACK_SOON)
    try:
        reader, publisher = RemoteWeightsReader(channel, "policy"), RemotePublisher(channel, "policy")
        for _ in range(2):
            version = publisher.publish(affine(publisher.version + 1))
            assert reader.read().version == version and reader.newer_than(version - 1)
            process.kill()
            process.wait()
            wait_until(lambda: not publisher._stream.alive and not reader._stream.alive, what="the streams' end")
            process, _ = start_gateway(server.address, port=port)
            assert reader.newest == version
        assert publisher.publish(affine(version + 1)) == version + 1 == reader.read().version
        reader.close()
        with pytest.raises(Refused, match="closed"):
            reader.read()
        late = RemoteWeightsReader(channel, "policy")
        channel.close()
        for ask in (late.read, lambda: publisher.publish(affine(1)), lambda: RemotePublisher(channel, "policy")):
            with pytest.raises((Refused, ServerGone)):
                ask()
    finally:
        channel.close()
        process.kill()
        process.wait()


def test_closing_a_reader_ends_a_waiting_read(server, client):
    publish_next(client)
    with gateway(server.address) as (process, channel):
        reader, errors = RemoteWeightsReader(channel, "policy"), []

        def read():
            try:
                reader.read(timeout=60)
            except Error as error:
                errors.append(error)

        os.kill(process.pid, signal.SIGSTOP)
        thread = threading.Thread(target=read)
        thread.start()
        wait_until(lambda: not reader._turn._lock.acquire(blocking=False) or reader._turn._lock.release())
        reader.close()
        thread.join(30)
        assert not thread.is_alive() and isinstance(errors[0], Refused)


def anonymous_mib(pid):
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(next(line.split()[1] for line in text.splitlines() if line.startswith("Anonymous:"))) / 1024


def open_unread(port_channel, model, stop, count):
    """Open streams that request weights and read none of them."""

    def requests():
        yield ReadRequest(model=model)
        stop.wait(60)

    call = port_channel.stream_stream(
        READ, request_serializer=ReadRequest.SerializeToString, response_deserializer=ReadReply.FromString
    )
    return [call(requests()) for _ in range(count)]


def test_unread_streams_take_the_memory_of_a_few(server, client):
    layout, stop, calls = client.weights("big").layout, threading.Event(), []
    size = layout.nbytes / 2**20
    with client.publisher("big") as publisher, gateway(server.address, stall=60.0) as (process, channel):
        publisher.publish(layout.views(np.ones(layout.nbytes, np.uint8)))
        with RemoteWeightsReader(channel, "big") as reader:
            reader.read()
        before = anonymous_mib(process.pid)
        for _ in range(8):
            calls += open_unread(channel, "big", stop, 6)
            for call in calls[-6:]:
                next(call)  # the head: its publication is being sent
            publisher.publish(layout.views(np.full(layout.nbytes, len(calls), np.uint8)))
        grown = anonymous_mib(process.pid) - before
        with RemoteWeightsReader(channel, "big") as reader:
            state, version, _ = reader.read()
            assert 0 < version <= publisher.version
            assert len(np.unique(np.concatenate([array.view(np.uint8).ravel() for array in state.values()]))) == 1
        for call in calls:
            call.cancel()
        stop.set()
        with RemoteWeightsReader(channel, "big") as reader:
            wait_until(lambda: reader.read().version == publisher.version, what="room for the newest")
        # 48 copies and 48 connections without sharing; with it five copies, and the data in transit.
        assert grown < 6 * size + 48 * 1.5, f"{grown:.0f} MiB for 48 streams of {size:.0f} MiB"


def test_streams_beyond_the_limit_are_refused_and_a_stalled_reader_is_dropped(server, client):
    publish_next(client, "policy")
    with client.publisher("big") as publisher:
        publisher.publish(publisher.channel.layout.views(np.ones(publisher.channel.layout.nbytes, np.uint8)))
    stop = threading.Event()
    # The first gateway never drops a reader, so the three stay however long this takes; the second one does.
    with gateway(server.address, stall=600.0, most_streams=3) as (_, channel):
        kept = [RemoteWeightsReader(channel, "policy") for _ in range(2)]
        (call,) = open_unread(channel, "big", stop, 1)
        next(call)
        with pytest.raises(Busy, match="3 readers of weights are connected"):
            RemoteWeightsReader(channel, "policy")
        assert publish_next(client) == kept[0].read().version, "the connected readers go on"
        with RemotePublisher(channel, "policy") as learner:
            learner.publish(affine(1))
        for reader in kept:
            reader.close()
    with gateway(server.address, stall=2.0, most_streams=2) as (_, channel):
        kept = [RemoteWeightsReader(channel, "policy")]
        (call,) = open_unread(channel, "big", stop, 1)
        next(call)

        def room():
            try:
                RemoteWeightsReader(channel, "policy").close()
            except Busy:
                return False
            return True

        wait_until(room, 90, "the end of the stalled reader")
        stop.set()
        kept[0].close()


def in_a_child_that_lives(work):
    """As `in_a_child`, but again if grpcio ends the child itself, as it may where its threads are at work."""
    for _ in range(20):
        with contextlib.suppress(EndedEarly):
            return in_a_child(work)
    raise AssertionError("grpcio ended twenty children in a row")


def test_a_forked_child_cannot_use_its_parents_streams(remote, client):
    with RemotePublisher(remote, "policy") as publisher, RemoteWeightsReader(remote, "policy") as reader:
        version = publisher.publish(affine(1))
        for work in (lambda: publisher.publish(affine(2)), reader.read, lambda: reader.newer_than(0)):
            with pytest.raises(Refused, match="fork"):
                in_a_child_that_lives(work)

        def leave():
            publisher.close()
            reader.close()

        in_a_child_that_lives(leave)
        assert newest_of(client) == version == reader.read().version
        assert publisher.publish(affine(3)) == version + 1


FORKED = """
import os, signal, sys
import grpc, numpy as np
from jurybox.client import Refused
from jurybox.client.remote.weights import RemotePublisher, RemoteWeightsReader, _host_array  # noqa: E402

signal.alarm(60)
channel = grpc.insecure_channel(sys.argv[1])
publisher, reader = RemotePublisher(channel, "policy"), RemoteWeightsReader(channel, "policy")
state = {"scale": np.array(1, np.float32), "offset": np.array(1, np.float32)}
publisher.publish(state)
if (pid := os.fork()) == 0:
    signal.alarm(30)
    try:
        publisher.publish(state)
    except Refused:
        sys.exit(7)  # through the interpreter's ordinary end
    sys.exit(8)
_, status = os.waitpid(pid, 0)
version = publisher.publish(state)
assert reader.read().version == version
print(os.waitstatus_to_exitcode(status))
"""


def test_a_forked_child_exits_normally(server, client):
    process, port = start_gateway(server.address)
    try:
        done = subprocess.run(
            [sys.executable, "-c", FORKED, f"127.0.0.1:{port}"], capture_output=True, text=True, timeout=90
        )
    finally:
        process.kill()
        process.wait()
    assert (done.returncode, done.stdout.strip()) == (0, "7"), done.stderr


def test_an_unreferenced_publisher_frees_its_slot(remote, client):
    publisher = RemotePublisher(remote, "policy")
    publisher.publish(affine(1))
    thread = publisher._stream._exchange.over
    del publisher
    RemoteWeightsReader(remote, "policy")
    gc.collect()
    wait_until(lambda: freed(client, "policy"), what="the publisher slot")
    wait_until(lambda: not thread.locked(), what="the thread's end")


def test_an_interrupted_publication_leaves_a_usable_publisher(remote, client, monkeypatch):
    def interrupted(flat, base=None):
        yield next(chunks(flat, base))
        raise KeyboardInterrupt

    with RemotePublisher(remote, "big") as publisher:
        before, state = newest_of(client, "big"), publisher.layout.views(np.ones(publisher.layout.nbytes, np.uint8))
        monkeypatch.setattr("jurybox.client.remote.weights.chunks", interrupted)
        with pytest.raises(KeyboardInterrupt):
            publisher.publish(state)
        monkeypatch.undo()
        assert newest_of(client, "big") == before
        assert publisher.publish(state) == before + 1


def test_an_unusable_version_or_extra_is_refused(remote, client):
    hostile = [b"\xff" * 9, struct.pack("<I", 60_000) + b"[" * 60_000]
    hostile += [struct.pack("<I", 44) + b'{"x": {"__array__": ["(((", [1], 0]}}'.ljust(44)]
    with RemotePublisher(remote, "policy") as publisher:
        before = publisher.publish(affine(1))
        for version in (2**63 - 1, 2**63, 2**64, before + 2**32 + 1, -1):
            with pytest.raises(Refused, match="version"):
                publisher.publish(affine(1), version=version)
        for extra in hostile:
            with pytest.raises(Error) as caught, pytest.MonkeyPatch.context() as patch:
                patch.setattr("jurybox.client.remote.weights.encode_extra", lambda _: extra)  # noqa: B023
                publisher.publish(affine(2))
            assert isinstance(caught.value, ProtocolMismatch), caught.value
        assert newest_of(client) == before
        assert publisher.publish(affine(2)) == before + 1


def scaled(answer):
    """The scale and the offset that computed an answer to X."""
    reply = answer.infer_reply(X)
    return reply.version, reply.outputs


@pytest.mark.parametrize("transfer", [{}, {"changed_only": True}, {"bfloat16": True}])
def test_a_part_from_elsewhere_is_added_to_the_newest_version(remote, client, transfer):
    model = client.model("policy")
    with RemotePublisher(remote, "policy", **transfer) as publisher, RemoteWeightsReader(remote, "policy") as reader:
        publisher.publish({"scale": np.array(2, np.float32), "offset": np.array(1, np.float32)})
        sent = publisher.sent_bytes
        version = publisher.publish({"offset": np.array(7, np.float32)}, {"why": "head"}, partial=True)
        assert publisher.sent_bytes - sent <= 64
        for read in (reader.read(), client.weights("policy").read()):
            assert (read.version, read.state["scale"], read.state["offset"]) == (version, 2, 7)
            assert read.extra == {"why": "head"}
        wait_until(lambda: scaled(model)[0] == version)
        assert (scaled(model)[1] == 2 * X + 7).all()
        for wrong in ({"nobody": np.zeros(1)}, {"offset": np.zeros(2, np.float32)}, {"offset": np.array(1.0)}, {}):
            with pytest.raises(SpecMismatch):
                publisher.publish(wrong, partial=True)
        # What "changed" refers to is this stream's last complete publication, not the part after it.
        publisher.publish({"scale": np.array(2, np.float32), "offset": np.array(1, np.float32)})
        assert reader.read().state["offset"] == 1
        publisher.publish({"scale": np.array(4, np.float32)}, partial=True)
        assert {name: float(value) for name, value in reader.read().state.items()} == {"scale": 4, "offset": 1}


def test_an_engine_that_starts_later_has_the_part_and_the_rest(tmp_path):
    models = {"policy": {"factory": "tests.models:affine", "publish": "double_buffer"}}
    with serving(tmp_path, models) as own, own.connect() as client, client.publisher("policy") as publisher:
        publisher.publish({"scale": np.array(3, np.float32), "offset": np.array(1, np.float32)})
        publisher.publish({"offset": np.array(5, np.float32)}, partial=True)
        os.kill(own.pids()["engine-0"], signal.SIGKILL)
        model = client.model("policy")
        wait_until(lambda: scaled(model)[0] == 2)
        assert (scaled(model)[1] == 3 * X + 5).all()


def test_a_part_is_not_added_to_another_servers_version_after_the_stream_broke(tmp_path):
    models = {"policy": {"factory": "tests.models:affine", "publish": "double_buffer"}}
    with serving(tmp_path, models) as own, gateway(own.address) as (_, channel):
        with RemotePublisher(channel, "policy") as publisher:
            whole = {"scale": np.array(3, np.float32), "offset": np.array(1, np.float32)}
            publisher.publish(whole)
            publisher._stream.close()
            publisher.publish({"offset": np.array(2, np.float32)}, partial=True)  # nobody has published since
            publisher._stream.close()
            with own.connect() as client:
                wait_until(lambda: freed(client, "policy"))
                with client.publisher("policy") as other:
                    other.publish({name: value * 10 for name, value in whole.items()})
            for _ in range(2):
                with pytest.raises(Refused, match=r"version 3, which may .*: publish all of them first"):
                    publisher.publish({"offset": np.array(4, np.float32)}, partial=True)
            publisher.publish(whole)
            assert publisher.publish({"offset": np.array(4, np.float32)}, partial=True) == 5


def test_a_read_waits_for_a_first_publication_until_its_time_out_or_the_servers_death(server, client):
    """This test is last because it ends the shared server."""
    with gateway(server.address) as (_, channel):
        reader = RemoteWeightsReader(channel, "silent")
        for options in ({}, {"timeout": 0.3}):
            # The second message, if the gateway itself was not scheduled for that long.
            with pytest.raises(Timeout, match="nothing has been published|did not answer"):
                reader.read(**options)
        later = threading.Timer(0.5, publish_next, (client, "silent"))
        later.start()
        assert reader.read(timeout=60).version == 1
        later.join()
        server.process.kill()
        server.process.wait()
        with pytest.raises(ServerGone):
            reader.read(timeout=60)
        reader.close()
