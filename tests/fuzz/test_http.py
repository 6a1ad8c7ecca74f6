"""What the OpenAPI description allows, and what it doesn't, sent to every HTTP path by schemathesis."""

import json

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

_CHANGES_MODELS = ("/load", "/unload")  # of which the models that are served shall remain

SHORT = pytest.param(4, id="short")
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
    "count", [pytest.param(100, id="short"), pytest.param(5000, id="long", marks=pytest.mark.slow)]
)
def test_any_body_to_infer(server, nothing_leaks, count):
    lengths = st.one_of(st.none(), st.sampled_from(["0", "5", "-1", "x", "99999999999"]))

    @settings(
        max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck), derandomize=True
    )
    @given(
        st.one_of(
            st.binary(max_size=300),
            st.recursive(
                st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
                lambda inner: st.one_of(
                    st.lists(inner, max_size=4),
                    st.dictionaries(
                        st.sampled_from(["inputs", "outputs", "name", "shape", "datatype", "data", "parameters", "id"]),
                        inner,
                        max_size=5,
                    ),
                ),
                max_leaves=12,
            ),
        ),
        lengths,
    )
    def fuzz(body, length):
        headers = {} if length is None else {"Inference-Header-Content-Length": length}
        given_body = {"content": body} if isinstance(body, bytes) else {"content": json.dumps(body)}
        answer = client.post("/v2/models/affine/infer", headers=headers, **given_body)
        assert 400 <= answer.status_code < 500, (body, length, answer.status_code, answer.content[:300])
        assert told_why(answer)

    with httpx.Client(base_url=f"http://{server.told['http']}", timeout=30) as client:
        fuzz()
