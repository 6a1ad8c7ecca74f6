"""Requests of the Open Inference Protocol to a frontend that is played: what is asked of it, and what is refused."""

from __future__ import annotations

import json
import time
import uuid
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from jurybox.protocol.device_memory import HANDLE
from jurybox.protocol.errors import Code, Error, ModelNotFound, Refused, RowFailed, ServerGone, SpecMismatch
from jurybox.protocol.parameters import Parameter
from jurybox.protocol.scoreboard import NORMAL
from jurybox.protocol.spec import ModelSpec, TensorSpec
from jurybox.server.frontend.panels import TOTAL
from jurybox.server.frontend.requests import RowsReply
from jurybox.server.gateway.inference import forms as forms_module
from jurybox.server.gateway.inference.forms import Forms
from jurybox.server.gateway.inference.inference import OpenInference
from jurybox.server.gateway.inference.parameters import REGION
from jurybox.server.gateway.inference.requests import InferRequest, Input, RequestedOutput

SPEC = ModelSpec(
    "mean",
    {"x": TensorSpec("float32", (2,)), "k": TensorSpec("float32")},
    {"score": TensorSpec("float32"), "pair": TensorSpec("float32", (2,))},
    parameters={"scale": Parameter("k", 1.0)},
)
PLAIN = ModelSpec("mean", {"x": TensorSpec("float32", (2,))}, {"score": TensorSpec("float32")})
TEXTS = ModelSpec("texts", {"x": TensorSpec("float32", (2,))}, {"said": TensorSpec("bytes", capacity=100)})
X = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)


class Frontend:
    """A frontend that reads the rows of a request, notes them, and answers with outputs of the test's choice."""

    def __init__(self, spec=SPEC):
        self.model, self.read, self.request, self.outcomes = spec, None, None, []
        self.sequences = SimpleNamespace(idle=60.0, over=lambda *given: self.outcomes.append(given))
        self.reasons, self.panels = None, {}
        self.lanes = SimpleNamespace(held=lambda name: self.held)
        self.held = None
        self.reply = {}
        self.outputs = {
            "score": np.array([1, 2], np.float32),
            "pair": X.copy(),
            "said": [b"yes", b"no"],
        }
        self.scores = {TOTAL: np.array([3, np.nan], np.float32), "one": np.array([1, np.nan], np.float32)}

    async def compute(self, request):
        self.request = request
        self.read = request.read(self.model, bool(self.panels))
        if self.panels:
            return RowsReply(self.scores, 7, **self.reply)
        return RowsReply({name: self.outputs[name] for name in self.model.outputs}, 7, self.model, **self.reply)

    async def spec(self, model, until):
        return self.model

    def record_outcome(self, *outcome):
        self.outcomes.append(outcome)


class Source:
    """The source of the server's status: a document that was kept, and a fresh one."""

    fails, kept, document = None, {}, {}

    async def status(self, *, fresh=False):
        if self.fails is not None:
            raise self.fails
        return self.document if fresh else self.kept


@pytest.fixture
def frontend():
    return Frontend()


@pytest.fixture
def oip(frontend):
    made = OpenInference(frontend, Source(), shared_memory="test-", cuda_shared_memory=True)
    yield made
    made.close()


@pytest.fixture
def memory(oip):
    """A region of shared memory of 64 bytes."""
    file = Path("/dev/shm") / f"test-{uuid.uuid4().hex}"
    file.write_bytes(bytes(64))
    try:
        oip.regions.register("r", file.name, 0, 64)
        yield file
    finally:
        oip.regions.close()
        file.unlink()


@pytest.fixture
def device(oip, monkeypatch):
    """A region of device memory; the requests with it are noted."""
    asked = []

    async def infer(*given):
        asked.append(given)
        return 2, 7

    oip.cuda_regions.register("g", bytes(HANDLE), 0, 64)
    monkeypatch.setattr(oip.cuda_regions, "infer", infer)
    return asked


def place(size, offset=0, region="r"):
    return {REGION: region, "shared_memory_byte_size": size} | ({"shared_memory_offset": offset} if offset else {})


def given(data=X, **more):
    return Input("x", "FP32", data.shape, data.tobytes(), raw=True, **more)


def asked(*outputs, inputs=None, version="", **parameters):
    wanted = [RequestedOutput(name, where) for name, where in outputs]
    return InferRequest("mean", version, "an id", inputs or [given()], wanted, parameters)


def on_device(*outputs, **parameters):
    lies = Input("x", "FP32", (2, 2), parameters=place(16, region="g"))
    return asked(*outputs, inputs=[lies], **parameters)


