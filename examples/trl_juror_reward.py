"""TRL's GRPO with a reward from a juror on a server: a tiny network learns to write vowels. It downloads no model.

pip install trl"""

import argparse
import math

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from jurybox.client.rewards import trl_reward
from jurybox.protocol import TensorSpec
from jurybox.server.models import ServedModel
from jurybox.training.runtime import served_models

LETTERS = ["<end>", *" abcdefghijklmnopqrstuvwxyz"]


class Vowels(nn.Module):
    """The juror: the share of vowels in a text."""

    def forward(self, text):
        return torch.tensor([sum(letter in b"aeiou" for letter in one) / max(len(one), 1) for one in text])


def juror() -> ServedModel:
    return ServedModel(Vowels(), {"text": TensorSpec("bytes", capacity=4096)}, {"score": TensorSpec("float32")})


def main(steps: int, address: str | None) -> None:
    vocabulary = {letter: number for number, letter in enumerate(LETTERS)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(vocabulary, [])), eos_token="<end>", pad_token="<end>"
    )
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    torch.manual_seed(0)
    network = GPT2LMHeadModel(
        GPT2Config(vocab_size=len(LETTERS), n_positions=64, n_embd=64, n_layer=2, n_head=2, **ends)
    )
    settings = GRPOConfig(
        "trl-out",
        max_steps=steps,
        per_device_train_batch_size=32,
        num_generations=8,
        max_completion_length=16,
        learning_rate=3e-3,
        use_cpu=True,
        bf16=False,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    prompts = Dataset.from_dict({"prompt": [letter * 2 for letter in LETTERS[2:]] * 20})
    with served_models({"vowels": {"factory": "trl_juror_reward:juror"}}, address) as served:
        reward = trl_reward(served.names["vowels"], address=served.address, inputs={"text": "completions"})
        trainer = GRPOTrainer(network, reward, settings, train_dataset=prompts, processing_class=tokenizer)
        trainer.train()
    rewards = [line["reward"] for line in trainer.state.log_history if "reward" in line]
    rewards = [one for one in map(float, rewards) if math.isfinite(one)]
    few = max(1, len(rewards) // 10)
    first, last = sum(rewards[:few]) / few, sum(rewards[-few:]) / few
    print(f"mean reward of TRL's GRPO: first steps {first:.2f}, last {last:.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--server", help="address of one that runs; without it a private one is started")
    arguments = parser.parse_args()
    main(arguments.steps, arguments.server)
