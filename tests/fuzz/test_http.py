"""What the OpenAPI description allows, and what it doesn't, sent to every HTTP path by schemathesis."""

from __future__ import annotations

import gzip
import json
import socket
import zlib
from random import Random
from typing import BinaryIO

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.fuzz.messages import CLIENTS, EXTENTS, OPEN, SEQUENCES, STEPS, STRINGS, bent, sending

_CHANGES_MODELS = ("/load", "/unload")  # of which the models that are served shall remain

SHORT = pytest.param(4, id="short")
AGAIN = 19  # of a hundred thousand, each comes so often once more, bent
AT_ONCE = 10  # connections
LONG = pytest.param(600, id="long", marks=[pytest.mark.slow, pytest.mark.timeout(1500)])


def told_why(content: bytes) -> bool:
    """Return whether a failure has a JSON body: an unhandled exception has none."""
    try:
        told = json.loads(content)
    except ValueError:
        return False
    return isinstance(told, dict) and bool({"error", "detail", "status", "ready", "live"} & told.keys())


class Poster:
    """Posts on several connections at once, which are kept: an HTTP library would take longer than the gateway."""

    def __init__(self, where: str, path: str) -> None:
        self._host, self._port = where.rsplit(":", 1)
        self._head = f"POST {path} HTTP/1.1\r\nHost: {where}\r\n".encode()
        self._connections = [self._connect() for _ in range(AT_ONCE)]

    def post(self, headers: dict[str, str], bodies: list[bytes]) -> list[tuple[int, bytes]]:
        """Status and content of each answer, in the order of the bodies."""
        given = b"".join(f"{name}: {value}\r\n".encode() for name, value in headers.items())
        answers = []
        for first in range(0, len(bodies), AT_ONCE):
            batch = bodies[first : first + AT_ONCE]
            for body, (connection, _) in zip(batch, self._connections, strict=False):
                connection.sendall(self._head + given + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            for number in range(len(batch)):
                status, content, ends = answer_of(self._connections[number][1])
                answers.append((status, content))
                if ends:
                    self._close(number)
                    self._connections[number] = self._connect()
        return answers

    def close(self) -> None:
        for number in range(AT_ONCE):
            self._close(number)

    def _connect(self) -> tuple[socket.socket, BinaryIO]:
        connection = socket.create_connection((self._host, int(self._port)), timeout=30)
        return connection, connection.makefile("rb")

    def _close(self, number: int) -> None:
        for end in self._connections[number]:
            end.close()


def answer_of(lines: BinaryIO) -> tuple[int, bytes, bool]:
    """Status, content, and whether the connection ends with it."""
    status = int(lines.readline().split()[1])
    headers = {}
    while line := lines.readline().strip():
        name, _, value = line.partition(b":")
        headers[name.lower()] = value.strip()
    return status, lines.read(int(headers[b"content-length"])), headers.get(b"connection") == b"close"


@pytest.mark.parametrize("examples", [SHORT, LONG])
def test_every_path_of_the_description_answers_what_it_does_not_understand(server, nothing_leaks, examples):
    import schemathesis  # not above, nor as pytest's plugin: each worker of a run would import it

    base = f"http://{server.told['http']}"
    schema = schemathesis.openapi.from_url(f"{base}/openapi.json")
    paths = 0
    for result in schema.get_all_operations():
        operation = result.ok()
        if operation.path.endswith(_CHANGES_MODELS):
            continue
        paths += 1

        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            derandomize=examples < 100,
            phases=[Phase.explicit, Phase.generate],
        )
        @given(operation.as_strategy())
        def fuzz(case):
            answer = case.call(base_url=base, timeout=30)
            assert answer.status_code != 500 or told_why(answer.content), (case, answer.content[:300])
            if answer.status_code >= 400 and answer.content and case.method != "HEAD":
                assert told_why(answer.content), (case, answer.status_code, answer.content[:300])

        fuzz()
    assert paths > 5


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(150, id="short"),
        pytest.param(100_000, id="long", marks=[pytest.mark.slow, pytest.mark.timeout(3000)]),
    ],
)
def test_any_body_to_infer(server, nothing_leaks, count):
    lengths = st.one_of(st.none(), st.sampled_from(["0", "5", "-1", "x", "99999999999", "1" * 5000]))
    text = st.text(st.characters(codec=None), max_size=5)  # halves of surrogate pairs among them
    packed = {"": lambda body: body, "gzip": gzip.compress, "deflate": zlib.compress}

    again = AGAIN if count >= 10_000 else 0
    random = Random(count)

    @sending(-(-count // (again + 1)), same=count < 1000)
    @given(
        st.one_of(
            st.binary(max_size=300),
            st.recursive(
                st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), text),
                lambda inner: st.one_of(
                    st.lists(inner, max_size=4),
                    st.dictionaries(
                        st.one_of(
                            st.sampled_from(
                                ["inputs", "outputs", "name", "shape", "datatype", "data", "parameters", "id"]
                            ),
                            text,
                        ),
                        inner,
                        max_size=5,
                    ),
                ),
                max_leaves=12,
            ),
            st.tuples(st.sampled_from(["[", '{"a":', '"",', "{},", "[],", "9", " "]), st.sampled_from([900, 300_000])),
        ),
        lengths,
        st.sampled_from(list(packed)),
        st.integers(0, 12),
    )
    def fuzz(body, length, encoding, cut):
        headers = {} if length is None else {"Inference-Header-Content-Length": length}
        if encoding:
            headers["Content-Encoding"] = encoding
        if isinstance(body, tuple):  # few bytes once they are packed
            body = (body[0] * body[1]).encode()
        content = packed[encoding](body if isinstance(body, bytes) else json.dumps(body).encode())
        content = content[: len(content) - cut]
        sent = [content, *(bent(content, random) for _ in range(again))]
        for body, (status, answer) in zip(sent, poster.post(headers, sent), strict=True):
            assert 400 <= status < 500 or status == 501, (body[:300], headers, status, answer[:300])
            assert told_why(answer), (body[:300], headers, status, answer[:300])
        nothing_leaks.came(len(sent))

    poster = Poster(server.told["http"], "/v2/models/affine/infer")
    try:
        fuzz()
    finally:
        poster.close()
    assert nothing_leaks.sent >= count * 0.8


