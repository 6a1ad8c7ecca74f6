"""With build_once each environment of a run is built once: looks, training and evaluations have the same."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from gymnasium import spaces
from tests.serving import wait_until
from tests.unit.studies.hockey.hockey_runs import settings
from tests.unit.studies.hockey.like_the_original import HockeyEnv
from tests.unit.trainings.test_places import Counted, CountedWorld

from jurybox.studies.hockey.train import train as train_hockey
from jurybox.training.checkpoints import Checkpoints
from jurybox.training.environments.gymnasium_env import GymEnvs
from jurybox.training.environments.making import EnvironmentPlace
from jurybox.training.environments.pettingzoo_env import World
from jurybox.training.environments.stock import stocked
from jurybox.training.replay import Windows
from jurybox.training.roles.hosted import Hosted, HostGone, builders
from jurybox.training.run_folder import read_metrics
from jurybox.training.runtime.plan import ConfigError
from jurybox.training.runtime.run import run
from jurybox.training.spaces import ContractBroken
from jurybox.training.trainings import gym, marl
from jurybox.training.trainings.marl_run import train as train_marl

HERE, GYM = f"{__name__}:", "jurybox.training.environments.gymnasium_env:GymEnvs"
SMALL = {"hidden": (4,), "evaluation_episodes": 3, "build_once": True}


def note(file: str, *what: object) -> None:
    with Path(file).open("a") as book:
        book.write(" ".join(map(str, what)) + "\n")


class Built(Counted):
    """Notes in a file where and by whom it is made, and refuses to be there twice."""

    def __init__(self, file: str, worker_index: int, vector_index: int) -> None:
        super().__init__(worker_index, vector_index=vector_index)
        self.lock = Path(f"{file}.{worker_index}.{vector_index}")
        os.close(os.open(self.lock, os.O_CREAT | os.O_EXCL))  # the port
        note(file, worker_index, vector_index)

    def close(self):
        self.lock.unlink()


class BuiltWorld(CountedWorld):
    """The same of a world."""

    def __init__(self, file: str, worker_index: int, vector_index: int) -> None:
        super().__init__(worker_index, vector_index)
        self.lock = Path(f"{file}.{worker_index}.{vector_index}")
        os.close(os.open(self.lock, os.O_CREAT | os.O_EXCL))
        note(file, worker_index, vector_index)

    def close(self):
        self.lock.unlink()


def in_gym(tmp_path, *, serial: bool, **changes):
    values = {"env": HERE + "Built", "workers": 2, "envs": 4, "steps": 128, "evaluate_every": 32, "log_every": 16}
    values |= {"n_steps": 8, "batch_size": 8} if changes.get("algorithm", "ppo") == "ppo" else {"learning_starts": 16}
    values |= {"env_args": {"file": str(tmp_path / "made")}, **SMALL, **changes}
    return gym.train(gym.GymTraining(**values), tmp_path, serial=serial)


def in_marl(tmp_path, *, serial: bool):
    values = {"env": HERE + "BuiltWorld", "envs": 2, "steps": 60, "evaluate_every": 20, "ppo": {"n_steps": 8}}
    values |= {"env_args": {"file": str(tmp_path / "made")}, "log_dir": tmp_path, **SMALL}
    return train_marl(marl.MarlTraining(**values), serial=serial)


class BuiltGame(HockeyEnv):
    """The same of a game; its constructor is the original's, which takes no place."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        book = os.environ["GAMES"]
        note(book, os.getpid())
        self.lock = Path(f"{book}.{os.getpid()}.{id(self)}")
        self.lock.touch()

    def close(self):
        super().close()
        self.lock.unlink()


@pytest.mark.parametrize("serial", [True, pytest.param(False, marks=pytest.mark.runs)], ids=["serial", "processes"])
def test_a_hockey_run_builds_each_game_exactly_once(tmp_path, monkeypatch, serial) -> None:
    monkeypatch.setenv("GAMES", str(tmp_path / "made"))
    few = {"env": HERE + "BuiltGame", "workers": 2, "envs": 4, "evaluate_every": 160, "evaluation_games": 1}
    s = settings(**few, learning_starts=100, steps=320, build_once=True)
    outcome = train_hockey(s, tmp_path / "run", serial=serial)
    assert len((tmp_path / "made").read_text().splitlines()) == 4, "for look, check, training and evaluations"
    assert not list(tmp_path.glob("made.*")), "a game was not closed"
    assert outcome.env_steps >= 320 and "eval_wins_weak" in outcome.evaluation and outcome.restarts == 0
    assert {"matrix_games"} <= s.unused().keys()


@pytest.mark.parametrize("serial", [True, pytest.param(False, marks=pytest.mark.runs)], ids=["serial", "processes"])
@pytest.mark.parametrize(
    ("training", "envs"), [pytest.param(in_gym, 2, marks=pytest.mark.runs), (in_marl, 1)], ids=["gym", "marl"]
)
def test_a_run_builds_each_environment_exactly_once_and_closes_it(tmp_path, training, envs, serial) -> None:
    outcome = training(tmp_path, serial=serial)
    made = sorted((tmp_path / "made").read_text().splitlines())
    assert made == [f"{worker} {number}" for worker in (1, 2) for number in range(envs)]
    assert not list(tmp_path.glob("made.*")), "an environment was not closed"
    assert outcome.env_steps >= 60 and outcome.evaluation["eval_length"] == 4.0 and outcome.restarts == 0
    assert Checkpoints(tmp_path / "checkpoints").best() is not None


