"""What the Open Inference Protocol says of models, made of the server's status, and what it asks of the repository."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest

from jurybox.protocol.errors import Code, Error, ModelNotFound, Refused, ServerGone
from jurybox.protocol.wire import BEREFT
from jurybox.server.frontend.panels import TOTAL
from jurybox.server.gateway.inference import models
from jurybox.server.gateway.inference.models import Repository

IMAGE = {"dtype": "uint8", "shape": [4, 4, 3]}
SCORE = {"dtype": "float32", "shape": []}


def model(name="photo", **changed):
    return {
        "name": name, "state": "ready", "reason": "", "inputs": {"image": IMAGE}, "outputs": {"score": SCORE},
        "max_batch": 64, "session_state": {}, "parameters": {},
        "requests": 10, "rows": 40, "batches": 5, "failed": 1, "expired": 2, "refused": 4, "cache_hits": 6,
        "cache_misses": 7, "weights": {"version": 5, "newest": 6},
        "histograms": {"queue_ns": [9, 0, 2], "forward_ns": [9, 3], "request_ns": [9, 1, 0, 1]},
        **changed,
    }  # fmt: skip


def documented(*found, **panels):
    return {"models": [*found], "panels": panels}


def test_counts_are_exact_and_times_are_sums_of_the_middles_of_their_buckets():
    found = models.statistics(model())
    assert (found["name"], found["version"], found["last_inference"]) == ("photo", "5", 0)
    assert (found["inference_count"], found["execution_count"]) == (40, 5)
    assert found["inference_stats"] == {
        "success": {"count": 10, "ns": round(2**0.5 + 2**2.5)},
        "fail": {"count": 7, "ns": 0},
        "queue": {"count": 10, "ns": round(2 * 2**1.5)},
        "compute_input": {"count": 10, "ns": 0},
        "compute_infer": {"count": 5, "ns": round(3 * 2**0.5)},
        "compute_output": {"count": 10, "ns": 0},
        "cache_hit": {"count": 6, "ns": 0},
        "cache_miss": {"count": 7, "ns": 0},
    }


def test_a_large_sum_of_times_is_whole_nanoseconds():
    found = models.statistics(model(histograms=dict.fromkeys(("queue_ns", "forward_ns", "request_ns"), [0] * 30 + [7])))
    assert found["inference_stats"]["queue"] == {"count": 10, "ns": round(7 * 2**29.5)}


def test_a_models_metadata_has_its_rows_first():
    found = models.metadata(model(inputs={"image": IMAGE, "said": {"dtype": "bytes", "shape": [], "capacity": 9}}))
    assert found["inputs"] == [
        {"name": "image", "datatype": "UINT8", "shape": [-1, 4, 4, 3]},
        {"name": "said", "datatype": "BYTES", "shape": [-1]},
    ]
    assert found["outputs"] == [{"name": "score", "datatype": "FP32", "shape": [-1]}]
    assert (found["name"], found["versions"], found["platform"]) == ("photo", ["5"], "jurybox")


def test_a_models_configuration_is_tritons_and_has_the_whole_contract_beside_it():
    said = {"dtype": "bytes", "shape": [], "capacity": 9}
    small = {"dtype": "float8_e4m3fn", "shape": [2], "finite": True}
    found = models.config(model(inputs={"image": IMAGE, "said": said}, outputs={"score": SCORE, "small": small}), 2.5)
    assert found["max_batch_size"] == 64 and found["dynamic_batching"] == {} and "sequence_batching" not in found
    assert [one["data_type"] for one in (*found["input"], *found["output"])] == [
        "TYPE_UINT8", "TYPE_STRING", "TYPE_FP32", "TYPE_INVALID",
    ]  # fmt: skip
    assert [one["dims"] for one in found["output"]] == [[], [2]]
    assert json.loads(found["parameters"]["jurybox"]["string_value"]) == {
        "inputs": [["image", "uint8", [4, 4, 3], 0, False], ["said", "bytes", [], 9, False]],
        "outputs": [["score", "float32", [], 0, False], ["small", "float8_e4m3fn", [2], 0, True]],
        "state": [],
    }
    free = {"strength": {"input": "k", "default": 0.5}}
    found = models.config(model(session_state={"h": SCORE}, parameters=free), 2.5)
    assert found["sequence_batching"] == {"max_sequence_idle_microseconds": 2_500_000}
    assert "dynamic_batching" not in found
    contract = json.loads(found["parameters"]["jurybox"]["string_value"])
    assert contract["parameters"] == {"strength": ["k", 0.5]} and contract["state"] == [["h", "float32", [], 0, False]]


def test_a_panel_has_the_inputs_of_all_members_and_the_oldest_weights_among_them():
    document = documented(
        model("a", max_batch=8, weights={"version": 4, "newest": 9}),
        model("b", inputs={"image": IMAGE, "said": {"dtype": "bytes", "shape": []}}, max_batch=16),
        panel={"one": {"model": "a"}, "two": {"model": "b"}},
    )
    found = models.find(document, "panel")
    assert (found["name"], found["state"], found["reason"]) == ("panel", "ready", "")
    assert found["max_batch"] == 8 and found["weights"] == {"version": 4, "newest": 9}
    assert [*found["inputs"]] == ["image", "said"] and [*found["outputs"]] == [TOTAL, "one", "two"]
    assert all(one == SCORE for one in found["outputs"].values())
    document["models"][1] |= {"state": "loading", "reason": "it loads", "inputs": {}}
    found = models.find(document, "panel")
    assert (found["state"], found["reason"], found["inputs"]) == ("loading", "member 'b': it loads", {})
    with pytest.raises(Refused, match="model 'panel' is loading: member 'b': it loads") as refused:
        models.described(document, "panel", "")
    assert refused.value.code == Code.NOT_READY


def test_a_model_is_found_by_its_name_and_by_versions_that_were_published():
    document = documented(model("b"), model("a"), panel={"one": {"model": "a"}})
    assert models.find(document, "a")["name"] == "a"
    with pytest.raises(ModelNotFound, match="no model 'c' is served here; there are: a, b, panel"):
        models.find(document, "c")
    with pytest.raises(ModelNotFound, match="no model 'c' is served here; there are: none"):
        models.find(documented(), "c")
    assert models.described(document, "a", "6")["name"] == models.described(document, "a", "")["name"] == "a"
    with pytest.raises(ModelNotFound, match="version 7 of model 'a' was never published: the newest is 6"):
        models.described(document, "a", "7")
    with pytest.raises(Refused, match="^model 'a' is failed$"):
        models.described(documented(model("a", state="failed", inputs={})), "a", "")


def test_the_index_has_the_state_of_each_model_in_tritons_words():
    states = ("ready", "loading", "failed", "quarantined")
    document = documented(
        *(model(state, state=state, reason=f"why {state}") for state in states),
        model("asleep", state="sleeping"), model("asleep for long", state="sleeping", reason="nobody asked"),
    )  # fmt: skip
    found = models.index(document, ready=False)
    assert [one["state"] for one in found] == ["READY", "LOADING", *["UNAVAILABLE"] * 4]
    assert found[0] == {"name": "ready", "version": "5", "state": "READY", "reason": "why ready"}
    assert found[4]["reason"] == models.SLEEPS and found[5]["reason"] == f"{models.SLEEPS}: nobody asked"
    assert [one["name"] for one in models.index(document, ready=True)] == ["ready"]


class Server:
    """A connection's server, which notes what it is asked."""

    def __init__(self):
        self.asked, self.error = [], None

    def __getattr__(self, name):
        def note(*given, **named):
            self.asked.append((name, *given, named))
            if self.error is not None:
                raise self.error

        return note