TEXTS = st.one_of(
    st.sampled_from(["", "a", "\ud800", "x" * 401, 1, None]), st.text(st.characters(codec=None), max_size=4)
)
FLAGS = st.dictionaries(
    st.sampled_from(["sequence_start", "sequence_end", "row_errors", "extents", "binary_data_output"]),
    st.sampled_from([True, False, 1, "true", None]),
    max_size=3,
)
NAMED = st.one_of(
    st.just({}),
    st.builds(lambda name: {"sequence_id": name}, st.one_of(SEQUENCES, st.just("\ud800"), st.just(1.5))),
    st.builds(lambda client, steps: {"session_client": client, "sessions": steps}, CLIENTS, STEPS),
)


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(150, id="short"),
        pytest.param(20_000, id="long", marks=[pytest.mark.slow, pytest.mark.timeout(3000)]),
    ],
)
def test_any_sizes_strings_and_sequences_to_infer(server, nothing_leaks, count):
    @sending(count, same=count < 1000)
    @given(
        st.sampled_from(list(OPEN)),
        st.sampled_from([[1], [2], [0], [-1], [2**40], [1, 1], [1, 2, 2, 3], [2, 0, 5, 3], [1, 2**40, 0, 3], [12]]),
        st.one_of(st.none(), EXTENTS),
        st.one_of(st.lists(TEXTS, max_size=3), st.lists(st.integers(0, 255), max_size=12), STRINGS),
        FLAGS,
        NAMED,
    )
    def fuzz(model, shape, extents, data, flags, named):
        datatype = {"text": "BYTES", "x": "FP32", "image": "UINT8"}[OPEN[model]]
        told = {} if extents is None else {"extents": extents}
        tensor = {"name": OPEN[model], "shape": shape, "datatype": datatype, "parameters": told}
        if isinstance(data, bytes):
            told["binary_data_size"] = len(data)
        else:
            tensor["data"] = data
        head = json.dumps({"inputs": [tensor], "parameters": {**flags, **named}}).encode()
        headers = {"Inference-Header-Content-Length": str(len(head))} if isinstance(data, bytes) else {}
        body = head + data if isinstance(data, bytes) else head
        answer = client.post(f"/v2/models/{model}/infer", headers=headers, content=body)
        known = answer.status_code in (200, 501) or 400 <= answer.status_code < 500
        # A model may raise at what it is given, such as bytes that are no text.
        raised = not known and "the gateway failed" not in answer.json()["error"]
        assert known or raised, (
            body[:300],
            answer.status_code,
            answer.content[:300],
        )
        assert answer.status_code == 200 or told_why(answer.content)
        nothing_leaks.came(1)

    with httpx.Client(base_url=f"http://{server.told['http']}", timeout=30) as client:
        fuzz()
