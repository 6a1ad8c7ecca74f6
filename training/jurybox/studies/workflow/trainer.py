"""The search: training without a workflow, then with all of them mixed, then with one after another, then with the
best.

It is a trainer. Its step is an episode of each network, what is learned from it, and the evaluations that are due then.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from jurybox.studies.workflow import environments
from jurybox.studies.workflow.environments import Splits
from jurybox.studies.workflow.gp_ucb import Proposal
from jurybox.studies.workflow.networks import NO_ORDER, DefendedNetworks, Situation
from jurybox.studies.workflow.policy import Defender, OwnNetwork, ServedNetwork, ServedWeights, learner_of
from jurybox.studies.workflow.rollouts import PlayedEpisodes, play, share
from jurybox.studies.workflow.searched import Evaluated, OrderEvaluation, Searched, TriedWorkflow
from jurybox.studies.workflow.settings import N_TYPES, ORDERS, Order, WorkflowTraining, describe
from jurybox.training.algorithms.base import Progress, Rollout
from jurybox.training.algorithms.ppo import PPO
from jurybox.training.algorithms.schedules import at
from jurybox.training.algorithms.torch_states import as_tensors
from jurybox.training.environments.adapter import Waiting
from jurybox.training.roles.evaluation import play_episodes
from jurybox.training.roles.policy_client import PolicyClient
from jurybox.training.runtime.plan import PolicyServer
from jurybox.training.runtime.role_context import Made, RoleContext, Trainer, check_losses
from jurybox.training.spaces import ALONE, MASK

REFERENCE, MIXED, SEARCH, FINAL, DONE = "reference", "mixed", "search", "final", "done"
_PHASES = (REFERENCE, MIXED, SEARCH, FINAL, DONE)
_WITHOUT = 1 / 8  # share without an order among the networks that train all orders
FOLDER = "run"  # of the plan: where workflows.csv goes
_TRIES = 5  # to play a round of which one episode is whole
_HEAD_STARTS, _ORDERS = 78, 79  # streams of random numbers


def trainer(
    context: RoleContext,
    *,
    workflow: Mapping[str, Any],
    serial: bool,
    ray: Mapping[str, Any] | None,
    server: Mapping[str, Any] | None,
) -> WorkflowTrainer:
    """Make the role of `train.plan`."""
    settings = WorkflowTraining.checked(workflow)
    with ExitStack() as undo:
        made = environments.networks(settings, ray, serial=serial, resumed_at=context.env_steps)
        env, evaluation, restarts = undo.enter_context(made)
        role = WorkflowTrainer(context, settings, env, evaluation, restarts)
        if server is not None:
            weights = ServedWeights(PolicyServer(**server), settings.envs, role.alive)
            undo.callback(weights.close)
            role.ask(lambda learner: ServedNetwork(learner, weights))
        role.resources = undo.pop_all()
    return role


class WorkflowTrainer(Searched, Trainer):
    """The search.

    Args:
        env: training networks, as many as the settings say (see `environments`). evaluation: the same, with
            other random numbers.
        replaced: returns the number of env workers that were replaced.

    Attributes:
        resources: closed with the role.
    """

    def __init__(
        self,
        context: RoleContext,
        settings: WorkflowTraining,
        env: Splits,
        evaluation: Splits,
        replaced: Callable[[], int] = lambda: 0,
    ) -> None:
        Trainer.__init__(self, context)
        Searched.__init__(self, settings)
        self.resources = ExitStack()
        self._env, self._evaluation, self._replaced = env, evaluation, replaced
        self._make_policy: Callable[[PPO], PolicyClient] = OwnNetwork
        self.phase = REFERENCE if settings.reference_share > 0 else MIXED if self._mixes else SEARCH
        self.episodes = self.updates = 0
        self.env_steps = 0
        self._under_way = 0  # steps of the step that goes on
        self._learner_steps = 0  # steps of discarded learners
        self._proposal: Proposal | None = None
        self._began = 0  # episodes when this workflow's training began
        self._kept: tuple[float, dict[str, Any]] | None = None  # best policy of the final phase
        # At the end: the learner's last weights, before it loads the best ones.
        self.last: dict[str, torch.Tensor] | None = None
        self._restarts_before = 0  # workers replaced in earlier parts of a resumed run
        self.learner, self._random = self._new_learner()
        self._policy = self._defender()

    def ask(self, policy: Callable[[PPO], PolicyClient]) -> None:
        """Let the learner's network be computed by the client that `policy` makes of a learner."""
        self._make_policy = policy
        self._policy = self._defender()

    @property
    def done(self) -> bool:
        return self.phase == DONE

    @property
    def learner_steps(self) -> int:
        return self._learner_steps + self.learner.gradient_steps

    @property
    def order(self) -> Order | None:
        """Return the current workflow."""
        if self.phase == SEARCH:
            return None if self._proposal is None else self._proposal.order
        return self.best if self.phase in (FINAL, DONE) else None

    def alive(self) -> None:
        """Let happen what happens within a step; raises Abandoned where the run stops."""
        self.context.goes_on(self._under_way)

    def step(self) -> Made:
        steps, learned, tried = self.env_steps, self.learner_steps, len(self.tried)
        self.advance()
        if len(self.tried) > tried:
            last = self.tried[-1]
            counted, complied = last.evaluated.counts(self.settings.gate_on)
            self.context.say(
                f"{len(self.tried)}: {describe(last.order)}: return {last.evaluated.returns:.1f}, "
                f"{self.settings.gate_on} {share(complied, counted):.1%} of {counted} ({last.verdict}), "
                f"{last.episodes} episodes"
            )
            self.write_table(self.context.folder(FOLDER))
        return Made(self.env_steps - steps, self.learner_steps - learned)

    def publication(self) -> tuple[Any, dict[str, Any] | None]:
        return self._with_order(self.last or self.learner.acting.state_dict())

    def _with_order(self, weights: dict[str, torch.Tensor]) -> tuple[Any, dict[str, Any]]:
        """Return weights to publish, with the workflow that they are played with."""
        order = None if self.order is None else describe(self.order)
        return weights, {"environment_arguments": {"order": order}}

    def close(self) -> None:
        self.resources.close()

    def advance(self) -> dict[str, float]:
        """Play an episode of each network, learn from it, and change phase or workflow when due.

        Returns:
            Current numbers.
        """
        settings, self._under_way = self.settings, 0
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
                stepped=self._stepped,
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
        numbers = {
            "phase": float(_PHASES.index(self.phase)),
            "workflow": float(len(self.tried)),
            # Of this step, in place of those of the last hundred episodes of any kind.
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
        # Only now: a step that is left in its evaluation counts for nothing.
        for total in played.returns[played.whole].tolist():
            self.context.episode(total=total, length=settings.episode_length)
        self.context.metrics(**numbers)
        if self.final is not None:
            self._tell_final(self.final)
        return numbers

    def _stepped(self, step: int) -> None:
        self._under_way = self.settings.envs * step
        self.alive()

    def _tell_final(self, final: Evaluated) -> None:
        numbers = {"return": final.returns, "error": final.error, "obedience": final.obedience}
        self.context.evaluated(self.env_steps, numbers, self._with_order(self.learner.acting.state_dict()))

    def _learn(self, rollout: Rollout) -> dict[str, float]:
        self.updates += 1
        assert rollout.valid is not None
        if not rollout.valid.any():
            return {}
        found = self.learner.update(rollout, Progress(self.episodes, self.settings.total_episodes))
        metrics = {name: float(value) for name, value in found.metrics.items()}
        check_losses(metrics)
        return metrics

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
            [*itertools.chain(*self._evaluation)],
            settings.episode_length,
            use_masks=settings.use_masks,
            mask_orders=settings.order_masks,
            with_orders=with_orders,
            show_turns=settings.show_turns,
        )

        def choose(waiting: Waiting) -> npt.NDArray[np.int64]:
            return self._policy.act(waiting.observation[ALONE], waiting.observation[MASK])[0]

        def played(starts: Sequence[int]) -> PlayedEpisodes:
            situations = [Situation(orders[number % len(orders)], start) for number, start in enumerate(starts)]

            def begins(episode: int) -> None:
                networks.assign(episode % envs, situations[episode])

            def evaluated() -> tuple[None, PlayedEpisodes]:
                episodes = play_episodes(networks, range(count), choose, begins=begins, alive=self.alive)
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

    def save(self) -> dict[str, Any]:
        self.restarts = self._restarts_before + self._replaced()
        return {
            **self.found(),
            "phase": self.phase,
            "counted": [self.episodes, self.updates, self.env_steps, self._learner_steps, self._began],
            "proposal": None if self._proposal is None else asdict(self._proposal),
            "kept": self._kept,
            "learner": self.learner.state_dict(),
            "random": self._random.bit_generator.state,
            # With those of our own simulator a resumed run goes on as it would have without the interruption.
            "environments": [
                environments.random_state(self.settings, splits) for splits in (self._env, self._evaluation)
            ],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.restore_found(state)
        self._restarts_before = self.restarts
        self.phase = state["phase"]
        self.episodes, self.updates, self.env_steps, self._learner_steps, self._began = state["counted"]
        proposal = state["proposal"]
        self._proposal = None if proposal is None else Proposal(**{**proposal, "order": tuple(proposal["order"])})
        kept = state["kept"]
        self._kept = None if kept is None else (kept[0], as_tensors(kept[1]))
        self.learner.load_state_dict(state["learner"])
        self._random.bit_generator.state = state["random"]
        self._policy = self._defender()
        for splits, stream in zip((self._env, self._evaluation), state["environments"], strict=True):
            environments.restore_random_state(self.settings, splits, stream)
        if self.phase == DONE and self.episodes < self.settings.total_episodes:
            # The run has got a larger budget since its end: the search goes on with the policy that was evaluated.
            self.phase, self.final, self.prices, self._kept = SEARCH, None, [], None
        if not self.done:
            self.context.forget_best()  # of an end that is none any more: the best is that of the last evaluation

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