async def refusal(oip, request, kind=Refused):
    with pytest.raises(kind) as caught:
        await oip.infer(request)
    return caught.value


async def test_an_answer_has_the_outputs_that_were_asked_for_in_that_order(oip, frontend):
    answer = await oip.infer(asked(("pair", {}), ("score", {}), version="7"))
    assert (answer.model, answer.version, answer.id) == ("mean", "7", "an id")
    assert [output.name for output in answer.outputs] == ["pair", "score"]
    assert frontend.request.version == 7 and frontend.request.names == ["x"]
    assert frontend.read.n == 2 and frontend.read.answer == 2 * (8 + 4)
    assert [output.name for output in (await oip.infer(asked())).outputs] == ["score", "pair"]
    assert frontend.request.version is None and frontend.request.priority == NORMAL


async def test_outputs_in_shared_memory_are_written_there_and_count_for_no_answer(oip, frontend, memory):
    answer = await oip.infer(asked(("score", place(8, 16)), ("pair", {})))
    assert memory.read_bytes()[16:24] == np.array([1, 2], np.float32).tobytes()
    assert [output.array is None for output in answer.outputs] == [True, False]
    assert answer.outputs[0].parameters == place(8, 16) and frontend.read.answer == 2 * 8


@pytest.mark.parametrize(
    ("where", "said"),
    [
        (place(7), "'score' has 8 bytes, 7 of region 'r' were given"),
        (place(8, 57), "bytes 57 to 65 of region 'r' were asked for, it has 64"),
        (place(8, region="s"), "no region 's' is registered; there are: r"),
    ],
)
async def test_an_output_that_its_place_cannot_hold_is_refused_before_anything_is_computed(
    oip, frontend, memory, where, said
):
    assert said in str(await refusal(oip, asked(("score", where)), Error))
    assert frontend.read is None


async def test_an_output_whose_size_is_not_known_yet_may_get_a_small_place(oip, frontend, memory):
    frontend.model = TEXTS
    answer = await oip.infer(asked(("said", place(13))))
    assert memory.read_bytes()[:13] == b"\3\0\0\0yes\2\0\0\0no" and answer.outputs[0].shape == (2,)
    assert "has 13 bytes, 12 of region 'r'" in str(await refusal(oip, asked(("said", place(12))), Error))


@pytest.mark.parametrize(
    ("outputs", "said"),
    [
        ([("none", {})], "output 'none' is not the model's; there are score, pair"),
        ([("score", {}), ("score", {})], "output 'score' was asked for twice"),
        ([("score", {"extents": "1"})], "extents are the answer's to say"),
    ],
)
async def test_outputs_that_cannot_be_given_are_refused(oip, frontend, outputs, said):
    assert said in str(await refusal(oip, asked(*outputs), Error))
    assert frontend.read is None


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ([given(), given()], "input 'x' came twice; model 'mean' takes x, k"),
        ([Input("z", "FP32", (1,), bytes(4), raw=True)], "input 'z' is not the model's; model 'mean' takes x, k"),
        ([given(), Input("k", "FP32", (1,), bytes(4), raw=True)], "input 'k' has 1 rows, an earlier one 2"),
        ([Input("k", "FP32", (1,), bytes(4), raw=True)], "model 'mean' takes x, k; came k"),
        ([given(parameters=place(16))], "input 'x' came with data and in shared memory"),
        ([Input("x", "FP32", (2, 2))], "input 'x' came without data"),
        ([Input("x", "FP32", (2, 2), [])], "expected 4 values for shape [2, 2], 0 came"),
    ],
)
async def test_inputs_that_are_no_rows_of_the_model_are_refused(oip, memory, inputs, said):
    assert said in str(await refusal(oip, asked(inputs=inputs), Error))


async def test_a_parameter_of_the_model_is_an_input_of_every_row(oip, frontend):
    for parameters, value in (({}, 1.0), ({"scale": 2.5}, 2.5)):
        await oip.infer(asked(**parameters))
        np.testing.assert_array_equal(frontend.read.inputs["k"], np.full(2, value, np.float32))
        np.testing.assert_array_equal(frontend.read.inputs["x"], X)
    both = [given(), Input("k", "FP32", (2,), bytes(8), raw=True)]
    await oip.infer(asked(inputs=both))
    np.testing.assert_array_equal(frontend.read.inputs["k"], np.zeros(2))
    assert "is the input 'k', which came, too" in str(await refusal(oip, asked(inputs=both, scale=2.5), SpecMismatch))
    assert "parameter 'other' is not known" in str(await refusal(oip, asked(other=1)))


