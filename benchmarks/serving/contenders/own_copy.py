"""No server: every client has the model and torch in its own process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from benchmarks.serving.cases import Case
from benchmarks.serving.contender import Ask, Contender, batch_of


class OwnAsk(Ask):
    """Forward in the client."""

    def __init__(self, case: Case) -> None:
        import torch

        from benchmarks.serving.models import build, forward

        self._case = case
        self._module = self._prepared(build(case.model))
        self._tensor = torch.from_numpy
        self._forward = forward

    def _prepared(self, module: Any) -> Any:
        return module

    def __call__(self, inputs: NDArray[Any]) -> Sequence[NDArray[Any]]:
        return [output.numpy() for output in self._forward(self._module, self._tensor(batch_of(self._case, inputs)))]


class ExportedAsk(OwnAsk):
    """Forward without the module's Python code, as the server calls it with `export = true`."""

    def _prepared(self, module: Any) -> Any:
        import torch

        from jurybox.protocol import TensorSpec
        from jurybox.server.engine.exported import export

        inputs = {"observation": TensorSpec(self._case.dtype, self._case.shape)}
        return export(module, inputs, 256, torch.device("cpu"))


class OwnCopy(Contender):
    title = "own copy in every client"
    packages = ("torch",)
    most_clients = 64
    why_most = "not run: every client is a torch process, 256 of which take more memory than such a machine has"

    @classmethod
    def client(cls, case: Case, index: int, endpoint: Any) -> OwnAsk:
        return OwnAsk(case)


class OwnCopyExported(OwnCopy):
    title = "own copy in every client, exported"
    cases = ("vector", "vector64")

    @classmethod
    def client(cls, case: Case, index: int, endpoint: Any) -> OwnAsk:
        return ExportedAsk(case)
