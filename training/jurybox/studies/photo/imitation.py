"""Imitation learning for the photo policy: before the rewarded training it learns the cures of training photos.

The environment damages the training photos itself, so the edits that repair each of them (the cure) are known. The
policy plays, every picture that it visits is labelled with the correct action, and the policy is trained on these
(DAgger: Ross et al., "A Reduction of Imitation Learning and Structured Prediction to No-Regret Online Learning", 2011).
If a picture does not show how it was damaged, the policy learns the median of the cures of all possible damages, so
what may well be intact is left alone. Of saturation it learns rather the mean, which is a small edit: with the median,
half of the pale photos are left as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env.base_vec_env import VecEnv

from jurybox.studies.photo.environment import observation
from jurybox.studies.photo.environment.edits import HIGHEST, LOWEST, TOOLS, Degradation, cure
from jurybox.studies.photo.environment.photo_edit import STEP_SIZES

Array = npt.NDArray[Any]

_ROUNDS = 8  # rounds of playing and learning; in each, the policy of the previous round plays
_PASSES, _LAST_PASSES = 4, 20  # over all pictures so far, after a round and after the last round
_BATCH = 64
_LEARNING_RATE, _DECAY = 2e-3, 0.05
_DROPOUT = 0.3  # against overfitting: the pictures are made from far fewer photographs
_BEGUN = 0.75  # share of pictures that are the first of an episode, each with a newly drawn photo and damage
# Errors below which the loss is square, and so aims at the mean; above, at the median.
_SQUARE = torch.tensor([0.3 if name == "saturation" else 0.1 for name in TOOLS])
_NOISE = (0.05, 0.15, 0.3)  # standard deviations of the actions' noise, which leads to states beyond the policy's own


@dataclass(frozen=True, slots=True)
class Shown:
    """Labelled pictures.

    Attributes:
        seen: observations that the policy visited, float32 (n, observation).
        wanted: the correct actions, float32 (n, action).
    """

    seen: Array
    wanted: Array


def imitate(
    model: PPO, environments: VecEnv, steps: int, *, seed: int, episode: int, check: Callable[[], object]
) -> Shown:
    """Train the policy of a new model on the cures of the pictures that its environments damage.

    Args:
        environments: the model's environments; they are left in the middle of their episodes.
        steps: number of pictures of all environments together: the first of episodes, and those after edit steps.
            Rounded so that each environment provides the same whole number in every round.
        seed: seed of noise, batches and dropout.
        episode: edit steps of an episode.
        check: called after every step; may raise to end it all.

    Returns:
        All labelled pictures.
    """
    rng = np.random.default_rng((seed, 1))
    n = environments.num_envs
    each = max(1, round(steps / (_ROUNDS * n)))
    begun = round(_BEGUN * each)
    pictures, moves = list[Array](), list[Array]()

    def show(rows: Array, infos: Sequence[Mapping[str, Any]]) -> None:
        for row, info in zip(rows, infos, strict=True):
            if "degradation" in info and not info.get("restarted"):
                pictures.append(row)
                moves.append(wanted(row, info["degradation"], episode))
        check()

    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        seen = _observed(environments.reset())
        for number in range(1, _ROUNDS + 1):
            for _ in range(begun):
                seen = _observed(environments.reset())
                show(seen, environments.reset_infos)
            for _ in range(each - begun):
                noise = rng.normal(0.0, rng.choice(_NOISE, (n, 1)), (n, len(TOOLS)))
                actions = np.clip(model.predict(seen, deterministic=True)[0] + noise, -1.0, 1.0)
                following, _, _, infos = environments.step(actions.astype(np.float32))
                show(seen, infos)
                seen = _observed(following)
            shown = Shown(np.stack(pictures), np.stack(moves))
            learn(model, shown, _LAST_PASSES if number == _ROUNDS else _PASSES, check)
    return shown


def wanted(seen: Array, degradation: Mapping[str, float], episode: int) -> npt.NDArray[np.float32]:
    """Return the correct action, float32 (9,): the rest of the cure, divided evenly among the remaining steps.

    Args:
        seen: the observation, which encodes the edits so far and the time.
        degradation: the damage of the photo.
        episode: edit steps of an episode.
    """
    edits = seen[observation.EDITS] * np.maximum(-LOWEST, HIGHEST)
    left = episode * (1.0 - float(seen[observation.TIME][0])) / 2.0
    rest = cure(Degradation(**degradation)).vector() - edits  # type: ignore[arg-type]
    moves: npt.NDArray[np.float32] = np.clip(rest / STEP_SIZES / max(1.0, left), -1.0, 1.0).astype(np.float32)
    return moves


def learn(model: PPO, shown: Shown, passes: int, check: Callable[[], object] = lambda: None) -> float:
    """Train only the model's policy network on the labelled pictures; return the loss of the last batch."""
    policy: Any = model.policy
    actor = policy.mlp_extractor.policy_net
    optimiser = torch.optim.AdamW(actor.parameters(), lr=_LEARNING_RATE, weight_decay=_DECAY)
    # Mirrored pictures, too: one that is tilted to the left needs the same rotation as one to the right, reversed.
    other = shown.wanted.copy()
    other[:, TOOLS.index("straighten")] *= -1.0
    seen = torch.from_numpy(np.concatenate((shown.seen, observation.mirrored(shown.seen))))
    moves = torch.from_numpy(np.concatenate((shown.wanted, other)))
    loss = torch.zeros(())
    for number in range(passes):
        check()
        for group in optimiser.param_groups:
            group["lr"] = _LEARNING_RATE * max(0.05, 1.0 - number / passes)
        for rows in torch.split(torch.randperm(len(seen)), _BATCH):
            off = F.smooth_l1_loss(actor(seen[rows], _DROPOUT) / _SQUARE, moves[rows] / _SQUARE, reduction="none")
            loss = (off * _SQUARE).mean()
            optimiser.zero_grad()
            torch.autograd.backward(loss)
            optimiser.step()
    return float(loss.detach())


def _observed(seen: Any) -> Array:
    found: Array = np.array(seen, np.float32)  # a copy: some environments reuse the array
    return found
