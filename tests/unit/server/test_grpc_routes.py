"""The methods of the Open Inference Protocol over gRPC and their guard: what each asks for, and what it refuses."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import grpc
import pytest

from jurybox import native
from jurybox.protocol import open_inference_pb2 as pb
from jurybox.protocol import open_inference_pb2_grpc
from jurybox.protocol.errors import Busy, Code, ModelNotFound, Refused
from jurybox.server.gateway.inference.grpc_inference import InferenceServicer
from jurybox.server.gateway.inference.requests import InferResponse
from jurybox.server.security import message_parts
from jurybox.server.security.doors import Doors
from jurybox.server.security.grpc import Guarding
from jurybox.server.security.limits import RECEIVED
from jurybox.server.security.message_parts import MOST_PARTS, has_many_parts

MIB = 1 << 20
SERVICE = "inference.GRPCInferenceService"


class Ended(Exception):
    """What ends an aborted call."""


class Context:
    """A call's; `aborted` is the status with which it ended."""

    farewells = None

    def __init__(self):
        self.farewells, self.trailing = {}, ()

    def peer(self):
        return "ipv4:127.0.0.1:1"

    def time_remaining(self):
        return None

    def set_trailing_metadata(self, trailing):
        self.trailing = trailing

    async def abort(self, code, details):
        raise Ended(code, details)


class Oip:
    """What the methods ask, which notes it."""

    idle = 60.0

    def __init__(self):
        self.asked, self.why, self.error, self.alive = [], [], None, True
        noted = self._noted
        self.repository = SimpleNamespace(
            load=self._later("load"), unload=self._later("unload"), keep_no_longer=noted("keep no longer")
        )
        regions = [SimpleNamespace(name="r", key="/r", offset=8, size=64, device=3)]
        self.regions = SimpleNamespace(
            register=noted("register"),
            unregister=noted("unregister"),
            status=lambda name: regions if name == "r" else [],
        )
        self.cuda_regions = SimpleNamespace(
            register=noted("cuda"),
            unregister=self._later("cuda off"),
            status=lambda name: regions if name == "r" else [],
        )
        self.sequences = SimpleNamespace(lose=noted("lose"))

    def _noted(self, name):
        return lambda *given: self.asked.append((name, *given))

    def _later(self, name):
        async def note(*given):
            self.asked.append((name, *given))

        return note

    async def live(self):
        return self.alive

    async def reasons(self):
        return self.why

    async def model_reason(self, name, version):
        if self.error:
            raise self.error
        return self.why[0] if self.why else ""

    def metadata(self):
        return {"name": "jurybox", "version": "1", "extensions": ["a"]}

    async def index(self, repository, *, ready):
        return [{"name": f"{repository}/m", "state": "READY" if ready else "UNAVAILABLE"}]

    async def statistics(self, name, version):
        return [{"name": name, "version": version}]

    async def infer(self, asked):
        self.asked.append(("infer", asked.model))
        if self.error:
            raise self.error
        return InferResponse(asked.model, "3", asked.id, [], {})


class Server:
    """Finds the methods that were added to it by their paths."""

    def __init__(self):
        self.registered = {}

    def add_generic_rpc_handlers(self, handlers):
        self.generic = handlers

    def add_registered_method_handlers(self, service, handlers):
        self.registered |= {f"/{service}/{name}": handler for name, handler in handlers.items()}

    def __getitem__(self, path):
        return next(one.service(SimpleNamespace(method=path, invocation_metadata=())) for one in self.generic)


def served(oip=None, budget=None, doors=None, direct=None):
    """The methods of the service as they are guarded, and the guard."""
    guarding = Guarding(server := Server(), budget, direct or {}, doors)
    servicer = InferenceServicer(oip or Oip(), budget or native.Budget((MIB, MIB, 9), (MIB, MIB, 9)), doors or Doors())
    open_inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, guarding)
    return server, guarding


