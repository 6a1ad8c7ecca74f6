"""Models for the tests, as a user would write them: factories that a server's config can name."""

from __future__ import annotations

import atexit
import os
import signal
import time
from pathlib import Path

import torch

from jurybox.protocol import TensorSpec
from jurybox.server.models import ServedModel

VECTOR = {"observation": TensorSpec("float32", (4,))}


class Affine(torch.nn.Module):
    """y = scale * x + offset, so that every answer can be checked against its own question."""

    def __init__(self, scale: float, offset: float) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(scale))
        self.offset = torch.nn.Parameter(torch.tensor(offset))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.scale * observation + self.offset


def affine(scale: float = 2.0, offset: float = 1.0) -> ServedModel:
    return ServedModel(Affine(scale, offset), VECTOR, {"action": TensorSpec("float32", (4,))})


class Two(torch.nn.Module):
    def forward(self, image: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean = image.float().mean(dim=(1, 2, 3))
        return mean * scale, image[:, 0, 0, 0]


def two() -> ServedModel:
    """Two inputs, two outputs, large rows."""
    return ServedModel(
        Two(),
        {"image": TensorSpec("uint8", (64, 64, 3)), "scale": TensorSpec("float32")},
        {"brightness": TensorSpec("float32"), "corner": TensorSpec("uint8")},
    )


class Moody(torch.nn.Module):
    """A model whose behaviour is selected by the first value of a row."""

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        mood = observation[:, 0].max().item()
        if mood == 666.0:
            raise RuntimeError("this row breaks the model")
        if mood == 667.0:
            return observation[:-1] if len(observation) > 1 else observation.repeat(2, 1)
        if mood == 668.0:
            os.kill(os.getpid(), signal.SIGKILL)
        if 700.0 <= mood < 704.0:
            raise RuntimeError("x" * int(mood - 700.0) + "\u20ac" * 200)  # of three bytes each: cut anywhere
        if mood > 1000.0:
            time.sleep(mood / 1e6)  # 1_000_000 is a second
        return observation + 1


def moody() -> ServedModel:
    return ServedModel(Moody(), VECTOR, {"action": TensorSpec("float32", (4,))})


def broken() -> ServedModel:
    raise RuntimeError("this factory never works")


def liar() -> ServedModel:
    """Promises another shape than it gives; warm-up must find out."""
    return ServedModel(Affine(1.0, 0.0), VECTOR, {"action": TensorSpec("float32", (5,))})


def from_file(path: str) -> ServedModel:
    """A model whose offset is read from a file, for reloads."""
    return affine(1.0, float(Path(path).read_text()))


class Paced(torch.nn.Module):
    """Takes `seconds` per batch; in the engine with number `slow`, ten times as long."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return observation + 1


def paced(seconds: float, slow: str) -> ServedModel:
    """The first engine that creates the file `slow` becomes ten times slower than the others."""
    try:
        Path(slow).touch(exist_ok=False)
        seconds *= 10
    except FileExistsError:
        pass  # another engine is the slow one
    return ServedModel(Paced(seconds), VECTOR, {"action": TensorSpec("float32", (4,))})


class Rowwise(torch.nn.Module):
    """Takes `seconds` per row, and writes when it began and ended to a file of its process in the folder `times`."""

    def __init__(self, seconds: float, times: str) -> None:
        super().__init__()
        self.seconds, self.times = seconds, Path(times) / f"{os.getpid()}"

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        began = time.monotonic()
        time.sleep(self.seconds * len(observation))
        with self.times.open("a") as file:
            file.write(f"{began} {time.monotonic()}\n")
        return observation.sum(1)


def rowwise(seconds: float, times: str) -> ServedModel:
    return ServedModel(Rowwise(seconds, times), VECTOR, {"score": TensorSpec("float32", ())})


def loads_once(taken: str) -> ServedModel:
    """Only the first engine that creates the file `taken` can load it."""
    Path(taken).touch(exist_ok=False)
    return affine()


def patients() -> ServedModel:
    """A policy of `train gym`, of nested observations."""
    from jurybox.training.algorithms.served_networks import gym_policy
    from jurybox.training.spaces import ActionSpec, AgentSpec, Leaf

    numbers = Leaf("numbers.age", (1,), "float32"), Leaf("numbers.pulse", (2,), "float32")
    ward = Leaf("ward", (), "int64", "categories", counts=(3,), start=(0,))
    return gym_policy("dqn", {}, AgentSpec((*numbers, ward), ActionSpec(True, 4)).as_dict())


def big() -> ServedModel:
    """Some megabytes of weights."""
    module = torch.nn.Linear(4, 600_000)
    outputs = {"action": TensorSpec("float32", (600_000,))}
    return ServedModel(_Named(module), VECTOR, outputs)


class _Named(torch.nn.Module):
    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(observation, self.weight, self.bias)


def slow_to_load(seconds: float = 2.0) -> ServedModel:
    time.sleep(seconds)
    return affine()


def loads_while(file: str) -> ServedModel:
    """Is loaded once the file exists."""
    until = time.monotonic() + 100
    while not Path(file).exists() and time.monotonic() < until:
        time.sleep(0.01)
    return affine()


def says(text: str) -> ServedModel:
    """Fails to load, in these words; they come as JSON, so that they may be what no codec takes."""
    raise RuntimeError(text)


def last_words() -> ServedModel:
    """Has something to do when its engine ends."""
    atexit.register(print, "these are the last words of a model")
    return affine()


def exits() -> ServedModel:
    raise SystemExit(7)


def dies() -> ServedModel:
    """Its load ends the engine."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


class Tiring(Affine):
    """Ends its engine once it has answered so many batches there, warm-up included."""

    def __init__(self, batches: int) -> None:
        super().__init__(2.0, 1.0)
        self.left = batches

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(observation)


def tiring(batches: int = 60) -> ServedModel:
    return ServedModel(Tiring(batches), VECTOR, {"action": TensorSpec("float32", (4,))})


def named(name: str) -> ServedModel:
    """A model whose input has that name."""
    return ServedModel(Affine(1.0, 0.0), {name: TensorSpec("float32", (4,))}, {"action": TensorSpec("float32", (4,))})


class Leaver(torch.nn.Module):
    """Raises exceptions that end processes if the first value of a row selects one."""

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        match observation[:, 0].max().item():
            case 671.0:
                raise SystemExit(9)
            case 672.0:
                raise KeyboardInterrupt
            case 673.0:
                raise ValueError("half \ud800 a pair, \N{GRINNING FACE} " * 30)
        return observation + 1


def leaver() -> ServedModel:
    return ServedModel(Leaver(), VECTOR, {"action": TensorSpec("float32", (4,))})


class Reluctant(Affine):
    """Cannot leave the device, or return to it, while a file says so."""

    def __init__(self, folder: str) -> None:
        super().__init__(2.0, 1.0)
        self.folder = Path(folder)

    def sleep(self) -> None:
        if (self.folder / "no sleep").exists():
            raise RuntimeError("no room on the host")

    def wake(self) -> None:
        if (self.folder / "no wake").exists():
            raise RuntimeError("no room on the device")


def reluctant(folder: str) -> ServedModel:
    return ServedModel(Reluctant(folder), VECTOR, {"action": TensorSpec("float32", (4,))})


class Counting(torch.nn.Module):
    """Answers with the number of the batch, so that the order of batches can be seen."""

    def __init__(self) -> None:
        super().__init__()
        self.batches = 0

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        self.batches += 1
        return torch.full((len(observation),), float(self.batches))


def counting() -> ServedModel:
    return ServedModel(Counting(), VECTOR, {"batch": TensorSpec("float32")})
