"""How workers start: a group at a time, with a time-out for progress; and what may be sent to them and back."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from multiprocessing import Pipe

import pytest

from jurybox.protocol.errors import Timeout
from jurybox.training.vector import worker_pool
from jurybox.training.vector.sb3_env import WorkerVecEnv
from jurybox.training.vector.worker_pool import bring_up


class Member:
    """A worker without a process, which has made its environment some time after its start."""

    starting = most = 0

    def __init__(self, index: int, seconds: float | None) -> None:
        self.index, self._seconds = index, seconds

    def start(self) -> None:
        self.pipe, theirs = Pipe()
        Member.starting += 1
        Member.most = max(Member.most, Member.starting)
        if self._seconds is not None:
            threading.Timer(self._seconds, theirs.send, [self.index]).start()
        self._theirs = theirs

    def handshake(self, timeout: float = 0.0) -> list[tuple[int, int, int]]:
        Member.starting -= 1
        return [(self.pipe.recv(), 0, 0)]


@pytest.fixture(autouse=True)
def two_at_a_time(monkeypatch):
    monkeypatch.setattr(worker_pool, "_STARTING_ON_A_CORE", 2)
    monkeypatch.setattr(worker_pool.os, "sched_getaffinity", lambda pid: {0})
    Member.starting = Member.most = 0


def test_workers_start_a_group_at_a_time_and_the_time_out_counts_from_the_last_that_was_ready() -> None:
    began = time.monotonic()
    found = bring_up([Member(index, 0.15) for index in range(40)], timeout=2.5)
    assert [index for index, *_ in found] == list(range(40)), "the order is that of the workers"
    assert Member.most == 2
    assert time.monotonic() - began > 2.5, "longer than the time-out, and it was none"


def test_workers_that_make_no_progress_are_named() -> None:
    with pytest.raises(Timeout, match=r"2 of 4 workers .* those that are starting: 0, 3"):
        bring_up([Member(index, 0.0 if index in (1, 2) else None) for index in range(4)], timeout=0.3)


SCRIPT = """
from dataclasses import dataclass
from enum import Enum

import gymnasium, numpy as np
from gymnasium.vector import AutoresetMode
from jurybox.training.vector import ProcessVectorEnv
from jurybox.training.vector.sb3_env import WorkerVecEnv

class Mood(Enum):
    GOOD = 1

@dataclass
class Note:
    mood: Mood

class Here(gymnasium.Env):
    observation_space, action_space = gymnasium.spaces.Box(-9, 9, (1,)), gymnasium.spaces.Discrete(2)
    mood = Mood.GOOD

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {"note": Note(self.mood), "key": (options or {}).get("key", len)("four")}

    def step(self, action):
        return np.zeros(1, np.float32), 0.0, True, False, {"note": Note(self.mood), "ask": lambda: 3}

    def applied(self, function):
        return function(4)

class Layer(gymnasium.Wrapper):
    pass

class Other(gymnasium.Wrapper):
    pass

if __name__ == "__main__":
    env = WorkerVecEnv([lambda: Layer(Here())], start_method="spawn")
    env.reset()
    _, _, _, (info,) = env.step([0])
    assert info["note"] == Note(Mood.GOOD) and info["ask"]() == 3
    assert env.get_attr("mood") == [Mood.GOOD]
    env.set_attr("mood", Mood.GOOD)
    assert env.env_method("applied", lambda x: x + 1) == [5]
    assert env.env_is_wrapped(Layer) == [True] and env.env_is_wrapped(Other) == [False]
    env.close()
    with ProcessVectorEnv([lambda: Layer(Here())], autoreset_mode=AutoresetMode.SAME_STEP) as env:
        _, info = env.reset(options={"key": lambda word: word[::-1]})
        assert info["key"][0] == "ruof" and info["note"][0] == Note(Mood.GOOD)
        info = env.step(np.zeros(1, int))[4]
        assert info["final_info"]["note"][0] == Note(Mood.GOOD)
        assert env.call("applied", lambda x: x + 2) == (6,) and env.get_attr("mood") == (Mood.GOOD,)
    print("all of it")
"""


def test_what_a_main_module_defines_reaches_workers_and_comes_back(capsys) -> None:
    """In this process: what is defined below the name of the main module, which workers do not find there."""
    exec(compile(SCRIPT, "script.py", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out == "all of it\n"


@pytest.mark.runs
def test_what_a_script_defines_reaches_workers_and_comes_back(tmp_path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "all of it\n", done.stderr


def test_a_start_method_that_forks_is_refused() -> None:
    with pytest.raises(ValueError, match="start_method='fork': expected None or 'spawn'"):
        WorkerVecEnv([], start_method="fork")
