"""What trainers' own clients send, byte for byte, as a proxy in front of a server has recorded it.

It stands in for those of test_upstream_clients.py that are not installed. Only Host and the lengths are filled in here.
A request whose sample has no score gets an error status and no number, because none of these clients looks further.
"""

from __future__ import annotations

import json
import socket
from http.client import HTTPResponse

import pytest
from tests.serving import serving

MODELS = {
    name: {"factory": f"tests.reward_models:{name}", "max_batch": 32, "rows": 512, "lane_rows": 32}
    for name in ("text_length", "progress")
}
DIALECTS = {
    "texts": {"speaks": "reward_model", "model": "text_length", "output": "score"},
    "lmdeploy": {"speaks": "reward_model", "model": "text_length", "output": "score", "like": "lmdeploy"},
    "nemo_gym": {"model": "text_length", "output": "score", "port": 0},
    "robometer": {"model": "progress", "output": "score"},
}
REQUESTS = b"""User-Agent: python-requests/2.34.2
Accept-Encoding: gzip, deflate, br
Accept: */*
Connection: keep-alive
Content-Length: {}
Content-Type: application/json
"""
AIOHTTP = b"""Accept: */*
Accept-Encoding: gzip, deflate, br
User-Agent: Python/3.11 aiohttp/3.14.5
Content-Length: {}
Content-Type: application/json
"""
NEMO = b"""Content-Type: application/json
Accept: */*
Accept-Encoding: gzip, deflate, br
User-Agent: Python/3.11 aiohttp/3.14.5
Content-Length: {}
"""
SCRIPT = REQUESTS.replace(b"application/json", b"multipart/form-data; boundary=2e12af116939726b2179cff5ac2efd5a")
EVALUATIONS = b"""Connection: close
Accept: */*
Accept-Encoding: gzip, deflate, br
User-Agent: Python/3.11 aiohttp/3.14.5
Content-Length: {}
Content-Type: multipart/form-data; boundary=273e16c5cd7e40968a6107e0b785c9c7
"""
POLAR = rb'["2+2?\n4<|reward|>2+2?\n4[UNUSED_TOKEN_130]", "2+2?\n4<|reward|>2+2?\nfour[UNUSED_TOKEN_130]"]'
LENGTHS = [40.0, 43.0]
ROW = (
    b'{"responses_create_params":{"background":null,"include":null,"input":[{"content":"2+2?","role":"user","type":"me'
    b'ssage"}],"instructions":null,"max_output_tokens":null,"max_tool_calls":null,"metadata":null,"model":null,"parall'
    b'el_tool_calls":true,"previous_response_id":null,"prompt":null,"reasoning":null,"service_tier":null,"store":null,'
    b'"temperature":null,"text":null,"tool_choice":"auto","tools":[],"top_logprobs":null,"top_p":null,"truncation":nul'
    b'l,"user":null,"stream":null},'
)
RESPONSE = (
    b'"response":{"id":"r","created_at":1.0,"error":null,"incomplete_details":null,"instructions":null,"metadata":null'
    b',"model":"m","object":"response","output":[{"prompt_token_ids":[1,2],"generation_token_ids":[3],"generation_log_'
    b'probs":[-0.5],"routed_experts":null,"id":"m","content":[{"annotations":[],"text":"four","type":"output_text","lo'
    b'gprobs":null}],"role":"assistant","status":"completed","type":"message"}],"parallel_tool_calls":true,"temperatur'
    b'e":null,"tool_choice":"auto","tools":[],"top_p":null,"background":null,"conversation":null,"max_output_tokens":n'
    b'ull,"max_tool_calls":null,"previous_response_id":null,"prompt":null,"prompt_cache_key":null,"reasoning":null,"sa'
    b'fety_identifier":null,"service_tier":null,"status":null,"text":null,"top_logprobs":null,"truncation":null,"usage'
    b'":null,"user":null},'
)
COLUMN = b'"expected_answer":"4"}'


def film(frames: int, value: bytes) -> bytes:
    head = b"{'descr': '|u1', 'fortran_order': False, 'shape': (%d, 8, 8, 3), }" % frames
    return b"\x93NUMPY\x01\x00v\x00" + head.ljust(117) + b"\n" + value * (frames * 192)


def script(value: bytes, steps: bytes = b"false") -> bytes:
    """A form of Robometer's example_inference.py, by requests."""
    begin = b"--2e12af116939726b2179cff5ac2efd5a\r\nContent-Disposition: form-data; name="
    sample = (
        b'{"sample_type": "progress", "trajectory": {"frames": {"__numpy_file__": "sample_0_trajectory_frames"}, '
        b'"frames_shape": [3, 8, 8, 3], "task": "pick", "id": "0", "metadata": {"subsequence_length": 3}, '
        b'"video_embeddings": null}}'
    )
    frames = b'"sample_0_trajectory_frames"; filename="sample_0_trajectory_frames.npy"\r\n'
    return (
        begin + b'"sample_0"\r\n\r\n' + sample + b"\r\n" + begin + b'"use_frame_steps"\r\n\r\n' + steps
        + b"\r\n" + begin + frames + b"Content-Type: application/octet-stream\r\n\r\n" + film(3, value) + b"\r\n"
        + b"--2e12af116939726b2179cff5ac2efd5a--\r\n"
    )  # fmt: skip