@pytest.fixture
def server():
    return Server()


@pytest.fixture
def repository(server):
    async def call(work):
        return work(server)

    return Repository(SimpleNamespace(call=call))


@pytest.mark.parametrize(
    ("parameters", "asked"),
    [
        ({}, ("load", "m", {"timeout": 120.0})),
        ({"wake": False}, ("load", "m", {"timeout": 120.0})),
        ({"wake": True}, ("wake", "m", {"timeout": 120.0})),
        ({"keep": 5}, ("keep", "m", 5.0, {})),
        (
            {"settings": '{"factory": "a:b"}', "keep": 1.5},
            ("load", "m", {"factory": "a:b"}, {"keep": 1.5, "timeout": 120.0, "remote": True}),
        ),
        (
            {"settings": '{"factory": "a:b"}'},
            ("load", "m", {"factory": "a:b"}, {"keep": 0.0, "timeout": 120.0, "remote": True}),
        ),
    ],
)
async def test_a_load_is_what_its_parameters_say(repository, server, parameters, asked):
    await repository.load("", "m", parameters)
    assert server.asked == [asked]


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"wake": True, "keep": 1}, "wake restores a model as it was"),
        ({"wake": "true"}, "expected true or false"),
        ({"config": "{}"}, "parameter 'config': Triton's files and settings name code to run"),
        ({"settings": 3}, "expected settings, JSON in a string, and keep, seconds"),
        ({"keep": True}, "and keep, seconds"),
        ({"keep": "5"}, "and keep, seconds"),
    ],
)
async def test_a_load_with_other_parameters_is_refused_and_does_nothing(repository, server, parameters, said):
    with pytest.raises(Error, match=said):
        await repository.load("", "m", parameters)
    with pytest.raises(ModelNotFound, match="no repository 'r'"):
        await repository.load("r", "m", {})
    assert not server.asked


@pytest.mark.parametrize(
    ("parameters", "asked"),
    [
        ({}, ("unload", "m", {})),
        ({"unload_dependents": True, "sleep": False}, ("unload", "m", {})),
        ({"sleep": True}, ("sleep", "m", {"timeout": 120.0})),
    ],
)
async def test_an_unload_may_be_a_sleep(repository, server, parameters, asked):
    await repository.unload("", "m", parameters)
    with pytest.raises(Refused, match="parameter 'force' is not known here; there are: unload_dependents, sleep"):
        await repository.unload("", "m", {"force": True, "sleep": True})
    with pytest.raises(ModelNotFound, match="no repository 'r'"):
        await repository.unload("r", "m", {})
    assert server.asked == [asked]


@pytest.mark.parametrize("error", [None, ServerGone("it is gone"), ModelNotFound("it is unloaded")])
async def test_a_model_whose_client_has_gone_is_kept_for_a_while_only(repository, server, error):
    server.error = error
    repository.keep_no_longer("m")
    (task,) = repository._shortening
    await task
    await asyncio.sleep(0)
    assert server.asked == [("keep", "m", BEREFT, {})] and not repository._shortening
