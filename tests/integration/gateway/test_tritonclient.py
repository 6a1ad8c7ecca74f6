"""An unmodified tritonclient against a real server: its documented calls, over gRPC and HTTP, blocking and asyncio."""

from __future__ import annotations

import queue

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
from tests.serving import wait_until
from tests.tritons import ANSWER, ROWS, observation, plain
from tritonclient.utils import InferenceServerException


def test_health(kind):
    _, client = kind
    assert client.is_server_live() and client.is_server_ready()
    assert client.is_model_ready("affine") and client.is_model_ready("team/moody")


def test_a_version_that_is_not_held_is_not_ready(kind):
    _, client = kind
    assert not client.is_model_ready("affine", "77")


def test_server_metadata(kind):
    _, client = kind
    metadata = plain(client.get_server_metadata())
    assert metadata["name"] == "jurybox"
    assert {"system_shared_memory", "binary_tensor_data", "statistics", "model_repository"} <= set(
        metadata["extensions"]
    )


def test_model_metadata(kind):
    _, client = kind
    metadata = plain(client.get_model_metadata("two"))
    assert (metadata["name"], metadata["versions"], metadata["platform"]) == ("two", ["0"], "jurybox")
    image, scale = metadata["inputs"]
    assert (image["name"], image["datatype"], list(map(int, image["shape"]))) == ("image", "UINT8", [-1, 64, 64, 3])
    assert (scale["datatype"], list(map(int, scale["shape"]))) == ("FP32", [-1])
    assert [output["name"] for output in metadata["outputs"]] == ["brightness", "corner"]


def test_model_config(kind):
    _, client = kind
    config = plain(client.get_model_config("two"))
    config = config.get("config", config)
    assert (config["name"], config["max_batch_size"], config["backend"]) == ("two", 8, "jurybox")
    assert (config["input"][0]["data_type"], list(map(int, config["input"][0]["dims"]))) == ("TYPE_UINT8", [64, 64, 3])
    assert "dynamic_batching" in config


@pytest.mark.parametrize("call", ["get_model_metadata", "get_model_config", "get_inference_statistics"])
def test_the_error_for_an_unknown_model_lists_the_others(kind, call):
    _, client = kind
    with pytest.raises(InferenceServerException, match="no model 'nobody'.*affine"):
        getattr(client, call)("nobody")


def test_infer_with_all_outputs(kind):
    module, client = kind
    answer = client.infer("affine", [observation(module)], request_id="seventh")
    np.testing.assert_array_equal(answer.as_numpy("action"), ANSWER)
    response = plain(answer.get_response())
    assert (response["id"], response["model_name"], response["model_version"]) == ("seventh", "affine", "0")


def test_infer_with_two_inputs_and_one_of_two_outputs(kind):
    module, client = kind
    image = module.InferInput("image", [2, 64, 64, 3], "UINT8")
    image.set_data_from_numpy(np.full((2, 64, 64, 3), 7, np.uint8))
    scale = module.InferInput("scale", [2], "FP32")
    scale.set_data_from_numpy(np.array([1, 10], np.float32))
    answer = client.infer("two", [scale, image], outputs=[module.InferRequestedOutput("brightness")])
    np.testing.assert_array_equal(answer.as_numpy("brightness"), [7, 70])
    assert answer.as_numpy("corner") is None


def test_more_rows_than_a_batch_are_split(kind):
    module, client = kind
    rows = np.arange(4 * 300, dtype=np.float32).reshape(300, 4)  # max_batch is 16, the arena has 256
    answer = client.infer("affine", [observation(module, rows)])
    np.testing.assert_array_equal(answer.as_numpy("action"), 2 * rows + 1)


def test_http_infer_in_json(web):
    tensor = tritonclient.http.InferInput("observation", [3, 4], "FP32")
    tensor.set_data_from_numpy(ROWS, binary_data=False)
    output = tritonclient.http.InferRequestedOutput("action", binary_data=False)
    np.testing.assert_array_equal(web.infer("affine", [tensor], outputs=[output]).as_numpy("action"), ANSWER)


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compressed_requests(kind, algorithm):
    module, client = kind
    if module is tritonclient.http:
        answer = client.infer("affine", [observation(module)], request_compression_algorithm=algorithm,
                              response_compression_algorithm=algorithm)  # fmt: skip
    else:
        answer = client.infer("affine", [observation(module)], compression_algorithm=algorithm)
    np.testing.assert_array_equal(answer.as_numpy("action"), ANSWER)


