"""The search: training without a workflow first, then with one workflow after another, then with the best.

One `advance` is one update of the learner; between two of them the whole state can be saved. The loop uses neither
files nor processes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from jurybox.training.algorithms.ppo import PPO
from jurybox.training.algorithms.torch_states import as_tensors
from jurybox.training.environments.cage.tables import N_ACTIONS
from jurybox.training.search.gp_ucb import Proposal, WorkflowSearch
from jurybox.training.search.rollouts import INPUTS, Episodes, Part, Policy, play
from jurybox.training.search.settings import Order, WorkflowTraining

Parts = tuple[Part, ...]

REFERENCE, SEARCH, FINAL, DONE = "reference", "search", "final", "done"
_PHASES = (REFERENCE, SEARCH, FINAL, DONE)


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Means over fresh episodes.

    Attributes:
        returns: mean return. error: its standard error. spread: deviation between episodes.
        rate: of all fixes, the share that complied. fixes: an episode.
    """

    returns: float
    error: float
    spread: float
    rate: float
    fixes: float


@dataclass(frozen=True, slots=True)
class Tried:
    """A tried workflow: its proposal, its training, its evaluation."""

    order: Order
    mean: float
    std: float
    bound: float
    score: float
    episodes: int
    passed: bool
    evaluated: Evaluated


