"""Words of a request over the Open Inference Protocol: what is no version and no sequence is refused, not guessed."""

from __future__ import annotations

import pytest

from jurybox.protocol.errors import Code, Error, ProtocolMismatch, Refused
from jurybox.protocol.scoreboard import FIRST, LAST, NORMAL
from jurybox.server.gateway.inference.parameters import (
    KNOWN,
    RequestParameters,
    of_tensor,
    request_parameters,
    weights_version,
)


def test_a_models_version_is_a_whole_number_that_weights_can_have():
    assert (weights_version(""), weights_version("7"), weights_version(str(2**63 - 1))) == (0, 7, 2**63 - 1)
    for text in ("newest", "-1", "1.0", " 1", "\uff11", str(2**63), "9" * 5000):
        with pytest.raises(Refused, match="expected a whole number") as refused:
            weights_version(text)
        assert refused.value.code is Code.MODEL_NOT_FOUND


@pytest.mark.parametrize("flag", ["sequence_start", "sequence_end"])
def test_the_start_or_end_of_no_sequence_is_refused(flag):
    with pytest.raises(ProtocolMismatch, match="came without a sequence_id"):
        request_parameters({flag: True})
    request_parameters({flag: False})


@pytest.mark.parametrize(
    "parameters",
    [
        {"sessions": "0"},
        {"session_client": "0" * 32},
        {"session_client": "0" * 32, "sessions": "0", "sequence_id": 1},
        {"session_client": "0" * 31, "sessions": "0"},
        {"session_state": "give"},
        {"sessions": 0},
        {"sequence_start": "perhaps"},
        {"timeout": -1},
        {"priority": 4},
    ],
)
def test_parameters_that_contradict_each_other_or_are_no_values_are_refused(parameters):
    with pytest.raises(Error):
        request_parameters(parameters)


CLIENT = "0123456789abcdef" * 2


def test_a_request_without_parameters_has_the_defaults():
    assert request_parameters({}) == RequestParameters()
    assert RequestParameters() == RequestParameters(
        None, final=False, row_errors=False, extents=False, steps=None, over="", state="", priority=NORMAL, free={}
    )


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"timeout": 1_500_000}, {"seconds": 1.5}),
        ({"timeout": "1500000"}, {"seconds": 1.5}),
        ({"timeout": 0}, {"seconds": None}),
        ({"priority": 1}, {"priority": FIRST}),
        ({"priority": 3}, {"priority": LAST}),
        ({"priority": 0}, {"priority": NORMAL}),
        ({"row_errors": True}, {"row_errors": True}),
        ({"extents": True}, {"extents": True}),
        ({"triton_enable_empty_final_response": True}, {"final": True}),
        ({"other": 7}, {"free": {"other": 7}}),
        ({"session_client": CLIENT, "sessions": ""}, {"over": CLIENT}),
        ({"sequence_id": 0}, {"steps": None}),
        ({"sequence_id": ""}, {"steps": None}),
    ],
)
def test_each_parameter_says_one_thing(parameters, expected):
    assert request_parameters(parameters) == RequestParameters(**expected)


@pytest.mark.parametrize("name", [1, 2**64 - 1, "robot 7"])
@pytest.mark.parametrize(
    ("flags", "step", "end"),
    [({}, None, False), ({"sequence_start": True}, 0, False), ({"sequence_end": True}, None, True)],
)
def test_a_sequence_begins_goes_on_and_ends(name, flags, step, end):
    steps = request_parameters({"sequence_id": name, **flags}).steps
    assert (steps.sequences, steps.steps, steps.end, steps.reports_loss) == (((name,),), (step,), end, False)