def test_grpc_async_infer(rpc):
    answers: queue.Queue = queue.Queue()
    for n in range(20):
        rpc.async_infer("affine", [observation(tritonclient.grpc, ROWS + n)], request_id=str(n),
                        callback=lambda result, error: answers.put((result, error)))  # fmt: skip
    for _ in range(20):
        result, error = answers.get(timeout=20)
        assert error is None
        n = int(result.get_response().id)
        np.testing.assert_array_equal(result.as_numpy("action"), 2 * (ROWS + n) + 1)


def test_http_async_infer(web):
    requests = [web.async_infer("affine", [observation(tritonclient.http, ROWS + n)]) for n in range(20)]
    for n, request in enumerate(requests):
        np.testing.assert_array_equal(request.get_result(timeout=20).as_numpy("action"), 2 * (ROWS + n) + 1)


def test_a_stream_answers_in_order_and_survives_an_error(rpc):
    answers: queue.Queue = queue.Queue()
    rpc.start_stream(callback=lambda result, error: answers.put((result, error)))
    for n in range(100):
        name = "nobody" if n == 50 else "affine"
        rpc.async_stream_infer(name, [observation(tritonclient.grpc, ROWS + n)], request_id=str(n))
    for n in range(100):
        result, error = answers.get(timeout=20)
        if n == 50:
            assert "no model 'nobody'" in str(error)
        else:
            assert (error, result.get_response().id) == (None, str(n))
            np.testing.assert_array_equal(result.as_numpy("action"), 2 * (ROWS + n) + 1)
    rpc.stop_stream()


def test_a_stream_marks_the_last_answer_if_requested(rpc):
    answers: queue.Queue = queue.Queue()
    rpc.start_stream(callback=lambda result, error: answers.put((result, error)))
    rpc.async_stream_infer("affine", [observation(tritonclient.grpc)], enable_empty_final_response=True)
    result, _ = answers.get(timeout=20)
    assert result.get_response().parameters["triton_final_response"].bool_param
    rpc.stop_stream()


async def test_asyncio_over_grpc(gateway):
    async with tritonclient.grpc.aio.InferenceServerClient(gateway.grpc) as client:
        assert await client.is_server_ready() and await client.is_model_ready("affine")
        answer = await client.infer("affine", [observation(tritonclient.grpc.aio)])
        np.testing.assert_array_equal(answer.as_numpy("action"), ANSWER)

        async def requests():
            for n in range(10):
                yield {"model_name": "affine", "inputs": [observation(tritonclient.grpc.aio, ROWS + n)]}

        n = 0
        async for result, error in client.stream_infer(requests()):
            assert error is None
            np.testing.assert_array_equal(result.as_numpy("action"), 2 * (ROWS + n) + 1)
            n += 1
        assert n == 10


async def test_asyncio_over_http(gateway):
    async with tritonclient.http.aio.InferenceServerClient(gateway.http) as client:
        assert await client.is_server_ready()
        assert (await client.get_model_metadata("affine"))["name"] == "affine"
        answer = await client.infer("affine", [observation(tritonclient.http.aio)])
        np.testing.assert_array_equal(answer.as_numpy("action"), ANSWER)


def test_a_timeout_is_kept(kind):
    module, client = kind
    slow = np.full((1, 4), 1_000_000, np.float32)  # the model sleeps a second
    with pytest.raises(InferenceServerException) as late:
        client.infer("team/moody", [observation(module, slow)], timeout=200_000)
    assert late.value.status() in ("StatusCode.DEADLINE_EXCEEDED", "504")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"priority": 4}, r"priority=4: expected 1 \(first\), 2 \(normal\) or 3 \(last\)"),
        ({"sequence_id": 7, "sequence_start": True}, "keeps no state between requests"),
        ({"parameters": {"temperature": 1}}, "parameter 'temperature' is not known here"),
        ({"model_version": "77"}, "so no version"),
        ({"model_version": "latest"}, "expected a whole number"),
    ],
)
def test_unsupported_options_are_refused_by_name(kind, options, reason):
    module, client = kind
    with pytest.raises(InferenceServerException, match=reason):
        client.infer("affine", [observation(module)], **options)