@pytest.mark.parametrize("algorithm", ["dqn", "ppo"])
def test_an_evaluation_breaks_off_an_episode_and_no_row_goes_over_it(tmp_path, algorithm) -> None:
    outcome = in_gym(tmp_path, serial=True, algorithm=algorithm, workers=1, envs=1, steps=66, evaluate_every=6)
    rows = [row for row in read_metrics(tmp_path / "metrics.csv") if "eval_length" in row]
    assert len(rows) >= 5 and {row["eval_length"] for row in rows} == {4.0}
    # Of 66 steps, six after six are a whole episode and two steps of one that an evaluation broke off.
    assert outcome.episodes == 66 // 6
    assert outcome.return_mean == 4.0


class Clock(Counted):
    """Observes the number of its resets, and the steps since then."""

    observation_space = spaces.Box(0, 1000, (2,))

    def __init__(self) -> None:
        self._resets = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._resets += 1
        return self._now(), {}

    def step(self, action):
        _, *rest = super().step(action)
        return self._now(), *rest

    def _now(self):
        return np.array([self._resets, self._steps], np.float32)


def test_a_row_before_an_evaluation_is_followed_by_what_its_own_episode_showed(tmp_path) -> None:
    small = {"learning_starts": 16, "evaluate_every": 6, "steps": 60, "buffer_size": 100}
    settings = gym.GymTraining(env=HERE + "Clock", algorithm="dqn", **small, **SMALL)
    rows: dict[tuple[float, ...], tuple[float, ...]] = {}

    def watch(shared):
        if shared.scoreboard.env_steps > 20:
            batch = shared.replay(gym.NAME).sample(64, windows=Windows(n_step=1, next=("observation",)))
            found = zip(batch["observation"].tolist(), batch["next_observation"].tolist(), strict=True)
            rows.update({tuple(now): tuple(after) for now, after in found})

    with builders(True, 1, tmp_path, serial=True) as built:
        run(gym.plan(settings, builders=built), tmp_path, Mock(), serial=True, watch=watch)
    assert len(rows) > 30
    # A row that terminated, the fourth, has no next one, and says itself instead.
    assert all(after == (resets, min(steps + 1, 3)) for (resets, steps), after in rows.items())
    assert {steps for _, steps in rows} == {0, 1, 2, 3}


@pytest.mark.parametrize("make", [
    lambda: GymEnvs(1, HERE + "Clock", {}, clips=True, shared=True),
    lambda: World(1, "tests.unit.trainings.test_places:CountedWorld", {"worker_index": 1, "vector_index": 0},
                  {"a": 1, "b": 1}, shared=True),
], ids=["gymnasium", "pettingzoo"])  # fmt: skip
def test_who_begins_an_episode_has_the_environment_and_the_other_is_told(make) -> None:
    with stocked():
        first, second = make(), make()
        first.begin(0, 1)
        assert not first.hold(lambda: None) and not second.hold(lambda: None)
        second.begin(0, 2)
        assert list(first.hold(lambda: None)) == [0] and not second.hold(lambda: None)
        second.close()
        first.begin(0, 3)
        assert not first.hold(lambda: None) and list(second.hold(lambda: None)) == [0]


@pytest.mark.runs
def test_the_process_with_environments_lends_them_to_one_at_a_time(tmp_path) -> None:
    with builders(True, 1, tmp_path, serial=False) as built:
        adapter, arguments = built.adapter(GYM, {"env": HERE + "Clock", "env_args": {}, "clips": True})
        assert adapter.endswith(":Hosted")
        actor, evaluator = (Hosted(1, **arguments, places=[EnvironmentPlace(1, 0)]) for _ in range(2))
        assert actor.agents == ("",) and actor.hold(lambda: None) == []
        actor.begin(0, 1)
        had: list[list[int]] = []
        waiting = threading.Thread(target=lambda: had.append(evaluator.hold(lambda: None)))
        waiting.start()
        assert actor.step(np.zeros(1, np.int64)).steps == 1 and not had
        actor.release()
        waiting.join(60)
        assert had == [[]]
        evaluator.begin(0, 2)
        asked = []
        with ThreadPoolExecutor(1) as pool:
            held = pool.submit(actor.hold, lambda: asked.append(True))
            wait_until(lambda: bool(asked), 60)  # it gives signs of life meanwhile
            evaluator.close()  # as if it was killed: the environments are free again
            assert held.result(60) == [0]
        with pytest.raises(ContractBroken, match="expected one number"):
            built.call(_breaks)
        with pytest.raises(SystemExit):
            built.call(_exits)
    with pytest.raises(HostGone, match="has ended"):
        actor.begin(0, 3)


def _breaks() -> None:
    raise ContractBroken("expected one number")


def _exits() -> None:
    raise SystemExit(3)


def test_a_run_on_other_machines_is_refused(tmp_path) -> None:
    launcher: Any = object()
    with (
        pytest.raises(ConfigError, match="build_once with --launcher ray"),
        builders(True, 1, tmp_path, launcher, serial=False),
    ):
        pass