async def ask(methods, name, request, context=None):
    """The answer to a request that came as these bytes or this message."""
    handler = methods[f"/{SERVICE}/{name}"]
    data = request if isinstance(request, bytes) else request.SerializeToString()
    given = handler.request_deserializer(data) if handler.request_deserializer else data
    return await handler.unary_unary(given, context or Context())


async def status(methods, name, request, context=None):
    with pytest.raises(Ended) as caught:
        await ask(methods, name, request, context)
    return caught.value.args


async def test_each_question_gets_its_answer():
    methods, _ = served(oip := Oip())
    for alive, why in ((True, []), (False, ["no engine"])):
        oip.alive, oip.why = alive, why
        assert (await ask(methods, "ServerLive", pb.ServerLiveRequest())).live == alive
        assert (await ask(methods, "ServerReady", pb.ServerReadyRequest())).ready == alive
        assert (await ask(methods, "ModelReady", pb.ModelReadyRequest(name="m"))).ready == alive
    found = await ask(methods, "ServerMetadata", pb.ServerMetadataRequest())
    assert (found.name, found.version, list(found.extensions)) == ("jurybox", "1", ["a"])
    found = await ask(methods, "ModelStatistics", pb.ModelStatisticsRequest(name="m", version="2"))
    assert [(one.name, one.version) for one in found.model_stats] == [("m", "2")]
    for ready, state in ((True, "READY"), (False, "UNAVAILABLE")):
        found = await ask(methods, "RepositoryIndex", pb.RepositoryIndexRequest(repository_name="x", ready=ready))
        assert [(one.name, one.state) for one in found.models] == [("x/m", state)]
    found = await ask(methods, "ModelInfer", pb.ModelInferRequest(model_name="m", id="7"))
    assert (found.model_name, found.model_version, found.id) == ("m", "3", "7")


async def test_a_model_that_is_not_here_is_not_ready_and_other_errors_are_told():
    methods, _ = served(oip := Oip())
    oip.error = ModelNotFound("no model 'm'")
    assert not (await ask(methods, "ModelReady", pb.ModelReadyRequest(name="m"))).ready
    oip.error = Busy("no room")
    code, details = await status(methods, "ModelReady", pb.ModelReadyRequest(name="m"), context := Context())
    assert (code, details) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "no room")
    assert ("jurybox-code", str(int(Code.BUSY))) in context.trailing