def test_classification_is_refused_by_name(kind):
    module, client = kind
    with pytest.raises(InferenceServerException, match="classification is not done here"):
        client.infer("affine", [observation(module)], outputs=[module.InferRequestedOutput("action", class_count=2)])


def test_a_version_pins_the_weights_while_they_are_held(gateway, kind):
    module, client = kind
    with gateway.server.connect() as connection, connection.publisher("policy") as publisher:
        model = connection.model("policy", rows=1)
        for _ in range(4):
            newest = publisher.publish({"scale": np.float32(0), "offset": np.float32(publisher.version + 1)})
            wait_until(lambda: model.infer_reply(ROWS[:1]).version == newest, what="adoption")  # noqa: B023
        model.close()
    for version in ("", str(newest), str(newest - 1)):
        answer = client.infer("policy", [observation(module)], model_version=version)
        assert plain(answer.get_response())["model_version"] == (version or str(newest))
        np.testing.assert_array_equal(answer.as_numpy("action"), np.full((3, 4), int(version or newest)))
    assert client.is_model_ready("policy", str(newest - 1))
    assert plain(client.get_model_metadata("policy"))["versions"] == [str(newest)]
    for version in ("0", "1", str(newest + 1)):
        assert not client.is_model_ready("policy", version)
        with pytest.raises(InferenceServerException, match="version"):
            client.infer("policy", [observation(module)], model_version=version)


def test_statistics_count_requests_rows_and_batches(kind):
    module, client = kind

    def read():
        (model,) = plain(client.get_inference_statistics("affine"))["model_stats"]
        success = model["inference_stats"]["success"]
        return int(model["inference_count"]), int(success["count"]), int(success["ns"]), int(model["execution_count"])

    client.infer("affine", [observation(module)])
    before = read()
    client.infer("affine", [observation(module)])

    def all_counted():  # an engine counts after it has answered
        after = read()
        return after[0] >= before[0] + 3 and after[1] > before[1] and after[2] > before[2] and after[3] > before[3]

    wait_until(all_counted, 30, "all of it counted")
    names = {model["name"] for model in plain(client.get_inference_statistics())["model_stats"]}
    assert names >= {"affine", "two", "policy", "team/moody", "sum"}


def test_unload_and_load(kind):
    module, client = kind

    def states():
        index = plain(client.get_model_repository_index())
        return {model["name"]: model["state"] for model in (index if isinstance(index, list) else index["models"])}

    client.unload_model("team/moody")
    assert "team/moody" not in states()
    with pytest.raises(InferenceServerException, match="no model 'team/moody'"):
        client.infer("team/moody", [observation(module)])
    client.load_model("team/moody")
    assert states()["team/moody"] == "READY"
    np.testing.assert_array_equal(client.infer("team/moody", [observation(module)]).as_numpy("action"), ROWS + 1)
    client.load_model("team/moody")  # again, while it serves
    np.testing.assert_array_equal(client.infer("team/moody", [observation(module)]).as_numpy("action"), ROWS + 1)


def test_a_request_cannot_name_code_to_run(kind):
    _, client = kind
    with pytest.raises(InferenceServerException, match="name code to run"):
        client.load_model("affine", config='{"factory": "os:abort"}')
    with pytest.raises(InferenceServerException, match="no model 'nobody'"):
        client.load_model("nobody")
    assert client.is_model_ready("affine")


def test_trace_and_log_settings_are_refused_with_a_message(kind):
    _, client = kind
    with pytest.raises(InferenceServerException, match="not served here"):
        client.get_log_settings()
    with pytest.raises(InferenceServerException, match="not served here"):
        client.get_trace_settings()
