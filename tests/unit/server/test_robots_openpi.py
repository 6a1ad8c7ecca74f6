"""What a robot of openpi or vllm-omni may ask, what it gets, and when its episode begins anew."""

from __future__ import annotations

import numpy as np
import pytest

from jurybox.protocol.errors import SessionLost, SpecMismatch
from jurybox.protocol.spec import ModelSpec, TensorSpec
from jurybox.server.gateway.robots.msgpack_arrays import unpackb
from jurybox.server.gateway.robots.openpi import Openpi, VllmOmni
from jurybox.server.gateway.robots.policy import RobotEpisode, require_actions

ACTIONS = np.arange(4.0).reshape(2, 2)


class Policy:
    """Answers every observation, and keeps which ones began an episode."""

    def __init__(self, inputs=(), outputs=None):
        self.inputs, self.outputs = inputs, outputs or {"a": ACTIONS}
        self.asked = []

    def takes(self, name):
        return name in self.inputs

    async def ask(self, observation, place, *, begins, within, needs_actions):
        self.asked.append((dict(observation), begins, within, needs_actions))
        return self.outputs

    @property
    def begun(self):
        return [begins for _, begins, _, _ in self.asked]


async def asked(requests, policy=None, dialect=None):
    """The answers to some requests of one connection, and the policy that they came to."""
    policy = policy or Policy()
    episode, dialect = RobotEpisode(policy, 3), dialect or Openpi()
    answers = [await dialect.answered(episode, dict(request), None) for request in requests]
    return [(unpackb(frame), observed) for frame, observed in answers], policy


@pytest.mark.parametrize("reset", [True, np.bool_(True), np.array(True)])
async def test_an_episode_begins_with_the_first_observation_and_with_a_reset(reset):
    requests = [{"x": 1}, {"x": 2}, {"x": 3, "reset": reset}, {"x": 4, "reset": False}, {"endpoint": "reset"}, {"x": 5}]
    answers, policy = await asked(requests)
    assert policy.begun == [True, False, True, False, True]
    assert answers[4] == ({"status": "reset successful"}, False)
    assert all(observed for _, observed in answers[:4])
    assert [given["x"] for given, *_ in policy.asked] == [1, 2, 3, 4, 5]
    assert all("endpoint" not in given for given, *_ in policy.asked)


@pytest.mark.parametrize("wrong", [1, "yes", np.array([True]), np.array(1), np.array([[True]])])
async def test_a_reset_that_says_neither_is_refused_unless_it_is_an_input_of_the_model(wrong):
    with pytest.raises(SpecMismatch, match="reset: expected true or false, came"):
        await asked([{"reset": wrong}])
    _, policy = await asked([{"x": 1}, {"reset": wrong}], Policy(["reset"]))
    assert policy.begun == [True, False]


async def test_another_session_begins_an_episode_and_an_ended_one_goes_on_never():
    names = [None, "a", "a", "", "b", "b"]
    _, policy = await asked([{} if name is None else {"session_id": name} for name in names])
    assert policy.begun == [True, True, False, False, True, False]
    assert all("session_id" not in given for given, *_ in policy.asked)
    with pytest.raises(SessionLost, match="session 'a' ended when 'b' began: a connection has one session"):
        await asked([{"session_id": name} for name in ("a", "b", "a")])


async def test_a_connection_remembers_the_last_of_the_sessions_that_ended():
    episode = RobotEpisode(Policy(), 3)
    for number in range(1026):
        episode.name(f"{number}")
    with pytest.raises(SessionLost):
        episode.name("1")
    episode.name("0")  # of 1025 that ended the oldest is forgotten


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        ({"endpoint": "act"}, "endpoint 'act': expected 'infer' or 'reset'"),
        ({"endpoint": 1}, "endpoint '1': expected"),
        ({"session_id": 7}, "session_id: expected text of at most 500 characters"),
        ({"session_id": "x" * 501}, "session_id: expected text of at most 500 characters"),
    ],
)
async def test_another_endpoint_or_session_is_refused(request_, why):
    with pytest.raises(SpecMismatch, match=why):
        await asked([request_])
    await asked([{"session_id": "x" * 500, "endpoint": "infer"}])


@pytest.mark.parametrize("outputs", [{"a": ACTIONS}, {"actions": ACTIONS}, {"b": 1, "actions": ACTIONS}])
async def test_openpis_robots_get_the_actions_by_that_name_with_the_times(outputs):
    dialect = Openpi()
    ((first, _),), policy = await asked([{}], Policy(outputs=outputs), dialect)
    assert set(first) == {"actions", "server_timing", "policy_timing"} | (set(outputs) - {"a"})
    np.testing.assert_array_equal(first["actions"], ACTIONS)
    assert set(first["server_timing"]) == set(first["policy_timing"]) == {"infer_ms"}
    assert policy.asked[0][3], "the model must have actions"
    dialect.total_ms = 0.0
    ((second, _),), _ = await asked([{}], None, dialect)
    assert second["server_timing"]["prev_total_ms"] == 0.0


async def test_vllm_omnis_robots_get_the_actions_alone_or_all_outputs():
    ((alone, _),), policy = await asked([{}], None, VllmOmni())
    assert alone.dtype == np.float32
    np.testing.assert_array_equal(alone, ACTIONS)
    assert not policy.asked[0][3]
    ((several, _),), _ = await asked([{}], Policy(outputs={"a": ACTIONS, "b": ACTIONS}), VllmOmni())
    assert set(several) == {"a", "b"}


def test_an_error_is_a_sentence_or_a_map_that_says_so():
    assert Openpi().error("why") == "why"
    assert unpackb(VllmOmni().error("why")) == {"type": "error", "message": "why"}


def test_of_several_outputs_one_has_the_actions():
    one = TensorSpec("float32", (2,))
    for outputs in (["a"], ["a", "actions"]):
        require_actions(ModelSpec("arm", {"x": one}, dict.fromkeys(outputs, one)))
    with pytest.raises(SpecMismatch, match="model 'arm' has a, b: robots expect one output, or one named actions"):
        require_actions(ModelSpec("arm", {"x": one}, dict.fromkeys("ab", one)))
