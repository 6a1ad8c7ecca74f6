"""A photo policy to start from; `python -m jurybox.studies.photo.start RUN OUT.safetensors` takes a run's.

The shipped one is that of docs/photo.md, "What the demo starts from".
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from jurybox.training.algorithms.torch_states import as_tensors
from jurybox.training.checkpoints import CheckpointError, Checkpoints
from jurybox.training.runtime.plan import ConfigError

SHIPPED = Path(__file__).with_name("start.safetensors")
_DEVIATION = "log_std"  # of the actions' exploration: a training sets its own


def begin_with(model: Any, start: str) -> None:
    """Load a policy's weights into a new model.

    Args:
        model: of Stable-Baselines3.
        start: "shipped", or a file that `take` wrote.

    Raises:
        ConfigError: there is no such file, or its weights are those of another network.
    """
    file = SHIPPED if start == "shipped" else Path(start)
    try:
        weights = load_file(file)
    except Exception as error:  # safetensors has errors of its own
        raise ConfigError(f"start: expected 'shipped' or a file of photo.start, {file} is none: {error}") from error
    own = {name: tensor.shape for name, tensor in model.policy.state_dict().items() if name != _DEVIATION}
    if {name: tensor.shape for name, tensor in weights.items()} != own:
        raise ConfigError(f"start: the weights in {file} are those of another network: set `hidden` as it was there")
    model.policy.load_state_dict(weights, strict=False)


def take(run: Path, out: Path) -> None:
    """Write the weights of a run's newest checkpoint. Raises CheckpointError."""
    newest = Checkpoints(run / "checkpoints").existing()
    if (saved := newest.state("trainer")) is None:
        raise CheckpointError(f"{newest.folder} is of no photo training: expected trainer.state in it")
    state = as_tensors(saved["parameters"]["policy"])
    save_file({name: tensor.contiguous() for name, tensor in state.items() if name != _DEVIATION}, out)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m jurybox.studies.photo.start", description=__doc__)
    parser.add_argument("run", type=Path, help="folder of a photo training")
    parser.add_argument("out", type=Path, help="file to write")
    arguments = parser.parse_args()
    take(arguments.run, arguments.out)


if __name__ == "__main__":
    main()