async def test_an_input_in_shared_memory_is_read_from_its_place(oip, frontend, memory):
    memory.write_bytes(bytes(8) + X.tobytes() + bytes(40))
    await oip.infer(asked(inputs=[Input("x", "FP32", (2, 2), parameters=place(16, 8))]))
    np.testing.assert_array_equal(frontend.read.inputs["x"], X)


async def test_failed_rows_fail_the_request_unless_it_asks_for_their_reasons(oip, frontend):
    frontend.reply = {"error": RowFailed("row 1 failed", errors={1: "too dark"})}
    assert str(await refusal(oip, asked(), RowFailed)).startswith("row 1 failed")
    answer = await oip.infer(asked(row_errors=True, triton_enable_empty_final_response=True))
    assert json.loads(answer.parameters.pop("row_errors")) == {"1": "too dark"}
    assert answer.parameters == {"triton_final_response": True}
    np.testing.assert_array_equal(answer.outputs[0].array, np.array([1, np.nan], np.float32))


async def test_lost_sessions_are_named_and_nothing_else(oip, frontend):
    frontend.reply = {"lost": [0, 1]}
    answer = await oip.infer(asked())
    assert answer.parameters == {"session_lost": "0,1"} and not answer.outputs and answer.version == ""


async def test_the_end_of_a_clients_sessions_needs_no_rows(oip, frontend):
    answer = await oip.infer(asked(session_client="a" * 32, sessions=""))
    assert frontend.outcomes == [("mean", "a" * 32)] and frontend.request is None and not answer.outputs
    assert "not known here" in str(await refusal(oip, asked(session_client="a" * 32, sessions="", other=1)))
    assert len(frontend.outcomes) == 1


async def test_tensors_in_device_memory_are_answered_there(oip, frontend, device):
    frontend.model = PLAIN
    request = on_device(("score", place(8, 24, "g")), triton_enable_empty_final_response=True)
    before = time.monotonic()
    answer = await oip.infer(request)
    ((spec, inputs, outputs, until, version),) = device
    assert spec is PLAIN and version == 0 and until > before
    assert inputs["x"][:2] == ("FP32", (2, 2)) and inputs["x"][2].parameters() == place(16, region="g")
    assert {name: where.parameters() for name, where in outputs.items()} == {"score": place(8, 24, "g")}
    assert frontend.outcomes == [("mean", True)] and answer.parameters == {"triton_final_response": True}
    (output,) = answer.outputs
    assert (output.name, output.datatype, output.shape, output.array) == ("score", "FP32", (2,), None)
    assert output.parameters == place(8, 24, "g") and (answer.version, answer.id) == ("7", "an id")
    request.version = "6"
    with pytest.raises(ModelNotFound, match="version 6 of 'mean' is not held, 7 is the newest"):
        await oip.infer(request)


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"sequence_id": 3}, "a sequence"),
        ({"row_errors": True}, "row_errors"),
        ({"priority": 1}, "a priority"),
        ({"sequence_id": 3, "row_errors": True, "priority": 3}, "a sequence"),
        ({"other": 1}, "parameter 'other'"),
    ],
)
async def test_what_device_memory_cannot_have_is_refused_by_its_name(oip, device, parameters, named):
    error = await refusal(oip, on_device(("score", place(8, 24, "g")), **parameters))
    assert str(error).startswith(named) and error.code == Code.UNSUPPORTED and not device


@pytest.mark.parametrize(
    ("outputs", "kind", "said"),
    [
        ([], SpecMismatch, "no output was asked for"),
        ([("none", place(8, region="g"))], SpecMismatch, "output 'none' is not the model's, or came twice"),
        ([("score", place(8, region="g"))] * 2, SpecMismatch, "output 'score' is not the model's, or came twice"),
        ([("score", {})], Refused, "tensor 'score' lies in no CUDA region"),
        ([("score", place(8))], Refused, "tensor 'score' lies in no CUDA region"),
        ([("score", {**place(8, region="g"), "extents": "1"})], SpecMismatch, "'score': extents are for rows"),
    ],
)
async def test_outputs_of_device_memory_lie_there_each_once(oip, frontend, device, memory, outputs, kind, said):
    frontend.model = PLAIN
    error = await refusal(oip, on_device(*outputs), kind)
    assert said in str(error) and not device and not frontend.outcomes


