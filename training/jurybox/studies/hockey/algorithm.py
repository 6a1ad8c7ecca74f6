"""TD3 with hockey's settings, as the roles, the server and a saved policy make it. Without torch."""

from __future__ import annotations

from typing import Any

from jurybox.studies.hockey.opponents import CLIP
from jurybox.studies.hockey.settings import HockeyTraining
from jurybox.training.algorithms.td3 import TD3
from jurybox.training.spaces import ActionSpec, AgentSpec, Leaf

# The pace is the plan's, which counts env steps of all games, and noise the collectors'.
_OWN = TD3.Settings.model_fields.keys() - {"train_freq", "gradient_steps", "max_ahead", "action_noise"}
FACTORY = "jurybox.training.algorithms.served_networks:gym_policy"


def algorithm_of(settings: HockeyTraining, sizes: tuple[int, int]) -> dict[str, Any]:
    """Return the arguments of `registry.make` for the learner.

    Args:
        sizes: sizes of an observation and of an action.
    """
    own = {name: value for name, value in settings.model_dump(mode="json").items() if name in _OWN}
    return {**network_of(settings, sizes), "settings": own}


def network_of(settings: HockeyTraining, sizes: tuple[int, int]) -> dict[str, Any]:
    """Return the arguments of `FACTORY` for the policy's network, which is TD3's own, as values of JSON and TOML."""
    observation, action = sizes
    actions = ActionSpec(False, action, low=(-1.0,) * action, high=(1.0,) * action)
    spec = AgentSpec((Leaf("observation", (observation,), "float32"),), actions, normalize=True, clip=CLIP)
    return {"algorithm": "td3", "settings": {"hidden": list(settings.hidden)}, "spec": spec.as_dict()}
