"""The search: training without a workflow, then with all of them mixed, then with one after another, then with the
best.

One `advance` is one update of the learner. Between two calls the whole state can be saved. The loop uses neither files
nor processes.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from jurybox.studies.workflow.gp_ucb import Proposal, Trial, WorkflowSearch
from jurybox.studies.workflow.networks import NO_ORDER, DefendedNetworks, Part, Situation
from jurybox.studies.workflow.policy import Defender, OwnNetwork, learner_of
from jurybox.studies.workflow.rollouts import PlayedEpisodes, play, share
from jurybox.studies.workflow.settings import N_TYPES, ORDERS, GateOn, Order, WorkflowTraining
from jurybox.training.algorithms.base import Progress, Rollout
from jurybox.training.algorithms.ppo import PPO
from jurybox.training.algorithms.schedules import at
from jurybox.training.algorithms.torch_states import as_tensors
from jurybox.training.environments.adapter import Waiting
from jurybox.training.roles.evaluation import play_episodes
from jurybox.training.roles.policy_client import PolicyClient
from jurybox.training.runtime.role_context import check_losses
from jurybox.training.spaces import ALONE, MASK

Parts = tuple[Part, ...]

REFERENCE, MIXED, SEARCH, FINAL, DONE = "reference", "mixed", "search", "final", "done"
_PHASES = (REFERENCE, MIXED, SEARCH, FINAL, DONE)
_WITHOUT = 1 / 8  # share without an order among the networks that train all orders
_TRIES = 5  # to play a round of which one episode is whole
_HEAD_STARTS, _ORDERS = 78, 79  # streams of random numbers


Verdict = Literal["passed", "failed", "not judged"]


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Means over fresh episodes.

    Attributes:
        returns: mean return of episodes from their start. error: its standard error. spread: deviation between them.
        fixes: per episode. fixed, complied: all fixes in them, and those that complied by the first definition.
        judged, obeyed: judged fixes, and those of them that complied, with and without a head start.
        taken_over: mean return of episodes in which the attacker had a head start. taken_over_error: its error.
        episodes: total number.
    """

    returns: float
    error: float
    spread: float
    fixes: float
    fixed: int
    complied: int
    judged: int
    obeyed: int
    taken_over: float
    taken_over_error: float
    episodes: int

    @property
    def obedience(self) -> float:
        """Return the share of the judged fixes that complied; 0 without one."""
        return share(self.obeyed, self.judged)

    @property
    def rate(self) -> float:
        """Return the share of all fixes that complied by the first definition; 0 without one."""
        return share(self.complied, self.fixed)

    def counts(self, on: GateOn) -> tuple[int, int]:
        """Return the number of the fixes that a gate is about, and of those that complied."""
        return (self.judged, self.obeyed) if on == "obedience" else (self.fixed, self.complied)


@dataclass(frozen=True, slots=True)
class OrderEvaluation:
    """Evaluation of a policy that sees the orders that begin with a type.

    Attributes:
        first: the type; None: the policy sees no order.
        evaluated: the policy sees one of these orders in each episode.
        anyway: obedience of the same policy without seeing the order.
    """

    first: int | None
    evaluated: Evaluated
    anyway: float


@dataclass(frozen=True, slots=True)
class TriedWorkflow(Trial):
    """A tried workflow: its proposal and score, its training, its evaluation."""

    episodes: int
    verdict: Verdict
    evaluated: Evaluated


