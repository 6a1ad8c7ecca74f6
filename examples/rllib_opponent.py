"""RLlib's PPO against an opponent on the server, whose moves an RLModule requests.  pip install "ray[rllib]" pygame

PettingZoo's rock, paper, scissors, a hundred rounds a game. The opponent prefers paper, which PPO learns.
"""

import argparse

import numpy as np
import torch
from gymnasium.spaces import Discrete
from pettingzoo.classic import rps_v2
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.connectors.env_to_module import FlattenObservations
from ray.rllib.core.rl_module import RLModule, RLModuleSpec
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec
from ray.rllib.env.wrappers.pettingzoo_env import ParallelPettingZooEnv
from ray.tune.registry import register_env

from jurybox.client import connect
from jurybox.protocol import TensorSpec
from jurybox.server.models import ServedModel
from jurybox.training.runtime import served_models


def opponent() -> ServedModel:
    habit = torch.nn.Embedding.from_pretrained(torch.tensor([[0.0, 2.0, 0.0]] * 4))  # whatever we played
    return ServedModel(habit, {"seen": TensorSpec("int64")}, {"logits": TensorSpec("float32", (3,))})


class Served(RLModule):
    """The policy of the opponent, which does not learn."""

    framework = "torch"

    def setup(self):
        self.model = None

    def _forward(self, batch, **_):
        if self.model is None:  # in the env runner, which is another process
            self.model = connect(self.model_config["address"]).model(self.model_config["name"])
        logits = self.model.infer(np.asarray(batch["obs"], np.int64))
        return {"actions": (logits + np.random.gumbel(size=logits.shape)).argmax(1)}


def main(iterations: int, address: str | None) -> None:
    register_env("rps", lambda _: ParallelPettingZooEnv(rps_v2.parallel_env(max_cycles=100)))
    with served_models({"opponent": {"factory": "rllib_opponent:opponent"}}, address) as served:
        spaces = {"observation_space": Discrete(4), "action_space": Discrete(3)}
        where = {"address": served.address, "name": served.names["opponent"]}
        learned = RLModuleSpec(model_config=DefaultModelConfig(fcnet_hiddens=[64, 64]))
        modules = {"learned": learned, "served": RLModuleSpec(Served, model_config=where, **spaces)}
        config = (
            PPOConfig()
            .environment("rps")
            .multi_agent(
                policies=set(modules),
                policy_mapping_fn=lambda agent, _: "learned" if agent == "player_0" else "served",
                policies_to_train=["learned"],
            )
        )
        one_hot = FlattenObservations(multi_agent=True, agent_ids={"player_0"})
        config.env_runners(num_env_runners=1, env_to_module_connector=lambda *_, **__: one_hot)
        config.rl_module(rl_module_spec=MultiRLModuleSpec(rl_module_specs=modules))
        config.training(train_batch_size_per_learner=2000, num_epochs=6, lr=1e-3, vf_loss_coeff=0.005)
        algorithm = config.build_algo()
        won = [algorithm.train()["env_runners"]["module_episode_returns_mean"]["learned"] for _ in range(iterations)]
        algorithm.stop()
    print(f"mean return: first games against the served opponent {won[0]:.1f}, last {won[-1]:.1f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--server", help="address of one that runs; without it a private one is started")
    arguments = parser.parse_args()
    main(arguments.iterations, arguments.server)