async def test_a_panel_answers_with_its_total_and_each_members_score(oip, frontend):
    frontend.panels = {"mean": {"one": {"model": "m"}}}
    answer = await oip.infer(asked(triton_enable_empty_final_response=True))
    assert [output.name for output in answer.outputs] == [TOTAL, "one"] and frontend.request.version is None
    assert [list(output.failed) for output in answer.outputs] == [[1], [1]]
    assert all(output.datatype == "FP32" and output.shape == (2,) for output in answer.outputs)
    assert answer.parameters == {"triton_final_response": True} and answer.version == "7"
    (only,) = (await oip.infer(asked(("one", {})))).outputs
    assert only.name == "one"
    frontend.reply = {"error": RowFailed("row 1 failed", errors={1: "too dark"})}
    await refusal(oip, asked(), RowFailed)
    assert json.loads((await oip.infer(asked(row_errors=True))).parameters["row_errors"]) == {"1": "too dark"}


@pytest.mark.parametrize(
    ("request_", "kind", "said"),
    [
        (asked(session_client="a" * 32, sessions=""), Refused, "neither sequences nor a version"),
        (asked(("one", place(8))), Refused, "its outputs do not go to shared memory"),
        (asked((TOTAL, {}), ("none", {})), SpecMismatch, f"output 'none' is not the panel's; there are {TOTAL}, one"),
        (on_device(), Refused, "its inputs do not come in device memory"),
    ],
)
async def test_what_a_panel_cannot_have_is_refused(oip, frontend, device, memory, request_, kind, said):
    frontend.panels = {"mean": {"one": {"model": "m"}}}
    assert said in str(await refusal(oip, request_, kind)) and frontend.request is None


async def test_a_server_is_live_while_its_supervisor_answers_and_names_what_it_accepts(oip, frontend):
    assert await oip.live()
    oip._source.fails = ServerGone("it is gone")
    assert not await oip.live()
    assert oip.metadata()["extensions"][-2:] == ["system_shared_memory", "cuda_shared_memory"]
    off = OpenInference(frontend, Source(), shared_memory="")
    assert not {"system_shared_memory", "cuda_shared_memory"} & {*off.metadata()["extensions"]}


def lane(spec=PLAIN, piece=8):
    return SimpleNamespace(spec=spec, sessions=None, piece=piece, retired=False)


@pytest.mark.parametrize(
    ("outputs", "changed", "of_lane", "found"),
    [
        ([], {}, {}, (2, ["score"])),
        ([], {"row_errors": True}, {}, (2, ["score"])),
        ([], {}, {"piece": 2}, (2, ["score"])),
        ([], {}, {"piece": 1}, None),
        ([], {"priority": 1}, {}, None),
        ([], {"inputs": [given(parameters=place(16))]}, {}, None),
        ([("score", place(8))], {}, {}, None),
        ([], {"inputs": [given(), given()]}, {}, None),
        ([], {}, {"spec": SPEC}, None),
        ([], {}, {"spec": TEXTS}, None),
    ],
)
def test_a_request_has_a_form_if_nothing_of_it_depends_on_its_contents(oip, outputs, changed, of_lane, found):
    held = lane(**of_lane)
    assert oip.plain(held, asked(*outputs, **changed)) == found
    held.sessions = {}
    assert oip.plain(held, asked()) is None


def test_a_form_is_parsed_once_for_a_lane_and_anew_for_the_next_one(oip, frontend, monkeypatch):
    parsed = []

    def read(parts):
        parsed.append(parts)
        return asked(inputs=[Input("x", "FP32", (2, 2), bytes(16), raw=True)]) if parts != b"none" else None

    forms = Forms(oip, read, None)
    assert forms.get(b"a") is None and parsed == [b"a"], "there is no lane yet"
    frontend.held = lane()
    form = forms.get(b"a")
    assert form.held is frontend.held and forms.get(b"a") is form and parsed == [b"a"] * 2
    form.held.retired = True
    frontend.held = lane()
    assert forms.get(b"a") is not form and forms.get(b"a").held is frontend.held and parsed == [b"a"] * 3
    assert forms.get(b"none") is forms.get(b"none") is None and parsed[3:] == [b"none"]
    monkeypatch.setattr(forms_module, "_MOST_FORMS", 3)
    forms.get(b"b")
    assert len(forms._forms) == 3
    forms.get(b"c")
    assert [*forms._forms] == [b"c"]


def test_a_request_of_another_size_or_that_is_invalid_has_no_form(oip, frontend):
    frontend.held = lane()
    for wrong in (
        asked(inputs=[Input("x", "FP32", (2, 2), bytes(15), raw=True)]),
        asked(inputs=[Input("x", "FP32", (2, 3), bytes(24), raw=True)]),
        asked(("none", {})),
        asked(version="new"),
    ):
        assert Forms(oip, lambda _parts, wrong=wrong: wrong, None).get(b"a") is None


