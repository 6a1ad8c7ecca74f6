"""Rows in device memory between real processes, on a fake device of files: protocol, order, lifetime, refusals."""

import base64
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from tests.serving import serving, wait_until, wait_until_computing

from jurybox.client import Refused, connect
from jurybox.protocol.control_pb2 import BindRequest, RegionPlace
from jurybox.protocol.device_memory import FAKE, HANDLE, driver
from jurybox.protocol.errors import Code

ROWS = np.arange(16, dtype=np.float32).reshape(4, 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of the fake device's memory, for this process and those that it starts."""
    path = tmp_path_factory.mktemp("device")
    before = os.environ.get(FAKE)
    os.environ[FAKE] = str(path)
    yield path
    del os.environ[FAKE]
    if before is not None:
        os.environ[FAKE] = before


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    models = {
        "affine": {"factory": "tests.models:affine", "rows": 64},
        "slow": {"factory": "tests.models:moody", "rows": 64},
        "two": {"factory": "tests.models:two", "rows": 64},
        "learnt": {"factory": "tests.models:affine", "rows": 64, "publish": "double_buffer"},
        "same": {"factory": "tests.models:affine", "rows": 64, "deterministic": True},
    }
    options = {"http": "127.0.0.1:0", "grpc": "127.0.0.1:0", "cuda_shared_memory": True}
    with serving(tmp_path_factory.mktemp("server"), models, factories=["tests.models:*"], **options) as running:
        yield running


@pytest.fixture
def client(server):
    with server.connect() as connection:
        yield connection


def engine(server):
    return server.pids()["engine-0"]


def mapped(server, folder):
    """Return how many pieces of the fake device's memory the engine has mapped."""
    text = Path(f"/proc/{engine(server)}/maps").read_text()
    return sum(str(folder) in line for line in text.splitlines())


def failures(client):
    """Return how many rows of the model "affine" have failed."""
    return next(model for model in client.status()["models"] if model["name"] == "affine")["failed"]


def test_rows_in_device_memory_are_read_and_answered_in_place(server, client, folder):
    with client.device_rows("affine", 4) as rows:
        assert mapped(server, folder) == 2  # rows and event
        rows.inputs["observation"][:] = ROWS
        rows.infer()
        np.testing.assert_array_equal(rows.outputs["action"], 2 * ROWS + 1)
        rows.inputs["observation"][:2] = 7
        rows.infer(2)
        np.testing.assert_array_equal(rows.outputs["action"][:2], np.full((2, 4), 15))
        np.testing.assert_array_equal(rows.outputs["action"][2:], (2 * ROWS + 1)[2:])
    assert mapped(server, folder) == 0 and not list(folder.iterdir())
    with pytest.raises(Refused, match="closed"):
        rows.infer()


def test_several_tensors_and_other_dtypes_have_their_places(client):
    with client.device_rows("two", 3) as rows:
        rng = np.random.default_rng(0)
        rows.inputs["image"][:] = images = rng.integers(0, 256, (3, 64, 64, 3), np.uint8)
        rows.inputs["scale"][:] = (1, 2, 3)
        rows.infer()
        np.testing.assert_allclose(rows.outputs["brightness"], images.mean(axis=(1, 2, 3)) * (1, 2, 3), rtol=1e-4)
        np.testing.assert_array_equal(rows.outputs["corner"], images[:, 0, 0, 0])


def test_rows_of_host_and_device_share_batches_and_answers_are_not_mixed_up(server, client):
    wrong, stop, rounds = [], threading.Event(), [0, 0, 0]

    def ask(number):
        with server.connect() as own:
            model = own.model("affine", rows=4) if number else None
            rows = own.device_rows("affine", 4) if model is None else None
            value = 0.0
            while not stop.is_set():
                value += 1
                sent = np.full((4, 4), number * 1000 + value, np.float32)
                if rows is not None:
                    rows.inputs["observation"][:] = sent
                    rows.outputs["action"][:] = -1
                    rows.infer(timeout=30)
                    answer = rows.outputs["action"].copy()
                else:
                    answer = model.infer(sent, timeout=30)
                if not (answer == 2 * sent + 1).all():
                    wrong.append((number, value, answer))
                rounds[number] += 1
            if rows is not None:
                rows.close()

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    wait_until(lambda: min(rounds) > 100, 60, "rounds of every thread")
    stop.set()
    for thread in threads:
        thread.join(30)
    assert not wrong


def test_the_engine_waits_for_the_clients_stream(client):
    with client.device_rows("affine", 4) as rows:
        device = rows._driver
        rows.inputs["observation"][:] = -1

        def render():
            wait_until_computing(client, "affine")  # the engine has the ticket, and waits
            rows.inputs["observation"][:] = ROWS  # the stream's work ends
            device.complete(rows._event)

        late = threading.Thread(target=render)
        late.start()
        rows.infer(stream=1, timeout=20)  # a stream whose work is not done when the ticket is sent
        np.testing.assert_array_equal(rows.outputs["action"], 2 * ROWS + 1)
        late.join()


CLIENT = """
import sys, numpy as np
from jurybox.client import connect
server = connect(sys.argv[1], timeout=60)
rows = server.device_rows("slow", 4)
rows.inputs["observation"][:] = 1_000_000.0 * float(sys.argv[2])
print("bound", flush=True)
rows.infer(timeout=60)
"""


def test_a_client_killed_in_flight_breaks_nothing_and_its_memory_is_unmapped(server, client, folder):
    process = subprocess.Popen([sys.executable, "-c", CLIENT, server.address, "1.5"], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout.readline() == "bound\n"
        wait_until(lambda: client.status()["engines"][0]["pid"] and mapped(server, folder) == 2, 20, "the binding")
        wait_until_computing(client, "slow")
        before = engine(server)
        process.kill()
    assert client.model("affine", rows=4).infer(ROWS, timeout=30)[0, 0] == 1
    wait_until(lambda: mapped(server, folder) == 0, 20, "the engine to unmap it")
    assert engine(server) == before  # it was not restarted
    for file in folder.iterdir():  # a driver frees a dead process's memory; files remain
        file.unlink()


def test_after_an_engine_died_the_next_one_reads_the_same_device_memory(server, client, folder):
    with client.device_rows("affine", 4) as rows:
        rows.inputs["observation"][:] = ROWS
        rows.infer()
        pid = engine(server)
        os.kill(pid, signal.SIGKILL)
        rows.inputs["observation"][:] = 3 * ROWS
        rows.outputs["action"][:] = -1
        rows.infer(timeout=60)
        np.testing.assert_array_equal(rows.outputs["action"], 6 * ROWS + 1)
        assert engine(server) != pid and mapped(server, folder) == 2


def test_memory_that_is_gone_before_the_next_engine_is_refused_and_not_replaced_by_the_arena(server, client, folder):
    with client.device_rows("affine", 4) as rows:
        rows.inputs["observation"][:] = ROWS
        rows.infer()
        names = [file.rename(file.with_suffix(".gone")) for file in folder.iterdir()]
        pid = engine(server)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(Exception, match="device memory of rows .* the memory of that handle is gone"):
            rows.infer(timeout=60)
        for name in names:
            name.rename(name.with_suffix(""))


def test_memory_in_flight_is_unmapped_only_after_its_batch(server, client, folder):
    rows = client.device_rows("slow", 1)
    rows.inputs["observation"][:] = 2_000_000.0  # a batch of two seconds
    done = threading.Thread(target=lambda: rows.infer(timeout=30))
    done.start()
    wait_until_computing(client, "slow")
    lane, lease = rows._rows._rows.leased
    client._open_link().bind(BindRequest(lane=lane, lease=lease, first=rows._rows._rows.first, end=True), 20.0)
    assert rows.outputs["action"][0, 0] == 2_000_001.0, "the call waited for the batch"
    assert mapped(server, folder) == 0
    done.join()
    rows.close()


def test_a_reloaded_model_reads_device_memory_and_one_that_cannot_refuses(client):
    with client.device_rows("affine", 4) as rows:
        rows.inputs["observation"][:] = ROWS
        client.load("affine")
        rows.infer()
        np.testing.assert_array_equal(rows.outputs["action"], 2 * ROWS + 1)
        client.load("affine", {"factory": "tests.models:affine", "rows": 64, "deterministic": True})
        with pytest.raises(Exception, match="reads no device memory any more"):
            rows.infer()
        client.load("affine", {"factory": "tests.models:affine", "rows": 64})
        rows.infer()


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_tickets_for_rows_of_others_reach_neither_their_device_memory_nor_unbound_rows(server, client, transport):
    """As a client with a fault would send them: past its own checks, for rows of its neighbours or bound in part."""
    with (
        connect(server.address, transport=transport, timeout=30) as mine,
        client.device_rows("affine", 4) as before,
        mine.device_rows("affine", 4) as rows,
        client.device_rows("affine", 4) as after,
        client.model("affine", rows=4).rows(4) as host,
    ):
        for held in (before, rows, after, host):
            held.inputs["observation"][:] = ROWS
            held.infer()
            held.outputs["action"][:] = -1
        lane = rows._rows._model.requests.lane
        first = lane.runs.first
        others = [each._rows._rows.first for each in (before, after)] + [host.first]
        for at, n in ((first + 3, 2), (first, 5), (first, 2**31), *((other, 4) for other in others)):
            answer = lane.ask(at, n, 20)
            assert answer.code in (Code.REFUSED, Code.MALFORMED, Code.BUSY), (at, n, answer)
        for held in (before, rows, after, host):
            np.testing.assert_array_equal(held.outputs["action"], np.full((4, 4), -1))
        rows.infer()
        np.testing.assert_array_equal(rows.outputs["action"], 2 * ROWS + 1)


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_a_ticket_for_rows_that_are_bound_only_in_part_is_refused(server, transport):
    device = driver()
    memory = device.allocate(4096)
    inside = device.array(memory, (1024,), np.dtype(np.float32))
    inside[:] = 5
    with connect(server.address, transport=transport, timeout=30) as client, client.model("affine", rows=4) as model:
        lane = model.requests.lane
        before = failures(client)
        with model.rows(4) as rows:
            place = {"lane": rows.leased[0], "lease": rows.leased[1], "first": rows.first}
            handle = device.export(memory)
            client._open_link().bind(
                BindRequest(
                    rows=2,
                    inputs=[RegionPlace(tensor="observation", handle=handle)],
                    outputs=[RegionPlace(tensor="action", handle=handle, offset=2048)],
                    **place,
                ),
                20.0,
            )
            for at, n in ((1, 2), (0, 3), (0, 4), (2, 1), (2, 2)):
                answer = lane.ask(rows.first + at, n, 20)
                assert answer.code == Code.REFUSED and "not bound to device memory" in answer.message, (at, n, answer)
            assert (inside == 5).all()
            assert lane.ask(rows.first, 2, 20).code == Code.OK
            assert (inside[512:520] == 11).all() and (np.delete(inside, range(512, 520)) == 5).all()
            client._open_link().bind(BindRequest(end=True, **place), 20.0)
        assert failures(client) == before, "the client erred, not the model"
    device.free(memory)


def test_memory_of_another_process_is_refused(server, client, folder):
    device = driver()
    memory, event = device.allocate(4096), device.event()
    link = client._open_link()
    model = client.model("affine", rows=4)
    with model.rows(4) as rows:
        lane, lease = rows.leased
        first = rows.first

        def bind(**changed):
            handle = changed.pop("handle", device.export(memory))
            offset = changed.pop("offset", 0)
            fields = {
                "lane": lane, "lease": lease, "first": first, "rows": 4, "event": b"",
                "inputs": [RegionPlace(tensor="observation", handle=handle, offset=offset)],
                "outputs": [RegionPlace(tensor="action", handle=handle, offset=2048)],
                **changed,
            }  # fmt: skip
            try:
                link.bind(BindRequest(**fields), 20.0)
            finally:
                link.bind(BindRequest(lane=lane, lease=lease, first=fields["first"], end=True), 20.0)

        bind()
        refused = (
            ({"handle": bytes(HANDLE)}, "the driver knows no such handle"),
            ({"handle": device.export_event(event)}, "no such handle"),
            ({"handle": b"short"}, f"a handle has {HANDLE} bytes, 5 came"),
            ({"offset": 4090}, "takes 64 bytes from byte 4090 of a region that has 4096"),
            ({"offset": 2**63}, "takes 64 bytes from byte"),
            ({"offset": 2}, "aligned to 4"),
            ({"event": b"e"}, "an event's handle has 64 bytes"),
            ({"event": device.export(memory)}, "no such handle"),
            ({"lease": lease + 1}, "not leased to the sender"),
            ({"rows": 5}, "expected some of"),
            ({"rows": 0}, "expected some of"),
            ({"outputs": []}, "outputs none were bound, expected each of 'action' once"),
        )
        for changed, message in refused:
            with pytest.raises(Refused, match=message):
                bind(**changed)
        own = device.export(memory)[:24] + engine(server).to_bytes(4, "little") + bytes(HANDLE - 28)
        with pytest.raises(Refused, match="cannot open what it exported itself"):
            bind(handle=own)
    assert model.infer(ROWS)[0, 0] == 1  # host rows again
    assert mapped(server, folder) == 0
    device.destroy_event(event)
    device.free(memory)


def test_models_without_fixed_rows_take_no_device_memory(client):
    with pytest.raises(Refused, match="takes no device memory"):
        client.device_rows("same", 2)


def test_without_a_driver_the_client_raises(client, monkeypatch):
    monkeypatch.delenv(FAKE)
    if Path("/proc/driver/nvidia/version").exists():
        pytest.skip("there is a driver")
    with pytest.raises(Refused, match="no CUDA driver on this host"):
        client.device_rows("affine", 1)


# ---- weights from the learner's memory on the device


@pytest.fixture
def on_device(monkeypatch):
    """Treat tensors of this process as the fake device's."""
    from jurybox.protocol.weights import publisher

    monkeypatch.setattr(publisher, "_on_device", lambda tensor: True)


def weights(version):
    return {"scale": torch.tensor(float(version)), "offset": torch.tensor(float(version))}


PAIR = np.array([[1, 1, 1, 1], [0, 0, 0, 0]], np.float32)


def adopted(model, version):
    reply = model.submit(PAIR).result(timeout=30)
    answer = np.asarray(reply.outputs)
    if reply.version == 0:  # the weights that it was loaded with
        return False
    assert (answer[0] == 2 * reply.version).all() and (answer[1] == reply.version).all()
    return reply.version == version


def test_weights_go_from_device_to_device(server, client, folder, on_device, monkeypatch):
    model = client.model("learnt", rows=4)
    before = mapped(server, folder)
    with client.publisher("learnt", device=0) as publisher:
        first = publisher.publish(weights(publisher.version + 1))
        wait_until(lambda: adopted(model, first), 20, "the first version")
        assert mapped(server, folder) == before + 2  # one for each slot
        stage = publisher._place.stage
        monkeypatch.setattr(stage, "_targets", [torch.zeros_like(target) for target in stage._targets])
        # The host copy gets nothing, so the answer must come from the device.
        second = publisher.publish(weights(first + 1))
        wait_until(lambda: adopted(model, second), 20, "the second version")
        monkeypatch.undo()


def test_device_weights_are_never_torn_by_a_learner_that_publishes_without_a_pause(server, client, folder, on_device):
    stop, published, seen = threading.Event(), [0], set()

    def learn():
        with server.connect() as own, own.publisher("learnt", device=0) as publisher:
            while not stop.is_set():
                published[0] = publisher.publish(weights(publisher.version + 1))

    learner = threading.Thread(target=learn)
    learner.start()
    try:
        model = client.model("learnt", rows=4)
        wait_until(lambda: published[0], 20, "a publication")
        deadline = time.monotonic() + 60
        while len(seen) <= 100 and time.monotonic() < deadline:
            reply = model.submit(PAIR).result(timeout=30)
            answer = np.asarray(reply.outputs)
            if reply.version > 2:
                assert (answer[0] == 2 * reply.version).all() and (answer[1] == reply.version).all()
            seen.add(reply.version)
    finally:
        stop.set()
        learner.join(30)
    assert len(seen) > 10
    wait_until(lambda: adopted(model, published[0]), 20, "the last version")


LEARNER = """
import sys, time, torch
from jurybox.client import connect
from jurybox.protocol.weights import publisher
publisher._on_device = lambda tensor: True
with connect(sys.argv[1], timeout=60) as server:
    learner = server.publisher("learnt", device=0)
    number = float(learner.version + 1)
    print(learner.publish({"scale": torch.tensor(number), "offset": torch.tensor(number)}), flush=True)
    time.sleep(600)
"""


def test_after_the_learners_death_the_next_engine_reads_its_weights_from_the_host(server, client, folder):
    process = subprocess.Popen([sys.executable, "-c", LEARNER, server.address], stdout=subprocess.PIPE, text=True)
    with process:
        version = int(process.stdout.readline())
        model = client.model("learnt", rows=4)
        wait_until(lambda: adopted(model, version), 20, "its version")
        process.kill()
    for file in folder.iterdir():
        file.unlink()
    os.kill(engine(server), signal.SIGKILL)
    wait_until(lambda: adopted(model, version), 60, "its version in the next engine")
    assert mapped(server, folder) == 0


def test_a_learners_unfinished_publication_on_the_device_is_not_used(server, client, folder, on_device):
    """It was killed in between: the device's slots have a version that the channel never had."""
    model = client.model("learnt", rows=4)
    with client.publisher("learnt", device=0) as publisher:
        version = publisher.publish(weights(publisher.version + 1))
        wait_until(lambda: adopted(model, version), 20, "its version")
        for place in publisher._place.stage._shared:
            place.fill_(77)
        publisher.channel.device["versions"] = version + 1
    with pytest.MonkeyPatch.context() as patch:
        from jurybox.protocol.weights import publisher as module

        patch.setattr(module, "_on_device", lambda tensor: False)
        with client.publisher("learnt") as publisher:
            assert publisher.publish(weights(version + 1)) == version + 1
            wait_until(lambda: adopted(model, version + 1), 20, "the next learner's version")


# ---- Triton's calls


@pytest.fixture(params=["grpc", "http"])
def triton(request, server):
    import tritonclient.grpc
    import tritonclient.http

    module = {"grpc": tritonclient.grpc, "http": tritonclient.http}[request.param]
    client = module.InferenceServerClient(server.listening(request.param))
    yield module, client
    client.unregister_cuda_shared_memory()
    client.close()


def shared(triton, name, size):
    """Register memory of this process; return its address and the memory as an array."""
    _, client = triton
    device = driver()
    memory = device.allocate(size)
    client.register_cuda_shared_memory(name, base64.b64encode(device.export(memory)).decode(), 0, size)
    return memory, device.array(memory, (size // 4,), np.dtype(np.float32))


def place(module, region, *, rows=4, at=0, into=512, shape=None):
    given = module.InferInput("observation", shape or [rows, 4], "FP32")
    given.set_shared_memory(region, rows * 16, at)
    wanted = module.InferRequestedOutput("action")
    wanted.set_shared_memory(region, rows * 16, into)
    return [given], [wanted]


def test_tritons_cuda_calls_are_served(triton, server, folder):
    module, client = triton
    _, array = shared(triton, "mine", 1024)
    before = mapped(server, folder)
    assert "mine" in str(client.get_cuda_shared_memory_status())
    for round in range(3):
        array[:16] = (ROWS + round).ravel()
        inputs, outputs = place(module, "mine")
        result = client.infer("affine", inputs, outputs=outputs)
        np.testing.assert_array_equal(array[128:144], (2 * (ROWS + round) + 1).ravel())
        assert "shared_memory_region" in str(result.get_response())
    array[32:40] = 5
    inputs, outputs = place(module, "mine", rows=2, at=128, into=768)  # at other offsets, with other rows
    client.infer("affine", inputs, outputs=outputs)
    np.testing.assert_array_equal(array[192:200], np.full(8, 11))
    assert mapped(server, folder) == before + 2
    client.unregister_cuda_shared_memory("mine")
    assert mapped(server, folder) == before  # unmapped before the call returned: the client may free it
    with pytest.raises(Exception, match="mine"):
        inputs, outputs = place(module, "mine")
        client.infer("affine", inputs, outputs=outputs)


def test_errors_of_tritons_cuda_calls_say_what_was_expected(triton):
    module, client = triton
    shared(triton, "mine", 1024)
    for options, message in (
        ({"at": 1000}, "bytes 1000 to 1064 of region 'mine' were asked for, it has 1024"),
        ({"into": 1008}, "bytes 1008 to 1072"),
        ({"shape": [4, 5]}, r"expected shape \[n, 4\], came \[4, 5\]"),
        ({"rows": 2, "shape": [4, 4]}, "has 64 bytes, 32 of region 'mine' were given"),
    ):
        inputs, outputs = place(module, "mine", **options)
        with pytest.raises(Exception, match=message):
            client.infer("affine", inputs, outputs=outputs)
    inputs, outputs = place(module, "mine")
    with pytest.raises(Exception, match="no output was asked for"):
        client.infer("affine", inputs)
    with pytest.raises(Exception, match="lies in no CUDA region"):
        client.infer("affine", inputs, outputs=[module.InferRequestedOutput("action")])
    with pytest.raises(Exception, match="takes no device memory"):
        client.infer("same", inputs, outputs=outputs)
    with pytest.raises(Exception, match="registered already"):
        shared(triton, "mine", 1024)
    foreign = base64.b64encode(bytes(HANDLE)).decode()
    client.register_cuda_shared_memory("foreign", foreign, 0, 1024)
    inputs, outputs = place(module, "foreign")
    with pytest.raises(Exception, match="the driver knows no such handle"):
        client.infer("affine", inputs, outputs=outputs)
    with pytest.raises(Exception, match="expected a handle of 64 bytes"):
        client.register_cuda_shared_memory("short", base64.b64encode(b"short").decode(), 0, 64)
    inputs, outputs = place(module, "mine")
    client.infer("affine", inputs, outputs=outputs)  # the errors affected no later request


def test_a_parameter_that_tensors_in_cuda_regions_cannot_have_is_refused_and_not_ignored(triton, client):
    module, tritons = triton
    shared(triton, "mine", 1024)
    for parameters, message in (
        ({"sequence_id": 7, "sequence_start": True}, "a sequence came with tensors in CUDA regions"),
        ({"parameters": {"row_errors": True}}, "row_errors came with tensors in CUDA regions"),
    ):
        inputs, outputs = place(module, "mine")
        with pytest.raises(Exception, match=message):
            tritons.infer("affine", inputs, outputs=outputs, **parameters)
    with client.publisher("learnt") as publisher:
        version = publisher.publish(weights(publisher.version + 1))
        wait_until(lambda: adopted(client.model("learnt", rows=4), version), 20, "the version")
    inputs, outputs = place(module, "mine")
    tritons.infer("learnt", inputs, outputs=outputs)
    with pytest.raises(Exception, match=f"version 0 of 'learnt' is not held, {version} is the newest"):
        tritons.infer("learnt", inputs, outputs=outputs, model_version="0")


def request_on_device(shape, region, **fields):
    """A request to "affine" as JSON, with four rows of its tensors in a region."""
    parameters = {"shared_memory_region": region, "shared_memory_byte_size": 64}
    return {
        "inputs": [{"name": "observation", "shape": shape, "datatype": "FP32", "parameters": parameters}],
        "outputs": [{"name": "action", "parameters": {**parameters, "shared_memory_offset": 512}}],
        **fields,
    }


def test_a_request_for_cuda_regions_in_handwritten_json_is_checked_as_any_other(server):
    device = driver()
    memory = device.allocate(1024)
    handle = {"raw_handle": {"b64": base64.b64encode(device.export(memory)).decode()}, "byte_size": 1024}
    with httpx.Client(base_url=f"http://{server.listening('http')}/v2", timeout=30) as web:
        region = "/cudasharedmemory/region/written"
        assert web.post(f"{region}/register", json=handle).status_code == 200
        infer = functools.partial(web.post, "/models/affine/infer")
        for shape in (["x", 4], [2.7, 4], [True, 4], [], [0, 4], [-1, 4], [[4], 4]):
            answer = infer(json=request_on_device(shape, "written"))
            assert (answer.status_code, "expected shape [n, 4]" in answer.json()["error"]) == (422, True), answer.text
        request = request_on_device([4, 4], "written")
        request["inputs"][0]["parameters"]["extents"] = "4;4;4;4"
        answer = infer(json=request)
        assert (answer.status_code, "extents are for" in answer.json()["error"]) == (422, True), answer.text
        assert infer(json=request_on_device([4, 4], "written")).status_code == 200
        answer = infer(json=request_on_device([4, 4], "written", parameters={"timeout": 1}))
        assert (answer.status_code, answer.json()["code"]) == (504, "TIMEOUT"), answer.text
        assert infer(json=request_on_device([4, 4], "written")).status_code == 200
        assert web.post(f"{region}/unregister").status_code == 200
    device.free(memory)
