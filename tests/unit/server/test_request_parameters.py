"""Words of a request over the Open Inference Protocol: what is no version and no sequence is refused, not guessed."""

from __future__ import annotations

import pytest

from jurybox.protocol.errors import Code, Error, ProtocolMismatch, Refused
from jurybox.server.gateway.inference.parameters import request_parameters, weights_version


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