def test_the_rows_of_a_form_lie_in_its_requests_bytes(oip, frontend):
    frontend.held = lane()
    form = Forms(oip, lambda _: asked(), None).get(b"a")
    data = b"head" + bytes(4) + X.tobytes()
    rows = form.rows(bytearray(data), [(8, 16)])
    np.testing.assert_array_equal(rows["x"], X)
    assert form.rows(data, [(8, 15)]) is None and form.rows(data, []) is None
    assert (form.n, form.sizes, form.inputs, form.outputs) == (2, [16], ["x"], ["score"]) and not form.pinned


def documented(**changed):
    of_model = {
        "name": "mean", "state": "ready", "reason": "", "inputs": {"x": {}}, "outputs": {}, "max_batch": 3,
        "weights": {"version": 5, "newest": 6}, **changed,
    }  # fmt: skip
    panels = {"panel": {"one": {"model": "mean"}, "two": {"model": "other"}, "three": {"model": "mean"}}}
    other = {**of_model, "name": "other", "state": "ready"}
    return {"server": {"state": "serving"}, "models": [of_model, other], "panels": panels}


class Readiness:
    """Why a model does not answer, as the frontend finds it by asking."""

    def __init__(self):
        self.asked = []

    async def ask(self, name, version):
        self.asked.append((name, version))
        return f"{name} {version} does not answer"

    async def silent(self, name):
        self.asked.append((name,))
        return f"{name} is silent" if name == "mean" else ""


@pytest.mark.parametrize(
    ("name", "version", "changed", "reason", "asked"),
    [
        ("mean", "", {}, "mean is silent", [("mean",)]),
        ("mean", "3", {}, "mean 3 does not answer", [("mean", 3)]),
        ("mean", "0", {}, "version 0 of 'mean' is not held, 5 is the newest", []),
        ("mean", "0", {"weights": {"version": 0, "newest": 0}}, "mean is silent", [("mean",)]),
        ("mean", "", {"state": "loading"}, "mean is silent", [("mean",)]),
        ("mean", "", {"state": "failed"}, "the server is serving, model 'mean' is failed", []),
        ("mean", "3", {"state": "sleeping"}, "the server is serving, model 'mean' is sleeping", []),
        ("other", "", {}, "", [("other",)]),
        ("panel", "", {}, "mean is silent", [("mean",), ("other",)]),
    ],
)
async def test_why_a_model_is_not_ready_is_asked_of_those_who_know(
    oip, frontend, name, version, changed, reason, asked
):
    oip._source.document, frontend.readiness = documented(**changed), Readiness()
    assert await oip.model_reason(name, version) == reason
    assert frontend.readiness.asked == asked


async def test_no_model_of_a_server_that_drains_is_ready(oip, frontend):
    oip._source.document, frontend.readiness = documented(), Readiness()
    oip._source.document["server"]["state"] = "draining"
    assert await oip.model_reason("mean", "") == "the server is draining, model 'mean' is ready"
    assert not frontend.readiness.asked
    with pytest.raises(ModelNotFound):
        await oip.model_reason("none", "")


async def test_what_is_said_of_models_is_as_it_is_now(oip):
    oip._source.document = documented()
    counts = ("requests", "rows", "batches", "failed", "expired", "refused", "cache_hits", "cache_misses")
    for one in oip._source.document["models"]:
        one.update(dict.fromkeys(counts, 0))
        one["histograms"] = {name: [] for name in ("queue_ns", "forward_ns", "request_ns")}
    assert (await oip.described("mean", "6"))["name"] == "mean"
    assert [one["name"] for one in await oip.statistics("", "")] == ["mean", "other"]
    assert [one["name"] for one in await oip.statistics("other", "")] == ["other"]
    assert [one["name"] for one in await oip.index("", ready=True)] == ["mean", "other"]
    with pytest.raises(ModelNotFound, match="no repository 'r'"):
        await oip.index("r", ready=True)
    with pytest.raises(Refused, match="'panel' is a panel: its members have statistics") as refused:
        await oip.statistics("panel", "")
    assert refused.value.code == Code.UNSUPPORTED


async def test_a_place_in_a_region_that_is_not_there_is_refused_with_those_that_are(oip):
    assert "no region 's' is registered; there are: none" in str(
        await refusal(oip, asked(("score", place(8, region="s"))), Error)
    )
