"""What the OpenAPI description allows, and what it doesn't, sent to every HTTP path by schemathesis."""

import gzip
import json
import zlib
from random import Random

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.fuzz.messages import bent

_CHANGES_MODELS = ("/load", "/unload")  # of which the models that are served shall remain

SHORT = pytest.param(4, id="short")
AGAIN = 19  # of a hundred thousand, each comes so often once more, bent
LONG = pytest.param(600, id="long", marks=[pytest.mark.slow, pytest.mark.timeout(1500)])


def told_why(answer):
    """Whether a failure says in JSON what it is: an exception that got through would not."""
    try:
        content = answer.json()
    except ValueError:
        return False
    return isinstance(content, dict) and bool({"error", "detail", "status", "ready", "live"} & content.keys())


@pytest.mark.parametrize("examples", [SHORT, LONG])
def test_every_path_of_the_description_answers_what_it_does_not_understand(server, nothing_leaks, examples):
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
            assert answer.status_code != 500 or told_why(answer), (case, answer.content[:300])
            if answer.status_code >= 400 and answer.content and case.method != "HEAD":
                assert told_why(answer), (case, answer.status_code, answer.content[:300])

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

    @settings(
        max_examples=-(-count // (again + 1)),
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        derandomize=count < 1000,
    )
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
        for turn in range(again + 1):
            sent = bent(content, random) if turn else content
            answer = client.post("/v2/models/affine/infer", headers=headers, content=sent)
            assert 400 <= answer.status_code < 500 or answer.status_code == 501, (
                sent[:300], headers, answer.status_code, answer.content[:300],
            )  # fmt: skip
            assert told_why(answer)
            nothing_leaks.came(1)

    with httpx.Client(base_url=f"http://{server.told['http']}", timeout=30) as client:
        fuzz()