async def test_models_and_regions_are_changed_as_asked():
    methods, _ = served(oip := Oip())
    context = Context()
    load = pb.RepositoryModelLoadRequest(repository_name="x", model_name="m")
    await ask(methods, "RepositoryModelLoad", load, context)
    assert not context.farewells
    load.parameters["keep"].int64_param = 5
    await ask(methods, "RepositoryModelLoad", load, context)
    unload = pb.RepositoryModelUnloadRequest(repository_name="x", model_name="m")
    await ask(methods, "RepositoryModelUnload", unload)
    (farewell,) = context.farewells.values()
    farewell()
    assert oip.asked == [
        ("load", "x", "m", {}), ("load", "x", "m", {"keep": 5}), ("unload", "x", "m", {}), ("keep no longer", "m"),
    ]  # fmt: skip
    oip.asked.clear()
    region = pb.SystemSharedMemoryRegisterRequest(name="r", key="/r", offset=8, byte_size=64)
    cuda = pb.CudaSharedMemoryRegisterRequest(name="r", raw_handle=b"h", device_id=3, byte_size=64)
    answers = [
        await ask(methods, "SystemSharedMemoryRegister", region),
        await ask(methods, "SystemSharedMemoryUnregister", pb.SystemSharedMemoryUnregisterRequest(name="r")),
        await ask(methods, "CudaSharedMemoryRegister", cuda),
        await ask(methods, "CudaSharedMemoryUnregister", pb.CudaSharedMemoryUnregisterRequest(name="r")),
    ]
    assert all(answer is not None for answer in answers)
    assert oip.asked == [
        ("register", "r", "/r", 8, 64),
        ("unregister", "r"),
        ("cuda", "r", b"h", 3, 64),
        ("cuda off", "r"),
    ]
    found = (await ask(methods, "SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest(name="r"))).regions
    assert [(one.name, one.key, one.offset, one.byte_size) for one in found.values()] == [("r", "/r", 8, 64)]
    found = (await ask(methods, "CudaSharedMemoryStatus", pb.CudaSharedMemoryStatusRequest(name="r"))).regions
    assert [(name, one.name, one.device_id, one.byte_size) for name, one in found.items()] == [("r", "r", 3, 64)]


@pytest.mark.parametrize(("name", "what"), [("TraceSetting", "trace"), ("LogSettings", "logging")])
async def test_extensions_that_are_not_served_are_named(name, what):
    methods, _ = served()
    code, details = await status(methods, name, getattr(pb, f"{name}Request")())
    assert code == grpc.StatusCode.UNIMPLEMENTED and f"the {what} extension is not served here" in details


async def streamed(methods, requests):
    handler = methods[f"/{SERVICE}/ModelStreamInfer"]

    async def coming():
        for request in requests:
            data = request if isinstance(request, bytes) else request.SerializeToString()
            yield handler.request_deserializer(data)

    return [answer async for answer in handler.stream_stream(coming(), Context())]


async def test_an_error_in_a_stream_is_its_requests_alone_and_loses_the_sequence():
    methods, _ = served(oip := Oip())
    oip.error = Refused("no such input")
    requests = [pb.ModelInferRequest(model_name="m", id=str(number)) for number in range(4)]
    requests[1].parameters["sequence_id"].int64_param = 7
    requests[2].parameters["sequence_id"].string_param = "s"
    requests[3].parameters["sequence_id"].bool_param = True
    answers = await streamed(methods, requests)
    assert [one.error_message for one in answers[:3]] == ["no such input"] * 3 and answers[3].error_message
    assert [one.infer_response.id for one in answers] == ["0", "1", "2", "3"]
    assert [asked for asked in oip.asked if asked[0] == "lose"] == [("lose", "m", 7), ("lose", "m", "s")]
    oip.error = None
    (answer,) = await streamed(methods, requests[:1])
    assert (answer.error_message, answer.infer_response.model_version) == ("", "3")


async def test_a_stream_that_ends_with_what_is_no_request_ends_with_its_error():
    methods, _ = served()
    with pytest.raises(Ended, match="no message came"):
        await streamed(methods, [pb.ModelInferRequest(model_name="m"), b"\xff"])


# ---- guards


async def test_closed_doors_refuse_what_does_more_than_read():
    doors = Doors()
    methods, guarding = served(doors=doors)
    await ask(methods, "ModelInfer", pb.ModelInferRequest(model_name="m"))
    doors.close()
    code, details = await status(methods, "ModelInfer", pb.ModelInferRequest(model_name="m"), context := Context())
    assert code == grpc.StatusCode.UNAVAILABLE and "the server is stopping" in details
    assert ("grpc-retry-pushback-ms", "-1") in context.trailing
    assert (await ask(methods, "ServerLive", pb.ServerLiveRequest())).live and guarding.in_progress == 0


async def test_work_is_counted_while_it_is_in_progress_and_a_message_while_it_is_held():
    budget, go = native.Budget((100, 100, 9), (100, 100, 9)), asyncio.Event()
    methods, guarding = served(oip := Oip(), budget)
    infer, request = oip.infer, pb.ModelInferRequest(model_name="m")

    async def slow(asked):
        await go.wait()
        return await infer(asked)

    oip.infer = slow
    asking = asyncio.ensure_future(ask(methods, "ModelInfer", request))
    await asyncio.sleep(0)
    assert (guarding.in_progress, budget.held(RECEIVED)) == (1, request.ByteSize())
    await ask(methods, "ServerLive", pb.ServerLiveRequest())
    assert guarding.in_progress == 1
    go.set()
    await asking
    assert (guarding.in_progress, budget.held(RECEIVED)) == (0, 0)
    large = pb.ModelInferRequest(model_name="m" * 200)
    assert (await status(methods, "ModelInfer", large))[0] == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (guarding.in_progress, budget.held(RECEIVED)) == (0, 0)


@pytest.mark.parametrize("limited", [False, True])
async def test_a_direct_method_answers_or_leaves_the_call_to_the_ordinary_one(limited):
    budget = native.Budget((100, 100, 9), (100, 100, 9)) if limited else None
    ways, gone, request = {}, [], pb.ModelInferRequest(model_name="m").SerializeToString()

    def direct(data, call):
        assert call.room() is call.connection is None
        assert budget is None or budget.held(RECEIVED) == len(data)
        call.on_gone = lambda: gone.append("gone")
        return ways["way"](call)

    methods, guarding = served(budget=budget, direct={f"/{SERVICE}/ModelInfer": direct})
    ways["way"] = lambda call: call.reply(b"direct") or True
    assert await ask(methods, "ModelInfer", request) == b"direct"
    for way in (lambda _: False, lambda call: call.as_usual() or True):
        ways["way"] = way
        answer = pb.ModelInferResponse.FromString(await ask(methods, "ModelInfer", request))
        assert answer.model_version == "3"
    ways["way"] = lambda call: call.fail(Busy("no room")) or True
    assert await status(methods, "ModelInfer", request) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "no room")
    ways["way"] = lambda call: True
    asking = asyncio.ensure_future(ask(methods, "ModelInfer", request))
    await asyncio.sleep(0)
    assert guarding.in_progress == 1 and not gone
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert gone == ["gone"] and guarding.in_progress == 0 and (budget is None or not budget.held(RECEIVED))


@pytest.fixture
def few_parts(monkeypatch):
    monkeypatch.setattr(message_parts, "MOST_PARTS", 100)


async def test_what_is_no_message_or_has_too_many_parts_is_refused(few_parts):
    methods, _ = served()
    code, details = await status(methods, "ModelInfer", b"\xff")
    assert code == grpc.StatusCode.INVALID_ARGUMENT and details.startswith("no message came: ")
    many = pb.ModelInferRequest(inputs=[pb.ModelInferRequest.InferInputTensor()] * 40_000)
    code, details = await status(methods, "ModelInfer", many)
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED and f"more than {MOST_PARTS} parts" in details


async def test_methods_are_guarded_in_whichever_way_they_are_added_and_others_are_not_there():
    methods, guarding = served()
    live = f"/{SERVICE}/ServerLive"
    guarding.add_registered_method_handlers(SERVICE, {"ServerLive": methods[live]})
    assert methods.registered[live].unary_unary is not None and methods[live] is methods[live]
    assert methods[f"/{SERVICE}/Nothing"] is None


def field(number, kind, content=b""):
    return bytes([number << 3 | kind]) + content


KIND = pb.ModelInferRequest.DESCRIPTOR
INPUT = field(5, 2, b"\x02" + field(1, 2, b"\x00"))  # an input with a name that is empty: two parts


@pytest.mark.parametrize(
    ("part", "counts"),
    [
        (field(1, 2, b"\x03abc"), 1),
        (INPUT, 2),
        (field(9, 0, b"\x80\x80\x01"), 1),
        (field(9, 1, bytes(8)), 1),
        (field(9, 5, bytes(4)), 1),
        (field(9, 2, b"\x04\x08\x01\x08\x01"), 1),  # unknown: it is not looked into
    ],
)
def test_every_field_of_a_message_counts_and_those_inside_it(few_parts, part, counts):
    times = 100 // counts
    assert not has_many_parts(part * times, KIND)
    assert has_many_parts(part * times + field(9, 0, b"\x01"), KIND)


@pytest.mark.parametrize("end", [field(9, 3), field(9, 7), b"\x80", field(1, 2, b"\x05ab"), field(9, 0, b"\xff" * 20)])
def test_what_the_parser_will_refuse_has_few_parts(end):
    assert not has_many_parts(field(9, 0, b"\x01") * 10 + end, KIND)