def evaluations(*values: bytes) -> bytes:
    """A form of Robometer's eval_utils.py, by aiohttp: the arrays come first."""
    begin = b"--273e16c5cd7e40968a6107e0b785c9c7\r\nContent-Type: "
    names = [b"sample_%d" % i for i in range(len(values))]
    return b"".join(
        begin + b'application/octet-stream\r\nContent-Disposition: form-data; name="%b_trajectory_frames"; filename="%b'
        b'_trajectory_frames.npy"\r\n\r\n' % (name, name) + film(4, value) + b"\r\n"
        for name, value in zip(names, values, strict=True)
    ) + b"".join(
        begin + b'text/plain; charset=utf-8\r\nContent-Disposition: form-data; name="%b"\r\n\r\n' % name
        + b'{"trajectory": {"frames": {"__numpy_file__": "%b_trajectory_frames"}, "frames_shape": [4, 8, 8, 3], ' % name
        + b'"embeddings_path": null, "video_embeddings": null, "text_embedding": null, "id": null, "task": "pick", "lan'
        b'g_vector": null, "data_source": null, "quality_label": null, "is_robot": null, "target_progress": null, "part'
        b'ial_success": null, "success_label": null, "predict_last_frame_mask": null, "metadata": null, "data_g'
        b'en_strategy": null}, "sample_type": "progress", "data_gen_strategy": null, "resample_attempts": 1}\r\n'
        for name in names
    ) + b"--273e16c5cd7e40968a6107e0b785c9c7--\r\n"  # fmt: skip


# The client, the path, the request's head and body, and what the client reads from the answer.
RECORDED = {
    "POLAR, sglang": (
        "/dialects/texts/classify", REQUESTS, b'{"model": "tmptkx0bmkn", "text": ' + POLAR + b"}",
        lambda told: [one["embedding"][0] for one in told], LENGTHS,
    ),
    "POLAR, vllm": (
        "/dialects/texts/pooling", REQUESTS, b'{"input": ' + POLAR + b"}",
        lambda told: [one["data"][-1][0] for one in told["data"]], LENGTHS,
    ),
    "POLAR, lmdeploy": (
        "/dialects/lmdeploy/pooling", REQUESTS, b'{"input": ' + POLAR + b"}",
        lambda told: [one["data"] for one in told["data"]], LENGTHS,
    ),
    "verl, vllm": (
        "/dialects/texts/classify", AIOHTTP,
        b'{"model": "rm", "input": "[user]2+2?[assistant]four", "use_activation": false}',
        lambda told: told["data"][-1]["probs"][-1], 25.0,
    ),
    "verl, sglang": (
        "/dialects/texts/v1/embeddings", AIOHTTP, b'{"model": "rm", "input": "[user]2+2?[assistant]four"}',
        lambda told: told["data"][-1]["embedding"][-1], 25.0,
    ),
    "NeMo Gym, seed": ("/seed_session", NEMO, ROW + COLUMN, lambda told: told, {}),
    "NeMo Gym, verify": (
        "/verify", NEMO, ROW + RESPONSE + COLUMN,
        lambda told: [told["reward"], told["expected_answer"], told["response"]["output"][0]["generation_token_ids"]],
        [4.0, "4", [3]],
    ),
    "Robometer, script": (
        "/dialects/robometer/evaluate_batch_npy", SCRIPT, script(b"\x33"),
        lambda told: told["outputs_progress"]["progress_pred"][0], [pytest.approx(0.2)],
    ),
    "Robometer, evaluations": (
        "/dialects/robometer/evaluate_batch_npy", EVALUATIONS, evaluations(b"\x33", b"\x66"),
        lambda told: [one[-1] for one in told["outputs_progress"]["progress_pred"]],
        [pytest.approx(0.2), pytest.approx(0.4)],
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("server"), MODELS, dialects=DIALECTS, http="127.0.0.1:0") as one:
        yield one


def request(path: str, where: str, head: bytes, body: bytes) -> bytes:
    lines = head.replace(b"{}", str(len(body)).encode()).replace(b"\n", b"\r\n")
    return f"POST {path} HTTP/1.1\r\nHost: {where}\r\n".encode() + lines + b"\r\n" + body


def sent(server, path: str, head: bytes, body: bytes) -> tuple[int, bytes]:
    where = server.listening("http") if path.startswith("/dialects") else server.listening("dialects")["nemo_gym"]
    host, port = where.rsplit(":", 1)
    with socket.create_connection((host, int(port)), 60) as connection:
        connection.sendall(request(path, where, head, body))
        answer = HTTPResponse(connection)
        answer.begin()
        return answer.status, answer.read()


@pytest.mark.parametrize("client", RECORDED)
def test_a_recorded_request_is_answered_as_its_client_reads_it(server, client):
    path, head, body, read, right = RECORDED[client]
    status, answer = sent(server, path, head, body)
    assert status == 200, answer
    assert read(json.loads(answer)) == right


@pytest.mark.parametrize(
    ("client", "body"),
    [
        *(
            (client, body.replace(b"four", said))
            for client, (_, _, body, _, _) in RECORDED.items()
            for said in (b"a bad one", b"nan")
            if b"four" in body
        ),
        ("Robometer, script", script(b"\x00")),
        ("Robometer, script", script(b"\xff")),  # beyond the scale, to which its evaluations would move it
        ("Robometer, script", script(b"\x33", b"true")),
        ("Robometer, evaluations", evaluations(b"\x33", b"\x00")),
        ("Robometer, evaluations", evaluations(b"\x33", b"\xff")),
    ],
)
def test_a_recorded_request_without_a_score_gets_a_status_of_4xx_and_nothing_that_its_client_reads(
    server, client, body
):
    path, head, _, read, _ = RECORDED[client]
    status, answer = sent(server, path, head, body)
    assert 400 <= status < 500
    with pytest.raises((KeyError, TypeError, IndexError)):
        read(json.loads(answer))
