"""Trainers' reward hooks with a real server: scores are batched, and a missing one is never a number."""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import math
import os
import pickle
import signal
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from tests.loops import turns
from tests.serving import serving, wait_until

from jurybox.client import ModelNotFound, Refused, RowFailed, ServerGone, SpecMismatch, connect
from jurybox.client.juror import Juror, Passing
from jurybox.client.rewards import (
    areal_reward,
    easyr1_score,
    gymnasium_reward,
    ms_swift_reward,
    openrlhf_reward,
    sb3_reward,
    skyrl_env,
    slime_reward,
    trl_reward,
    verl_batch_score,
    verl_score,
)

MODELS = {
    name: {"factory": f"tests.reward_models:{name}", "max_batch": 64, "rows": 1024, "lane_rows": 64}
    for name in ("text_length", "brightness", "brightness_and_prompt")
}
MODELS["corner"] = {"factory": "tests.models:affine"}  # an output of four values: no score

PANEL = """
[panels.lengths.members]
short = {weight = 1, model = "text_length", output = "score"}
long = {weight = 10, model = "text_length", output = "score"}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("server"), MODELS, more=PANEL) as running:
        yield running


@pytest.fixture
def connection(server):
    return {"address": server.address, "output": "score", "timeout": 60.0}


def test_trl_gets_floats_and_none(connection, caplog):
    reward = trl_reward("text_length", **connection)
    assert reward.__name__ == "text_length" and not inspect.iscoroutinefunction(reward)
    given = {"prompts": ["p"] * 4, "completion_ids": [[1]] * 4, "trainer_state": None}
    assert reward(completions=["abc", "a bad one", "nan", "größer"], **given) == [3.0, None, None, 8.0]
    assert "2 of 4 rewards of 'text_length' are missing; the first: a bad text" in caplog.text
    chat = [
        [{"role": "assistant", "content": "four"}],
        [{"role": "assistant", "content": [{"type": "text", "text": "x"}]}],
    ]
    assert reward(completions=chat, prompts=chat) == [4.0, 1.0]
    assert reward(completions=[], prompts=[]) == []


def test_trl_functions_can_be_asynchronous(connection):
    rewards = [trl_reward("text_length", name=name, asynchronous=True, **connection) for name in ("a", "b")]
    assert [f.__name__ for f in rewards] == ["a", "b"] and all(map(inspect.iscoroutinefunction, rewards))

    async def both():
        return await asyncio.gather(*(f(completions=["abc", "bad"], prompts=["p", "q"]) for f in rewards))

    assert asyncio.run(both()) == [[3.0, None]] * 2


def test_pictures_may_be_arrays_tensors_or_pillow_images_with_prompts(connection):
    import torch
    from PIL import Image

    reward = trl_reward("brightness_and_prompt", inputs={"image": "completions"}, **connection)
    array = np.full((5, 7, 3), 51, np.uint8)
    pictures = [array, torch.from_numpy(array).permute(2, 0, 1), Image.fromarray(array), Image.fromarray(array[..., 0])]
    answers = reward(completions=pictures, prompts=["", "a", "bb", "ccc"])
    np.testing.assert_allclose(answers, [0.2, 1.2, 2.2, 3.2], rtol=1e-5)
    mixed = [array, np.zeros((600, 600, 3), np.uint8), np.zeros((3, 3, 3), np.uint8), array / 255]
    assert reward(completions=mixed, prompts=[""] * 4)[1:] == [None, None, None]  # too large, black, of floats


def test_a_column_of_lists_with_one_picture_each_is_a_column_of_pictures(connection):
    """TRL's datasets have such `images`; a prompt with two of them has no score instead of its first one's."""
    image = pytest.importorskip("PIL.Image").new("RGB", (8, 8), (51, 51, 51))
    reward = trl_reward("brightness_and_prompt", **connection)
    prompts = [[{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "ab"}]}]] * 3
    given = reward(completions=["x"] * 3, prompts=prompts, images=[[image], [image, image], (image,)])
    assert given[1] is None and np.allclose([given[0], given[2]], [2.2, 2.2], atol=1e-3)


def test_trls_own_trainer_calls_the_hooks_and_skips_missing_scores(connection, monkeypatch):
    trainer = pytest.importorskip("trl.trainer.grpo_trainer", reason="TRL is not installed")
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(trainer, "gather", lambda rewards: rewards)  # there is one process
    monkeypatch.setattr(trainer, "logger", logging.getLogger("trl"))  # its own works only under an accelerator
    hooks = [
        trl_reward("text_length", **connection),
        trl_reward("text_length", asynchronous=True, name="again", **connection),
    ]
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    one = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu", is_main_process=False), reward_funcs=hooks, environments=None,
        reward_processing_classes=[None, None], reward_func_names=[hook.__name__ for hook in hooks], async_loop=loop,
        state=SimpleNamespace(global_step=1), args=SimpleNamespace(report_to=[]), _log_completion_extra=None,
        _log_metric=None,
    )  # fmt: skip
    given = ([{"prompt": "p", "label": 1}] * 3, ["p"] * 3, ["abc", "bad", "größer"], [[1]] * 3)
    found = trainer.GRPOTrainer._calculate_rewards(one, *given)
    loop.call_soon_threadsafe(loop.stop)
    assert torch.equal(found.nan_to_num(-1), torch.tensor([[3.0, 3.0], [-1.0, -1.0], [8.0, 8.0]]))


def test_verls_own_reward_manager_awaits_the_hook(connection, tmp_path):
    managers = pytest.importorskip("verl.experimental.reward_loop.reward_manager.naive", reason="verl is not installed")
    torch = pytest.importorskip("torch")
    manager = managers.NaiveRewardManager.__new__(managers.NaiveRewardManager)
    ids = torch.tensor([ord(letter) for letter in "abcd"])
    item = SimpleNamespace(
        batch={"responses": ids, "attention_mask": torch.ones(4, dtype=torch.int64)},
        non_tensor_batch={"data_source": "x", "reward_model": {"ground_truth": "y"}, "extra_info": {"index": 3}},
    )

    class Data:
        def __getitem__(self, key):
            return self if isinstance(key, slice) else item

    async def one(hook):
        manager.tokenizer = SimpleNamespace(decode=lambda given, **_: "".join(map(chr, given)))
        manager.compute_score, manager.is_async_reward_score = hook, inspect.iscoroutinefunction(hook)
        manager.reward_router_address, manager.reward_model_tokenizer = "x", None
        manager.loop = asyncio.get_running_loop()
        return await manager.run_single(Data())

    for asynchronous in (True, False):
        hook = verl_score("text_length", asynchronous=asynchronous, **connection)
        assert asyncio.run(one(hook))["reward_score"] == 4.0


def test_verl_scores_of_one_step_are_batched(connection):
    compute_score = verl_score("text_length", **{**connection, "output": "batch"})
    assert inspect.iscoroutinefunction(compute_score)

    async def step():
        return await asyncio.gather(
            *(
                compute_score(data_source="d", solution_str="x" * i, ground_truth=None, extra_info={"num_turns": 1})
                for i in range(32)
            )
        )

    assert asyncio.run(step()) == [32.0] * 32
    assert asyncio.run(step()) == [32.0] * 32  # in another event loop


def test_a_call_cancelled_before_it_was_sent_does_not_affect_later_ones(connection):
    juror = Juror("text_length", **connection)
    assert juror.scores({"text": ["abc"]}, 1) == [3.0]

    async def step():
        with juror._answering:  # the juror's thread cannot send it yet
            cancelled = asyncio.ensure_future(juror.scores_async({"text": ["abcd"]}, 1))
            await turns()
            cancelled.cancel()
            await turns()  # the call itself is cancelled a few loop iterations later
        return await juror.scores_async({"text": ["abcde"]}, 1)

    assert asyncio.run(asyncio.wait_for(step(), 30)) == [5.0]
    assert juror.scores({"text": ["ab"]}, 1) == [2.0]


def test_verl_is_stopped_by_a_missing_score_or_gets_nan(connection):
    with pytest.raises(RowFailed, match="a bad text"):
        asyncio.run(verl_score("text_length", **connection)(solution_str="bad", data_source="d"))
    synchronous = verl_score("text_length", asynchronous=False, missing="nan", **connection)
    assert math.isnan(synchronous(solution_str="bad")) and synchronous(solution_str="abcd") == 4.0
    image = np.full((3, 8, 9), 102, np.uint8)
    assert math.isclose(
        verl_score("brightness", asynchronous=False, **connection)(solution_image=image), 0.4, rel_tol=1e-5
    )


def test_a_text_that_breaks_the_model_does_not_affect_the_others(connection):
    reward = trl_reward("text_length", **connection)
    texts = ["a", "bb", "it breaks", "cccc", "ddddd", "bad", "g"]
    assert reward(completions=texts) == [1.0, 2.0, None, 4.0, 5.0, None, 1.0]


def test_openrlhf_threads_share_batches_and_a_missing_reward_raises(connection):
    reward_func = openrlhf_reward("text_length", **connection)
    assert reward_func(["abc", "de"], ["p", "q"], [None, None]) == {
        "rewards": [3.0, 2.0], "scores": [3.0, 2.0], "extra_logs": {}}  # fmt: skip
    with pytest.raises(RowFailed):
        reward_func(["bad"], ["p"], ["l"])
    batches = openrlhf_reward("text_length", **{**connection, "output": "batch"})
    seen, start = [], threading.Barrier(32)

    def one():
        if start.wait(30) == 0:
            batches(["slow"], ["p"], [None])
        seen.extend(batches(["x"], ["p"], [None])["rewards"])

    threads = [threading.Thread(target=one) for _ in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(seen) == 32 and max(seen) > 2


def test_slime_samples_are_scored_alone_and_in_lists(connection):
    custom_rm = slime_reward("text_length", **connection)

    def sample(response):
        return SimpleNamespace(prompt="p", response=response, label=None, metadata={"rm_type": "x"})

    assert asyncio.run(custom_rm(None, sample("abc"))) == 3.0
    assert asyncio.run(custom_rm(None, [sample("abc"), sample("d")])) == [3.0, 1.0]
    with pytest.raises(RowFailed):
        asyncio.run(custom_rm(None, [sample("abc"), sample("bad")]))


def test_verls_batches_are_scored_in_one_call(connection):
    compute_score = verl_batch_score("text_length", **connection)
    batch = (["a", "b"], ["abc", "de"], ["x", "y"], [{"text": "abcd", "index": 1}, {"text": "a", "other": 2}])
    assert compute_score(*batch, reward_router_address="x") == [4.0, 1.0]  # the column of extra_infos that both have
    told = verl_batch_score("text_length", inputs={"text": "ground_truths"}, **connection)
    assert told(*batch) == [1.0, 1.0]
    with pytest.raises(RowFailed, match="1 of 2"):
        compute_score(["a", "b"], ["abc", "bad"], ["x", "y"], [None, None])
    some = verl_batch_score("text_length", missing="nan", **connection)
    assert math.isnan(some(["a", "b"], ["abc", "bad"], ["x", "y"], [None, None])[1])


def test_no_model_can_be_loaded_under_a_panels_name(server):
    settings = {"factory": "tests.reward_models:text_length"}
    with connect(server.address, timeout=60) as client, pytest.raises(Refused, match="'lengths' is a panel of this"):
        client.load("lengths", settings)


def test_easyr1_gets_an_overall_score_and_those_of_a_panels_members(connection, server):
    rows = [{"response": "abc", "response_length": 3, "ground_truth": "x"}, {"response": "d", "ground_truth": None}]
    assert easyr1_score("text_length", **connection)(rows) == [{"overall": 3.0}, {"overall": 1.0}]
    found = easyr1_score("lengths", address=server.address)(rows)
    assert found == [{"short": 3.0, "long": 3.0, "overall": 33.0}, {"short": 1.0, "long": 1.0, "overall": 11.0}]
    for name, options in (("text_length", connection), ("lengths", {"address": server.address})):
        with pytest.raises(RowFailed):
            easyr1_score(name, **options)([*rows, {"response": "bad"}])


def test_ms_swifts_class_is_called_without_prompts(connection):
    orm = ms_swift_reward("text_length", **connection)(None, args="x")
    assert orm(completions=["abc", "d"], trainer_state=object(), solution=["x", "y"]) == [3.0, 1.0]
    labelled = ms_swift_reward("text_length", inputs={"text": "solution"}, **connection)()
    assert labelled(["abc", "d"], solution=["xy", "z"]) == [2.0, 1.0]
    with pytest.raises(RowFailed):
        orm(["abc", "bad"])


def test_areals_function_is_pickled_and_connects_where_it_is_called(connection):
    reward = pickle.loads(pickle.dumps(areal_reward("text_length", inputs={"text": "completions"}, **connection)))
    assert reward("p", "abc", [1, 2], [3], answer="x") == 3.0
    with pytest.raises(RowFailed):
        reward("p", "bad", [1], [2])


def test_skyrls_environment_is_one_turn_with_the_jurors_reward(connection):
    pytest.importorskip("skyrl_gym", reason="skyrl_gym is not installed")
    made = skyrl_env("text_length", inputs={"text": "response"}, **connection)
    env = made(env_config={}, extras={"reward_spec": {"ground_truth": "42"}, "max_turns": 1})
    assert env.init([{"role": "user", "content": "q"}]) == ([{"role": "user", "content": "q"}], {})
    assert env.step("abc") == {"observations": [], "reward": 3.0, "done": True, "metadata": {}}
    with pytest.raises(RowFailed):
        env.step("bad")
    labelled = skyrl_env("text_length", inputs={"text": "label"}, **connection)(
        {}, {"reward_spec": {"ground_truth": "42"}}
    )
    assert labelled.step("abc")["reward"] == 2.0


def test_gymnasium_environments_are_rewarded_by_a_juror(connection):
    import gymnasium

    class Painting(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(0, 255, (4, 4, 3), np.uint8)
        action_space = gymnasium.spaces.Discrete(256)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return np.full((4, 4, 3), 9, np.uint8), {}

        def step(self, action):
            return np.full((4, 4, 3), action, np.uint8), -1.0, False, False, {"steps": 1}

    env = gymnasium_reward(Painting(), "brightness", **connection)
    env.reset()
    _, reward, _, _, info = env.step(51)
    assert math.isclose(reward, 0.2, rel_tol=1e-5) and info == {"steps": 1, "environment_reward": -1.0}
    with pytest.raises(RowFailed, match="black"):
        env.step(0)
    _, reward, _, _, info = gymnasium_reward(Painting(), "brightness", missing="nan", **connection).step(0)
    assert math.isnan(reward) and "black" in info["reward_missing"]


def test_sb3_scores_the_last_picture_of_an_episode_and_not_the_first_of_the_next(connection):
    import gymnasium
    from stable_baselines3.common.vec_env import DummyVecEnv

    class OneStep(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(0, 255, (4, 4, 3), np.uint8)
        action_space = gymnasium.spaces.Discrete(256)

        def reset(self, *, seed=None, options=None):
            return np.full((4, 4, 3), 255, np.uint8), {}

        def step(self, action):
            return np.full((4, 4, 3), action, np.uint8), 0.0, action == 102, False, {}

    venv = sb3_reward(DummyVecEnv([OneStep] * 3), "brightness", **connection)
    venv.reset()
    _, rewards, dones, infos = venv.step(np.array([51, 102, 51]))
    np.testing.assert_allclose(rewards, [0.2, 0.4, 0.2], rtol=1e-5)
    assert dones.tolist() == [False, True, False] and infos[1]["environment_reward"] == 0.0

    # Its rewards are float32, in which this total is infinite.
    total = {"brightness": {"weight": 1e40, "output": "score"}}
    venv = sb3_reward(DummyVecEnv([OneStep]), total, missing="nan", **{**connection, "output": None})
    venv.reset()
    _, rewards, _, infos = venv.step(np.array([51]))
    assert math.isnan(rewards[0]) and "float32" in infos[0]["reward_missing"]


def test_wrong_configurations_raise_errors_that_say_what_to_do(connection, tmp_path):
    with pytest.raises(SpecMismatch, match=r"expected a column 'image' or 'images'.*inputs="):
        trl_reward("brightness", **connection)(completions=["a"])
    with pytest.raises(SpecMismatch, match="no input sound"):
        trl_reward("brightness", inputs={"sound": "completions"}, **connection)(completions=["a"])
    with pytest.raises(SpecMismatch, match="not one of 2 rows fits"):
        trl_reward("brightness", inputs={"image": "completions"}, **connection)(completions=["a", "b"])
    with pytest.raises(SpecMismatch, match="name the one number that is the score"):
        trl_reward("text_length", **{**connection, "output": None})(completions=["a"])
    with pytest.raises(ModelNotFound):
        trl_reward("nobody", **connection)(completions=["a"])
    with pytest.raises(ServerGone):
        trl_reward("text_length", address=f"ipc://{tmp_path}/none", timeout=0.2)(completions=["a"])


def test_an_unreferenced_juror_releases_its_rows_and_its_thread(connection, server):
    threads = threading.active_count()
    for _ in range(20):  # more than the rows suffice for
        assert Juror("text_length", **connection).scores({"text": ["abc"] * 40}, 40) == [3.0] * 40
    gc.collect()
    wait_until(lambda: threading.active_count() <= threads + 1, 30, "the end of the threads")


def test_a_request_queued_behind_others_times_out_in_time(connection, monkeypatch):
    monkeypatch.setattr("jurybox.client.juror._GRACE", 0.3)
    juror = Juror("text_length", **{**connection, "timeout": 0.5})
    juror._hand_over = lambda turn: None  # as if the thread is busy with others
    began = time.monotonic()
    assert [type(score).__name__ for score in juror.scores({"text": ["a", "b"]}, 2)] == ["Passing"] * 2
    assert [type(score).__name__ for score in asyncio.run(juror.scores_async({"text": ["a"]}, 1))] == ["Passing"]
    assert time.monotonic() - began < 20


def test_a_juror_can_be_pickled(connection):
    juror = Juror("text_length", **connection)
    assert juror.scores({"text": ["abc"]}, 1) == [3.0]
    again = pickle.loads(pickle.dumps(juror))
    assert again.scores({"text": ["abc", "bad"]}, 2) == [3.0, "a bad text"]


def test_a_configured_panel_is_used_by_its_name(server):
    juror = Juror("lengths", address=server.address)
    for copy in (juror, pickle.loads(pickle.dumps(juror))):
        scores = copy.scores({"text": ["abc", "bad", "x"]}, 3)
        assert scores[0] == 33.0 and scores[2] == 11.0
        assert scores[1] == "short: a bad text; long: a bad text"
        assert scores.parts["short"] == [3.0, "a bad text", 1.0] and scores.parts["long"][0] == 3.0
        copy.close()
    assert trl_reward("lengths", address=server.address)(completions=["abc", "bad"]) == [33.0, None]
    with pytest.raises(ModelNotFound):
        Juror("length", address=server.address).scores({"text": ["a"]}, 1)
    with pytest.raises(SpecMismatch, match="name the one number"):
        Juror({"text_length": 1.0}, address=server.address).scores({"text": ["a"]}, 1)


def test_many_callers_of_a_panel_get_their_own_totals(server):
    async def both():
        juror = Juror("lengths", address=server.address)
        return await asyncio.gather(*(juror.scores_async({"text": ["x" * n]}, 1) for n in range(1, 40)))

    assert [scores[0] for scores in asyncio.run(both())] == [11.0 * n for n in range(1, 40)]


def test_without_a_killed_member_the_total_is_missing_and_never_smaller(server, tmp_path):
    """The member has its own server and engine; the other member goes on answering."""
    one = {"text_length": MODELS["text_length"]}
    with serving(tmp_path / "other", one) as other:
        panel = {
            "here": {"weight": 1, "model": "text_length", "output": "score"},
            "there": {"weight": 10, "model": "text_length", "output": "score", "address": other.address},
        }
        juror = Juror(panel, address=server.address, timeout=60.0)
        assert juror.scores({"text": ["abc"]}, 1) == [33.0]
        impatient = Juror(panel, address=server.address, timeout=1.0)
        impatient.scores({"text": ["abc"]}, 1)
        engine = other.pids()["engine-0"]
        os.kill(engine, signal.SIGSTOP)
        scores = impatient.scores({"text": ["abc", "x"]}, 2)
        assert all(isinstance(score, Passing) and "there" in score for score in scores)
        assert scores.parts.get("here", [3.0, 1.0]) == [3.0, 1.0]
        os.kill(engine, signal.SIGKILL)
        assert all(isinstance(score, str) or score == 33.0 for score in impatient.scores({"text": ["abc"]}, 1))
        assert juror.scores({"text": ["abc"]}, 1) == [33.0]  # the next engine answers within the time-out
        juror.close()
        impatient.close()


@pytest.mark.parametrize("panel", [{}, {"a": math.nan}, {"a": {"weight": 1, "modell": "b"}}])
def test_an_invalid_panel_is_refused_at_once(panel):
    with pytest.raises(ValueError, match="expected"):
        Juror(panel)


def test_a_lone_request_gets_a_score_or_the_reason_why_there_is_none(connection):
    juror = Juror("text_length", **connection)
    for texts, scores in ((["abc"], [3.0]), (["bad"], ["a bad text"]), (["nan"], ["the score is nan"]), ([], [])):
        assert juror.scores({"text": texts}, len(texts)) == scores
    assert juror.scores({"text": ["abc", "bad", "x"]}, 3) == [3.0, "a bad text", 1.0]
    (reason,) = juror.scores({"text": ["x" * 10_000]}, 1)
    assert "the model takes at most" in reason
    with pytest.raises(SpecMismatch, match="expected a column"):
        juror.scores({"image": ["abc"]}, 1)
    pictures = Juror("brightness_and_prompt", **connection)
    given = {"image": [np.full((5, 7, 3), 51, np.uint8)], "prompt": ["ab"]}
    np.testing.assert_allclose(pictures.scores(given, 1), [2.2], rtol=1e-5)


def test_requests_that_arrive_while_a_lone_one_waits_are_batched(connection):
    juror = Juror("text_length", **{**connection, "output": "batch"})
    juror.scores({"text": ["abc"]}, 1)
    found: list[float] = []
    with juror._answering:  # as if a lone one waits for its answer
        threads = [threading.Thread(target=lambda: found.extend(juror.scores({"text": ["abc"]}, 1))) for _ in range(16)]
        for thread in threads:
            thread.start()
        waiting = juror._waiting
        wait_until(lambda: len(waiting._parts) + waiting._new.qsize() == 16, 30, "all requests")
    for thread in threads:
        thread.join(60)
    assert found == [16.0] * 16


def test_a_lone_request_survives_an_engine_and_never_gets_an_invented_number(connection, server):
    juror, impatient = Juror("text_length", **connection), Juror("text_length", **{**connection, "timeout": 1.0})
    for one in (juror, impatient):
        one.scores({"text": ["abc"]}, 1)
        wait_until(lambda: one.scores({"text": ["abc"]}, 1) == [3.0], 60, "an answer in time")  # noqa: B023
    engine = server.pids()["engine-0"]
    os.kill(engine, signal.SIGSTOP)
    (late,) = impatient.scores({"text": ["abc"]}, 1)
    assert isinstance(late, Passing)
    os.kill(engine, signal.SIGKILL)
    assert juror.scores({"text": ["abcd"]}, 1) == [4.0]
    wait_until(lambda: impatient.scores({"text": ["abcde"]}, 1) == [5.0], 60, "an answer in time")
