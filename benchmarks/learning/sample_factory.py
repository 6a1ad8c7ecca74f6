"""Sample Factory's APPO at our tasks with PPO; run by a Python that has Sample Factory, and for Pong ale-py.

It is one process in its serial mode: it collects, then it learns, as all sides do. An observer of its runner evaluates.
Its settings have a task's numbers, and those of its own that make it Stable-Baselines3's PPO: no normalisation of
observations and returns, no V-trace, two networks, minibatches drawn anew, values that may move freely. What it has no
setting for stays its own: the ratio is bounded below by 1 / (1 + clip) instead of 1 - clip, all layers begin with the
same gain, a truncated episode is bootstrapped by the value of the observation before its last, and an epoch that leaves
the loss as it was ends an update. Pong is that of its example for Atari: the same network, but lives that are
episodes, and pictures that are made small before they are made gray. What it asks another process about the
environment before it begins is not counted.
"""

from __future__ import annotations

import tempfile
from importlib import metadata
from typing import Any

from benchmarks.learning.tasks import Clock, Task, evaluation_seeds, register_atari

_PONG = "atari_pong"  # in its example


def flags(task: Task, seed: int, folder: str) -> list[str]:
    """Return its settings for a task, as its flags.

    Args:
        folder: for what it writes.

    Raises:
        ValueError: it has no such algorithm, or no such setting.
    """
    if task.algorithm != "ppo" or task.recurrent or (":" in task.env and not task.pictures):
        raise ValueError(f"{task.algorithm} of {task.env}: expected PPO of a registered environment, or of Pong")
    told = dict(task.settings)
    steps, batch = told.pop("n_steps"), told.pop("batch_size", 64)
    given = {
        "algo": "APPO",
        "env": _PONG if task.pictures else task.env,
        "experiment": "run",
        "train_dir": folder,
        "device": "cpu",
        "seed": seed,
        "serial_mode": True,
        "async_rl": False,
        "num_workers": 1,
        "num_envs_per_worker": task.envs,
        "worker_num_splits": 1,
        "set_workers_cpu_affinity": False,
        "rollout": steps,
        "batch_size": batch,
        "num_batches_per_epoch": steps * task.envs // batch,
        "num_epochs": told.pop("n_epochs", 10),
        "shuffle_minibatches": True,
        "train_for_env_steps": task.steps,
        "summaries_use_frameskip": False,
        "learning_rate": told.pop("learning_rate", 3e-4),
        "lr_schedule": "constant",
        "adam_eps": 1e-5,
        "max_grad_norm": 0.5,
        "gamma": told.pop("gamma", 0.99),
        "gae_lambda": told.pop("gae_lambda", 0.95),
        "value_bootstrap": True,
        "with_vtrace": False,
        "ppo_clip_ratio": told.pop("clip_range", 0.2),
        "ppo_clip_value": 1e9,
        "value_loss_coeff": 0.5,
        "exploration_loss": "entropy",
        "exploration_loss_coeff": told.pop("ent_coef", 0.0),
        "normalize_input": False,
        "normalize_returns": False,
        "use_rnn": False,
        "recurrence": 1,
    }
    layers: list[str] = []
    if not task.pictures:  # those of its example are the same network
        given |= {"nonlinearity": "tanh", "actor_critic_share_weights": False}
        layers = ["--encoder_mlp_layers", *map(str, told.pop("hidden", [64, 64]))]
    if told:
        raise ValueError(f"settings {sorted(told)}: expected none that Sample Factory has no flag for")
    return [*(f"--{name}={value}" for name, value in given.items()), *layers]


def made(name: str, settings: Any = None, numbers: Any = None, render_mode: str | None = None) -> Any:
    """Make an environment, with the arguments of Sample Factory's factories; another process imports this one."""
    if name == _PONG:
        from sf_examples.atari.atari_utils import make_atari_env

        register_atari()
        return make_atari_env(name, settings, numbers, render_mode)
    import gymnasium

    return gymnasium.make(name, render_mode=render_mode)


def run(task: Task, seed: int, episodes: int) -> dict[str, Any]:
    """Train; returns what `Clock.told` does."""
    import torch
    from sample_factory.algo.runners.runner import AlgoObserver
    from sample_factory.algo.utils.action_distributions import argmax_actions
    from sample_factory.algo.utils.misc import ExperimentStatus
    from sample_factory.algo.utils.rl_utils import prepare_and_normalize_obs
    from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
    from sample_factory.envs.env_utils import register_env
    from sample_factory.model.model_utils import get_rnn_size
    from sample_factory.train import make_runner
    from sf_examples.atari.atari_params import atari_override_defaults

    torch.set_num_threads(1)
    seeds, every = evaluation_seeds(seed, episodes), task.steps // task.evaluations
    env = None if task.score is None else made(task.env)

    class Evaluations(AlgoObserver):
        clock: Clock

        def on_init(self, runner: Any) -> None:
            self.clock = Clock()

        def on_training_step(self, runner: Any, training_iteration_since_resume: int) -> None:
            steps = training_iteration_since_resume * task.settings["n_steps"] * task.envs
            if len(self.clock.evaluations) < min(steps // every, task.evaluations):
                self.play(runner.learners[0].learner.actor_critic, runner.cfg)

        def play(self, actor: Any, cfg: Any) -> None:
            with self.clock.evaluation(), torch.no_grad():
                total = 0.0
                for each in seeds if env is not None else ():
                    seen, over = env.reset(seed=each)[0], False
                    while not over:
                        actor(prepare_and_normalize_obs(actor, {"obs": seen[None]}), torch.zeros(1, get_rnn_size(cfg)))
                        action = argmax_actions(actor.action_distribution())
                        seen, reward, terminated, truncated, _ = env.step(action.numpy()[0])
                        total += float(reward)
                        over = terminated or truncated
            self.clock.evaluations.append(total / len(seeds))

    with tempfile.TemporaryDirectory() as folder:
        given = flags(task, seed, folder)
        parser, named = parse_sf_args(given)
        if task.pictures:
            atari_override_defaults(named.env, parser)
        register_env(named.env, made)
        watch = Evaluations()
        _, runner = make_runner(parse_full_cfg(parser, given))
        runner.register_observer(watch)
        for part in (runner.init, runner.run):
            if (status := part()) != ExperimentStatus.SUCCESS:
                raise RuntimeError(f"Sample Factory ended with status {status}: its messages are above")
    versions = {name: metadata.version(name) for name in ("sample-factory", "torch", "gymnasium")}
    return {**watch.clock.told(task), "versions": versions}
