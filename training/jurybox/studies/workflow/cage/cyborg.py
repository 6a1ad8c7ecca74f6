"""The original CAGE Challenge 2 simulator (CybORG 2.1), if installed, with the interface of our own.

CybORG is not on a package index: ``pip install -e`` its repository, https://github.com/cage-challenge/cage-challenge-2
(folder CybORG). It uses the API of Gym before 0.26: reset() returns an observation, step() four values.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, SupportsFloat, SupportsInt

import gymnasium
import numpy as np
import numpy.typing as npt

from jurybox.studies.workflow.cage import tables as t
from jurybox.studies.workflow.cage.environment import ACTION_SPACE, OBSERVATION_SPACE, Observations
from jurybox.studies.workflow.cage.network import RedName
from jurybox.training.errors import UsageError

_AGENTS = {"B_line": "B_lineAgent", "Meander": "RedMeanderAgent"}
_PRIVILEGED = ("root", "SYSTEM")
_RED_MOVES = ("ExploitRemoteService", "PrivilegeEscalate")


class CyborgMissing(UsageError, RuntimeError):
    """CybORG 2.1 is not installed."""


class CyborgEnv(gymnasium.Env[Observations, Any]):
    """Scenario 2 through the ChallengeWrapper; observation, actions and info as `CageEnv` has them.

    To read CybORG's true state takes as long as half a step. So it is read only after a step that can have changed it:
    blue removed or restored, or red exploited or escalated.

    Args:
        red: "B_line" or "Meander".
        episode_length: steps.
        make: creates (CybORG, wrapper) for a red agent, for tests; CybORG's own by default.

    Raises:
        CyborgMissing: CybORG is not installed.
    """

    metadata = {"render_modes": []}  # noqa: RUF012 (Gymnasium declares it so)

    def __init__(
        self,
        red: RedName = "B_line",
        *,
        episode_length: int = 100,
        make: Callable[[str], tuple[Any, Any]] | None = None,
    ) -> None:
        self.observation_space, self.action_space = OBSERVATION_SPACE, ACTION_SPACE
        self.episode_length = episode_length
        self._cyborg, self._wrapped = (make or _make)(_AGENTS[red])
        self._elapsed = 0
        self._truth: npt.NDArray[np.int8] | None = None

    @property
    def cyborg(self) -> tuple[Any, Any]:
        """Return CybORG itself and its wrapper."""
        return self._cyborg, self._wrapped

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observations, dict[str, Any]]:
        """As `gymnasium.Env.reset`."""
        super().reset(seed=seed)
        if seed is not None:
            _seed_globals(seed)
        observation = self._wrapped.reset()
        self._elapsed, self._truth = 0, None
        return _bits(observation), {"true_state": self.read_truth()}

    def step(self, action: SupportsInt) -> tuple[Observations, SupportsFloat, bool, bool, dict[str, Any]]:
        """As `gymnasium.Env.step`."""
        observation, reward, _, _ = self._wrapped.step(int(action))
        self._elapsed += 1
        if t.KIND[int(action)] in t.FIX_KINDS or self._red_moved():
            self._truth = None
        return (
            _bits(observation),
            float(reward),
            False,
            self._elapsed >= self.episode_length,
            {"true_state": self.read_truth()},
        )

    def read_truth(self) -> npt.NDArray[np.int8]:
        """Return 0 (clean), 1 (red has a user session) or 2 (a privileged one) per host; int8 (13,), read-only."""
        if self._truth is None:
            self._truth = levels(self._cyborg.get_agent_state("True"))
            self._truth.flags.writeable = False
        return self._truth

    def _red_moved(self) -> bool:
        return type(self._cyborg.get_last_action("Red")).__name__ in _RED_MOVES


def levels(state: Mapping[str, Any]) -> npt.NDArray[np.int8]:
    """Convert CybORG's true state, a record per host, to 0 clean, 1 user, 2 privileged; int8 (13,)."""
    found = np.zeros(t.N_HOSTS, np.int8)
    for index, host in enumerate(t.HOSTS):
        for session in state.get(host, {}).get("Sessions", ()):
            if session.get("Agent") == "Red":
                level = 2 if session.get("Username") in _PRIVILEGED else 1
                found[index] = max(int(found[index]), level)
    return found


def _bits(observation: Any) -> Observations:
    return np.asarray(observation, dtype=np.int8)


def _seed_globals(seed: int) -> None:
    # CybORG 2.1 draws from the global generators and has no seed of its own.
    import random

    random.seed(seed)
    np.random.seed(seed)


def _make(agent: str) -> tuple[Any, Any]:
    try:
        cyborg, agents, wrappers = (
            importlib.import_module(name) for name in ("CybORG", "CybORG.Agents", "CybORG.Agents.Wrappers")
        )
    except ImportError as error:
        raise CyborgMissing(
            f"expected CybORG 2.1 to be importable, got: {error}; install the folder CybORG of "
            "https://github.com/cage-challenge/cage-challenge-2, or use our own simulator (--env cage)"
        ) from error
    scenario = Path(inspect.getfile(cyborg.CybORG)).parent / "Shared" / "Scenarios" / "Scenario2.yaml"
    network = cyborg.CybORG(str(scenario), "sim", agents={"Red": getattr(agents, agent)})
    return network, wrappers.ChallengeWrapper(env=network, agent_name="Blue")