class WorkflowTrainer:
    """The search.

    Args:
        env: training networks, as many as the settings say, in parts (see `environments`). evaluation: the same, with
            other random numbers.
        policy: makes the client that computes a learner's network; by default this process.

    Attributes:
        on_progress: called at every step of every rollout with the number of trained episodes (with the current share
            of one) and, during an evaluation, its finished share.
    """

    def __init__(
        self,
        settings: WorkflowTraining,
        env: Parts,
        evaluation: Parts,
        policy: Callable[[PPO], PolicyClient] = OwnNetwork,
    ) -> None:
        self.settings = settings
        self.on_progress: Callable[[float, float | None], None] = lambda episodes, evaluated: None
        self._env, self._evaluation = env, evaluation
        self._make_policy = policy
        self.search = WorkflowSearch(
            beta=settings.beta,
            length=settings.length,
            noise=settings.noise,
            revisit=settings.revisit,
            seed=settings.seed,
        )
        self.phase = REFERENCE if settings.reference_share > 0 else MIXED if self._mixes else SEARCH
        self.episodes = self.updates = 0
        self.env_steps = 0
        self.tried: list[TriedWorkflow] = []
        self.reference: Evaluated | None = None
        self.final: Evaluated | None = None
        self.best: Order | None = None
        self.prices: list[OrderEvaluation] = []
        self.recent: list[float] = []
        self._learner_steps = 0  # steps of discarded learners
        self._proposal: Proposal | None = None
        self._began = 0  # episodes when this workflow's training began
        self._kept: tuple[float, dict[str, Any]] | None = None  # best policy of the final phase
        self.last: dict[str, Any] | None = None  # at the end: the learner's last weights, before it loads the best ones
        self.learner, self._random = self._new_learner()
        self._policy = self._defender()

    @property
    def done(self) -> bool:
        return self.phase == DONE

    @property
    def environments(self) -> tuple[Parts, Parts]:
        """Return the environments of training and of evaluation."""
        return self._env, self._evaluation

    @property
    def learner_steps(self) -> int:
        return self._learner_steps + self.learner.gradient_steps

    @property
    def order(self) -> Order | None:
        """Return the current workflow."""
        if self.phase == SEARCH:
            return None if self._proposal is None else self._proposal.order
        return self.best if self.phase in (FINAL, DONE) else None

    def advance(self) -> dict[str, float]:
        """Play an episode of each network, learn from it, and change phase or workflow when due.

        Returns:
            Current numbers.
        """
        settings = self.settings
        if self.phase == SEARCH and self._proposal is None:
            self._begin()
        orders, own = self._orders()
        head_starts = self._head_starts()
        rollout, played = _until_whole(
            lambda: play(
                self._env,
                self._policy,
                orders,
                steps=settings.episode_length,
                weight=settings.align_lambda,
                reward=self.alignment_reward,
                on=settings.gate_on,
                head_starts=head_starts,
                use_masks=settings.use_masks,
                mask_orders=settings.order_masks,
                show_turns=settings.show_turns,
                stepped=lambda step: self.on_progress(
                    self.episodes + settings.envs * step / settings.episode_length, None
                ),
                learn_every=settings.update_every_steps,
                learn=self._learn,
            ),
            own,
        )
        own, from_start = own & played.whole, (head_starts == 0) & played.whole
        shown = played.of(from_start if from_start.any() else own)
        judged = played.of(own)
        # Returns of other workflows, and of networks that the attacker entered before, are not comparable.
        comparable = own & from_start
        compared = played.of(comparable if comparable.any() else own)
        gated = judged if settings.gate_on == "obedience" else compared
        if self.phase == FINAL:
            self._keep(gated, compared)
        metrics = self._learn(rollout.part(settings.last_update_from, settings.episode_length, rollout.last_value))
        self.episodes += settings.envs
        self.env_steps += settings.envs * settings.episode_length
        self.recent = shown.returns.tolist()
        numbers = {
            "phase": float(_PHASES.index(self.phase)),
            "workflow": float(len(self.tried)),
            "episodes": float(self.episodes),
            "return_mean": float(shown.returns.mean()),
            "return_std": float(shown.returns.std()),
            **_reward_metrics(rollout.reward[:, played.whole], played.returns[played.whole]),
            "obedience": judged.obedience,
            "judged": float(judged.judged.mean()),
            "compliance": judged.compliance,
            "fixes": float(judged.fixes.mean()),
            **metrics,
        }
        self._update_phase(gated)
        return numbers

    def _learn(self, rollout: Rollout) -> dict[str, float]:
        self.updates += 1
        assert rollout.valid is not None
        if not rollout.valid.any():
            return {}
        found = self.learner.update(rollout, Progress(self.episodes, self.settings.total_episodes))
        metrics = {name: float(value) for name, value in found.metrics.items()}
        check_losses(metrics)
        return {**metrics, "learner_steps": float(self.learner.gradient_steps)}

    def evaluate(
        self, order: Order | Sequence[Order] | None, episodes: int, *, with_orders: bool = True, fresh: bool = True
    ) -> Evaluated:
        """Evaluate the learner's policy, as it acts in training, on new episodes.

        Args:
            order: the order of all episodes; several orders are assigned in turn.
            episodes: number without a head start, and as many with a head start of the attacker.
            with_orders: whether the policy sees the order that it is judged by.
            fresh: whether to play episodes without a head start; else returns and compliance are of those with one.
        """
        settings, envs = self.settings, self.settings.envs
        count = -(-episodes // envs) * envs
        orders = [NO_ORDER] if order is None else np.atleast_2d(np.asarray(order, np.int64)).tolist()
        head_starts = np.random.default_rng((settings.seed, _HEAD_STARTS, self.updates, 1)).integers(
            0, settings.longest_head_start + 1, count
        )
        networks = DefendedNetworks(
            self._evaluation,
            settings.episode_length,
            use_masks=settings.use_masks,
            mask_orders=settings.order_masks,
            with_orders=with_orders,
            show_turns=settings.show_turns,
        )
        total, done = count // envs * settings.episode_length * (2 if fresh else 1), itertools.count()

        def choose(waiting: Waiting) -> npt.NDArray[np.int64]:
            return self._policy.act(waiting.observation[ALONE], waiting.observation[MASK])[0]

        def played(starts: Sequence[int]) -> PlayedEpisodes:
            situations = [Situation(orders[number % len(orders)], start) for number, start in enumerate(starts)]

            def begins(episode: int) -> None:
                networks.assign(episode % envs, situations[episode])

            def alive() -> None:
                self.on_progress(self.episodes, min(1.0, next(done) / total))

            def evaluated() -> tuple[None, PlayedEpisodes]:
                episodes = play_episodes(networks, range(count), choose, begins=begins, alive=alive)
                return None, PlayedEpisodes.of_episodes(episodes)

            found = _until_whole(evaluated, np.ones(count, np.bool_))[1]
            return found.of(found.whole)

        groups = [played([0] * count)] if fresh else []
        groups.append(played(head_starts.tolist()))
        first, second = groups[0], groups[-1]
        return Evaluated(
            returns=float(first.returns.mean()),
            error=_error(first.returns),
            spread=float(first.returns.std()),
            fixes=float(first.fixes.mean()),
            fixed=int(first.fixes.sum()),
            complied=int(first.complied.sum()),
            judged=sum(int(each.judged.sum()) for each in groups),
            obeyed=sum(int(each.obeyed.sum()) for each in groups),
            taken_over=float(second.returns.mean()),
            taken_over_error=_error(second.returns),
            episodes=sum(len(each.returns) for each in groups),
        )

    def verdict(self, counted: int, complied: int) -> Verdict:
        """Return whether the fixes that the gate is about and those that complied pass it; too few never pass."""
        if counted < self.settings.min_judged:
            return "not judged"
        return "passed" if complied >= self.settings.gate * counted else "failed"

    def verdict_on(self, found: Evaluated | PlayedEpisodes) -> Verdict:
        """Return whether these episodes pass the gate."""
        return self.verdict(*found.counts(self.settings.gate_on))

    @property
    def alignment_reward(self) -> float:
        """Return what a fix that complies gains now."""
        settings, total = self.settings, self.settings.total_episodes
        if self.phase in (FINAL, DONE):
            remaining = 0.0
        elif self._mixes:  # equal for all workflows that are compared later
            remaining = 1.0 - (self.episodes - settings.reference_share * total) / (settings.mixed_share * total)
        else:
            most = settings.envs * settings.max_train_episodes_per_env
            remaining = 1.0 - (self.episodes - self._began) / most
        return at(settings.alignment_reward, min(1.0, max(0.0, remaining)))

    @property
    def _mixes(self) -> bool:
        return self.settings.mixed_share > 0 and self.settings.inherit

    def _orders(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Return workflows of the next episodes, (envs, 5), and which networks count in the metrics, bool (envs,)."""
        envs = self.settings.envs
        random = np.random.default_rng((self.settings.seed, _ORDERS, self.updates))
        mixed = np.array(ORDERS)[random.integers(len(ORDERS), size=envs)]
        mixed[random.random(envs) < _WITHOUT] = NO_ORDER
        everyone = np.ones(envs, np.bool_)
        if self.phase == MIXED:
            return mixed, everyone
        own = np.broadcast_to(NO_ORDER if self.order is None else self.order, (envs, N_TYPES))
        if self.order is None or not self._mixes:
            return own, everyone
        dealt = random.permutation(envs) < -(-envs // 2)
        return np.where(dealt[:, None], own, mixed), dealt

    def _head_starts(self) -> npt.NDArray[np.int64]:
        settings = self.settings
        random = np.random.default_rng((settings.seed, _HEAD_STARTS, self.updates))
        steps = random.integers(0, settings.longest_head_start + 1, settings.envs)
        return np.where(random.random(settings.envs) < settings.head_start_share, steps, 0)

    def state(self) -> dict[str, Any]:
        """Return everything that `restore` needs: nested numbers, strings and tensors."""
        return {
            "phase": self.phase,
            "counted": [self.episodes, self.updates, self.env_steps, self._learner_steps, self._began],
            "recent": self.recent,
            "trace": [asdict(trial) for trial in self.search.trace],
            "tried": [asdict(each) for each in self.tried],
            "proposal": None if self._proposal is None else asdict(self._proposal),
            "evaluated": [None if each is None else asdict(each) for each in (self.reference, self.final)],
            "best": self.best,
            "prices": [asdict(each) for each in self.prices],
            "kept": self._kept,
            "learner": self.learner.state_dict(),
            "random": self._random.bit_generator.state,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned; the environments' random states are not in it."""
        self.phase = state["phase"]
        self.episodes, self.updates, self.env_steps, self._learner_steps, self._began = state["counted"]
        self.recent = list(state["recent"])
        self.search.restore(state["trace"])
        self.tried = [_restore_trial(each) for each in state["tried"]]
        proposal = state["proposal"]
        self._proposal = None if proposal is None else Proposal(**{**proposal, "order": tuple(proposal["order"])})
        self.reference, self.final = (None if each is None else Evaluated(**each) for each in state["evaluated"])
        self.best = None if state["best"] is None else tuple(state["best"])
        self.prices = [
            OrderEvaluation(**{**each, "evaluated": Evaluated(**each["evaluated"])}) for each in state["prices"]
        ]
        kept = state["kept"]
        self._kept = None if kept is None else (kept[0], as_tensors(kept[1]))
        self.learner.load_state_dict(state["learner"])
        self._random.bit_generator.state = state["random"]
        self._policy = self._defender()
        if self.phase == DONE and self.episodes < self.settings.total_episodes:
            # The run has got a larger budget since its end: the search goes on with the policy that was evaluated.
            self.phase, self.final, self.prices, self._kept = SEARCH, None, [], None

    def _begin(self) -> None:
        self._proposal = self.search.propose()
        self._began = self.episodes
        if not self.settings.inherit:
            self._learner_steps += self.learner.gradient_steps
            self.learner, self._random = self._new_learner()
            self._policy = self._defender()

    def _update_phase(self, played: PlayedEpisodes) -> None:
        settings, total = self.settings, self.settings.total_episodes
        reference = settings.reference_share * total
        if self.phase == REFERENCE and self.episodes >= reference:
            self.reference = self.evaluate(None, 10 * settings.evaluation_episodes)
            self.phase = MIXED if self._mixes else SEARCH
        elif self.phase == MIXED and self.episodes >= reference + settings.mixed_share * total:
            self.phase = SEARCH
        elif self.phase == SEARCH:
            passed = self.verdict_on(played) == "passed"
            spent = self.episodes >= (1 - settings.final_share) * total
            if passed or spent or self.episodes - self._began >= settings.envs * settings.max_train_episodes_per_env:
                self._finish()
            if spent:
                self.best = max(self.search.trace, key=lambda trial: trial.score).order
                self.phase = FINAL
        if self.phase != DONE and self.episodes >= total:
            self._conclude()

    def _finish(self) -> None:
        proposal, settings = self._proposal, self.settings
        assert proposal is not None
        found = self.evaluate(proposal.order, settings.evaluation_episodes)
        verdict = self.verdict_on(found)
        counted, complied = found.counts(settings.gate_on)
        kept = 0.0 if verdict == "not judged" else share(complied, counted)
        score = found.returns - settings.shortfall_cost * max(0.0, settings.gate - kept)
        trial = self.search.tell(proposal, score)
        spent = self.episodes - self._began
        self.tried.append(TriedWorkflow(**asdict(trial), episodes=spent, verdict=verdict, evaluated=found))
        self._proposal = None

    def _keep(self, gated: PlayedEpisodes, comparable: PlayedEpisodes) -> None:
        """Keep the current policy if it is the best that passes the gate."""
        if self.verdict_on(gated) != "passed":
            return
        returns = float(comparable.returns.mean())
        if self._kept is None or returns > self._kept[0]:
            self._kept = (returns, copy.deepcopy(self.learner.acting.state_dict()))

    def _conclude(self) -> None:
        settings = self.settings
        if self.best is None and self.search.trace:
            self.best = max(self.search.trace, key=lambda trial: trial.score).order
        self.last = copy.deepcopy(self.learner.acting.state_dict())
        if self._kept is not None:
            self.learner.acting.load_state_dict(self._kept[1])
            self._policy = self._defender()
        self.final = self.evaluate(self.best, 10 * settings.evaluation_episodes)
        if self._mixes:
            self.prices = self.price(5 * settings.evaluation_episodes)
        self.phase = DONE

    def price(self, episodes: int) -> list[OrderEvaluation]:
        """Evaluate the policy without an order, and with the orders that begin with each type."""
        found = [OrderEvaluation(None, self.evaluate(None, episodes), 0.0)]
        for kind in range(N_TYPES):
            orders = [order for order in ORDERS if order[0] == kind]
            anyway = self.evaluate(orders, episodes, with_orders=False, fresh=False)
            found.append(OrderEvaluation(kind, self.evaluate(orders, episodes), anyway.obedience))
        return found

    def _new_learner(self) -> tuple[PPO, np.random.Generator]:
        # Without inheritance each workflow gets a network of its own, from a seed of its own.
        seed = np.random.SeedSequence((self.settings.seed, len(self.tried))).generate_state(1)[0]
        learner = learner_of(self.settings.ppo)
        learner.setup(int(seed), "cpu")
        return learner, np.random.default_rng(seed)

    def _defender(self) -> Defender:
        return Defender(self.learner, self._make_policy(self.learner), self._random)


def _until_whole(
    play: Callable[[], tuple[Any, PlayedEpisodes]], counted: npt.NDArray[np.bool_]
) -> tuple[Any, PlayedEpisodes]:
    """Play, and again while the processes of all `counted` networks were replaced before the end of their episodes."""
    for _ in range(_TRIES):
        found = play()
        if (found[1].whole & counted).any():
            return found
    raise RuntimeError(
        f"none of {int(counted.sum())} networks reached the end of an episode in {_TRIES} tries: their processes were "
        "replaced each time; their errors are above"
    )


def _reward_metrics(rewards: npt.NDArray[np.float32], returns: npt.NDArray[np.float64]) -> dict[str, float]:
    """Return the learner's mean reward of an episode, and how much of it came from the workflow."""
    total = float(rewards.sum(0, dtype=np.float64).mean())
    return {"total_reward": total, "alignment_reward": total - float(returns.mean())}


def _error(values: npt.NDArray[np.float64]) -> float:
    return float(values.std() / np.sqrt(len(values)))


def _restore_trial(parts: Mapping[str, Any]) -> TriedWorkflow:
    return TriedWorkflow(**{**parts, "order": tuple(parts["order"]), "evaluated": Evaluated(**parts["evaluated"])})
