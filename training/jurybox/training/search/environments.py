"""The networks of a search: our own simulator in this process, or the real CybORG in worker processes."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv

from jurybox.training.environments.cage import CageVectorEnv, CyborgEnv
from jurybox.training.search.settings import WorkflowTraining
from jurybox.training.vector import ProcessVectorEnv

TRUTH = {"true_state": (np.int8, (13,))}


def make(settings: WorkflowTraining, stream: int) -> VectorEnv[Any, Any, Any]:
    """`n_envs` networks, seeded from the run's seed and `stream`, a number for each use of them."""
    seed = int(np.random.SeedSequence((settings.seed, 77, stream)).generate_state(1)[0])
    if settings.env == "cage":
        env: VectorEnv[Any, Any, Any] = CageVectorEnv(
            settings.n_envs,
            settings.red,
            episode_length=settings.episode_length,
            quirk=settings.quirk,
            autoreset_mode="Disabled",
        )
    else:
        one = partial(CyborgEnv, settings.red, episode_length=settings.episode_length)
        workers = settings.workers or len(os.sched_getaffinity(0))
        env = ProcessVectorEnv([one] * settings.n_envs, workers=workers, info_fields=TRUTH)
    env.reset(seed=seed)
    return env


def random_state(env: VectorEnv[Any, Any, Any]) -> dict[str, Any] | None:
    """Of our own simulator; CybORG has none that could be kept."""
    return dict(env.networks.random.bit_generator.state) if isinstance(env, CageVectorEnv) else None


def restore_random_state(env: VectorEnv[Any, Any, Any], state: dict[str, Any] | None) -> None:
    if state is not None and isinstance(env, CageVectorEnv):
        env.networks.random.bit_generator.state = state
