"""The example of a policy for robots: its expert succeeds, and episodes through the port equal those in process."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "robots"
pytest.importorskip("gymnasium")


def test_the_scripted_expert_swings_up_from_anywhere(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    import swing_up

    env = swing_up.SwingUp()
    for seed in range(10):
        observation, _ = env.reset(seed=seed)
        for _ in range(swing_up.STEPS):
            assert env.observation_space.contains(observation)
            observation, *_ = env.step(swing_up.expert(env))
        assert env.success


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_episodes_through_the_port_equal_those_in_process_to_the_last_bit():
    """The policy is hardly trained, which does not matter here."""
    done = subprocess.run(
        [sys.executable, EXAMPLE / "served.py", "--demonstrations", "4", "--steps", "20", "--episodes", "16"],
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "16 of 16 are equal" in done.stdout, done.stdout
    assert len(re.findall(r"\d+ of 16 episodes succeed", done.stdout)) == 2