class WorkflowTrainer:
    """The search.

    Args:
        env: training networks, as many as the settings say, in parts (see `environments`). evaluation: the same, with
            other random numbers.
        policy: makes who acts for a learner; the learner itself by default.
    """

    def __init__(self, settings: WorkflowTraining, env: Parts, evaluation: Parts, policy: Any = None) -> None:
        self.settings = settings
        self._env, self._evaluation = env, evaluation
        self._make_policy = policy or (lambda learner: learner)
        self.search = WorkflowSearch(
            beta=settings.beta,
            length=settings.length,
            noise=settings.noise,
            revisit=settings.revisit,
            seed=settings.seed,
        )
        self.phase = REFERENCE if settings.reference_share > 0 else SEARCH
        self.episodes = self.updates = 0
        self.env_steps = 0
        self.tried: list[Tried] = []
        self.reference: Evaluated | None = None
        self.final: Evaluated | None = None
        self.best: Order | None = None
        self.recent: list[float] = []
        self._learner_steps = 0  # of learners that were given up
        self._proposal: Proposal | None = None
        self._began = 0  # episodes when this workflow's training began
        self._kept: tuple[float, dict[str, Any]] | None = None  # best policy of the final phase
        self.learner, self._policy = self._new_learner()

    @property
    def done(self) -> bool:
        return self.phase == DONE

    @property
    def environments(self) -> tuple[Parts, Parts]:
        """The environments of training and of evaluation."""
        return self._env, self._evaluation

    @property
    def learner_steps(self) -> int:
        return self._learner_steps + self.learner.learner_steps

    @property
    def order(self) -> Order | None:
        """The current workflow."""
        if self.phase == SEARCH:
            return None if self._proposal is None else self._proposal.order
        return self.best if self.phase in (FINAL, DONE) else None

    def advance(self) -> dict[str, float]:
        """Make one update, and the transitions that are due; returns current numbers."""
        settings = self.settings
        if self.phase == SEARCH and self._proposal is None:
            self._begin()
        rollout, played = play(
            self._env,
            self._policy,
            self.order,
            steps=settings.episode_length,
            weight=settings.align_lambda,
            no_fix_penalty=settings.no_fix_penalty,
            strict=settings.strict,
            use_masks=settings.use_masks,
        )
        if self.phase == FINAL:
            self._keep(played)
        told = self.learner.update(rollout)
        self.updates += 1
        self.episodes += settings.envs
        self.env_steps += settings.envs * settings.episode_length
        self.recent = played.returns.tolist()
        numbers = {
            "phase": float(_PHASES.index(self.phase)),
            "workflow": float(len(self.tried)),
            "episodes": float(self.episodes),
            "return_mean": float(played.returns.mean()),
            "return_std": float(played.returns.std()),
            "compliance": played.rate,
            "fixes": played.fixes / settings.envs,
            **told,
        }
        self._move_on(played)
        return numbers

    def evaluate(self, order: Order | None, episodes: int) -> Evaluated:
        """Evaluate the learner's policy, as it acts in training, on new episodes."""
        runs = [
            play(
                self._evaluation,
                self._policy,
                order,
                steps=self.settings.episode_length,
                weight=0.0,
                strict=self.settings.strict,
                use_masks=self.settings.use_masks,
            )[1]
            for _ in range(-(-episodes // self.settings.envs))
        ]
        returns = np.concatenate([run.returns for run in runs])
        fixes, complied = sum(run.fixes for run in runs), sum(run.complied for run in runs)
        return Evaluated(
            float(returns.mean()),
            float(returns.std() / np.sqrt(len(returns))),
            float(returns.std()),
            complied / max(fixes, 1),
            fixes / len(returns),
        )

    def passes(self, rate: float, fixes: float) -> bool:
        """Whether the gate is passed, with a minimum number of fixes."""
        return rate >= self.settings.gate and fixes >= self.settings.min_fixes

    def state(self) -> dict[str, Any]:
        """Everything that `restore` needs: numbers, strings, tensors, nested."""
        return {
            "phase": self.phase,
            "counted": [self.episodes, self.updates, self.env_steps, self._learner_steps, self._began],
            "recent": self.recent,
            "trace": [trial.as_dict() for trial in self.search.trace],
            "tried": [asdict(each) for each in self.tried],
            "proposal": None if self._proposal is None else asdict(self._proposal),
            "evaluated": [None if each is None else asdict(each) for each in (self.reference, self.final)],
            "best": self.best,
            "kept": self._kept,
            "learner": self.learner.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned; the environments' random states are not in it."""
        self.phase = state["phase"]
        self.episodes, self.updates, self.env_steps, self._learner_steps, self._began = state["counted"]
        self.recent = list(state["recent"])
        self.search.restore(state["trace"])
        self.tried = [_tried(each) for each in state["tried"]]
        proposal = state["proposal"]
        self._proposal = None if proposal is None else Proposal(**{**proposal, "order": tuple(proposal["order"])})
        self.reference, self.final = (None if each is None else Evaluated(**each) for each in state["evaluated"])
        self.best = None if state["best"] is None else tuple(state["best"])
        kept = state["kept"]
        self._kept = None if kept is None else (kept[0], as_tensors(kept[1]))
        self.learner.restore(state["learner"])
        self._policy = self._make_policy(self.learner)

    def _begin(self) -> None:
        self._proposal = self.search.propose()
        self._began = self.episodes
        if not self.settings.inherit:
            self._learner_steps += self.learner.learner_steps
            self.learner, self._policy = self._new_learner()

    def _move_on(self, played: Episodes) -> None:
        settings, total = self.settings, self.settings.total_episodes
        if self.phase == REFERENCE and self.episodes >= settings.reference_share * total:
            self.reference = self.evaluate(None, 10 * settings.evaluation_episodes)
            self.phase = SEARCH
        elif self.phase == SEARCH:
            passed = self.passes(played.rate, played.fixes / settings.envs)
            spent = self.episodes >= (1 - settings.final_share) * total
            if passed or spent or self.episodes - self._began >= settings.envs * settings.max_train_episodes_per_env:
                self._finish(passed)
            if spent:
                self.best = max(self.search.trace, key=lambda trial: trial.score).order
                self.phase = FINAL
        if self.phase != DONE and self.episodes >= total:
            self._conclude()

    def _finish(self, passed: bool) -> None:
        proposal, settings = self._proposal, self.settings
        assert proposal is not None
        found = self.evaluate(proposal.order, settings.evaluation_episodes)
        score = found.returns - settings.shortfall_cost * max(0.0, settings.gate - found.rate)
        self.search.tell(proposal, score)
        spent = self.episodes - self._began
        self.tried.append(
            Tried(proposal.order, proposal.mean, proposal.std, proposal.bound, score, spent, passed, found)
        )
        self._proposal = None

    def _keep(self, played: Episodes) -> None:
        """Keep the current policy if it is the best that complies."""
        if not self.passes(played.rate, played.fixes / self.settings.envs):
            return
        returns = float(played.returns.mean())
        if self._kept is None or returns > self._kept[0]:
            self._kept = (returns, copy.deepcopy(self.learner.network.state_dict()))

    def _conclude(self) -> None:
        if self.best is None and self.search.trace:
            self.best = max(self.search.trace, key=lambda trial: trial.score).order
        if self._kept is not None:
            self.learner.network.load_state_dict(self._kept[1])
            self._policy = self._make_policy(self.learner)
        self.final = self.evaluate(self.best, 10 * self.settings.evaluation_episodes)
        self.phase = DONE

    def _new_learner(self) -> tuple[PPO, Policy]:
        # Without inheritance each workflow gets a network of its own, from a seed of its own.
        seed = np.random.SeedSequence((self.settings.seed, len(self.tried))).generate_state(1)[0]
        learner = PPO(INPUTS, N_ACTIONS, self.settings.ppo, int(seed))
        return learner, self._make_policy(learner)


def _tried(parts: Mapping[str, Any]) -> Tried:
    return Tried(**{**parts, "order": tuple(parts["order"]), "evaluated": Evaluated(**parts["evaluated"])})