def test_our_own_clients_steps_are_read_by_row():
    found = request_parameters({"session_client": CLIENT, "sessions": "3:0;1:17", "session_state": "get"})
    assert found.state == "get"
    steps = found.steps
    assert (steps.sequences, steps.steps, steps.end, steps.reports_loss) == (
        ((CLIENT, 3), (CLIENT, 1)), (0, 17), False, True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("parameters", "why"),
    [
        ({"sequence_id": -1}, "sequence_id=.*expected a whole number"),
        ({"sequence_id": 2**64}, "sequence_id=.*expected a whole number"),
        ({"sequence_id": 1.0}, "sequence_id=.*expected a whole number"),
        ({"sequence_id": True}, "sequence_id=.*expected a whole number"),
        ({"sequence_id": "x" * 10_000}, "sequence_id=.*expected a whole number"),
        ({"sequence_id": [1]}, "sequence_id=a list"),
        ({"session_state": "get"}, "came without a sequence"),
        ({"session_client": CLIENT, "sessions": "1:0;1:1"}, "a session occurs twice"),
        ({"session_client": CLIENT, "sessions": "1"}, "expected slot:step"),
        ({"session_client": CLIENT, "sessions": "1:0;"}, "expected slot:step"),
        ({"session_client": CLIENT, "sessions": "1:-1"}, "expected slot:step"),
        ({"session_client": CLIENT, "sessions": "1:" + "1" * 11}, "expected slot:step"),
        ({"session_client": CLIENT, "sessions": ";" * 65_536}, "more than 65536 rows"),
        ({"session_client": CLIENT, "sessions": "1" * 2_000_000}, "more than 65536 rows"),
        ({"session_client": CLIENT.upper(), "sessions": "1:0"}, "32 hexadecimal digits"),
        ({"timeout": 1.5}, "timeout='1.5': expected a whole number from 0"),
        ({"timeout": "1" * 20}, "timeout=.*expected a whole number"),
        ({"timeout": True}, "timeout=.*expected a whole number"),
        ({"timeout": 2**63}, "timeout=.*expected a whole number"),
        ({"row_errors": 1}, "row_errors='1': expected true or false"),
    ],
)
def test_a_value_that_says_nothing_is_refused_by_its_name(parameters, why):
    with pytest.raises(ProtocolMismatch, match=why) as caught:
        request_parameters(parameters)
    assert caught.value.code == Code.MALFORMED


def test_a_parameter_that_neither_protocol_nor_model_has_is_refused():
    found = request_parameters({"mine": 1})
    found.require_known(["mine"])
    with pytest.raises(Refused, match=f"'mine' is not known here; there are: {', '.join(KNOWN)}, yours") as caught:
        found.require_known(["yours"])
    assert caught.value.code == Code.UNSUPPORTED


def test_a_tensor_may_be_in_shared_memory_at_an_offset_or_at_its_beginning():
    assert of_tensor("x", {}) == (None, None)
    assert of_tensor("x", {"extents": "1;2"}) == (None, "1;2")
    for offset in ({}, {"shared_memory_offset": 8}):
        given = {"shared_memory_region": "r", "shared_memory_byte_size": 4, **offset}
        place, extents = of_tensor("x", given)
        assert (place.region, place.size, place.offset, extents) == (
            "r",
            4,
            offset.get("shared_memory_offset", 0),
            None,
        )
        assert place.parameters() == given


@pytest.mark.parametrize(
    ("parameters", "code", "why"),
    [
        ({"classification": 3}, Code.UNSUPPORTED, "output 'x': classification is not done here"),
        ({"other": 3}, Code.UNSUPPORTED, "tensor 'x': parameter 'other' is not known here"),
        ({"extents": 3}, Code.MALFORMED, "extents='3': expected text"),
        ({"shared_memory_byte_size": 3}, Code.MALFORMED, "needs shared_memory_region"),
        ({"shared_memory_region": "r"}, Code.MALFORMED, "needs shared_memory_region"),
        ({"shared_memory_region": "", "shared_memory_byte_size": 3}, Code.MALFORMED, "needs shared_memory_region"),
        ({"shared_memory_region": 7, "shared_memory_byte_size": 3}, Code.MALFORMED, "needs shared_memory_region"),
        ({"shared_memory_region": "r", "shared_memory_byte_size": -1}, Code.MALFORMED, "byte_size='-1': expected"),
        (
            {"shared_memory_region": "r", "shared_memory_byte_size": 1, "shared_memory_offset": 2**62 + 1},
            Code.MALFORMED,
            "offset=.*: expected a whole number",
        ),
    ],
)
def test_a_tensors_parameter_that_is_unknown_or_no_place_is_refused(parameters, code, why):
    with pytest.raises(Error, match=why) as caught:
        of_tensor("x", parameters)
    assert caught.value.code == code
