"""TorchRL's InferenceServer with the process slot transport: fixed shared-memory slots, the nearest to our design.

Since 0.14 it gathers the slots of a batch directly into a persistent batch and scatters the answers with one copy per
output, as here. Its pinned batches and its batches of a static size in CUDA graphs (`static_batch_size`)
want a CUDA policy device, and are refused on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from benchmarks.serving.cases import CASES, Case
from benchmarks.serving.contender import REQUEST_TIMEOUT, Ask, Contender


class Policy:
    """Makes the policy in the server's process: a TensorDict module over requests of `rows` rows each."""

    def __init__(self, case: str) -> None:
        self._case = case

    def __call__(self) -> Any:
        from tensordict.nn import TensorDictModule
        from torch import nn

        from benchmarks.serving.models import build

        case = CASES[self._case]
        module = build(case.model)

        class Rows(nn.Module):
            """Requests of several rows as one batch of rows."""

            def __init__(self) -> None:
                super().__init__()
                self.module = module

            def forward(self, inputs: Any) -> Any:
                if case.single:
                    return self.module(inputs)
                outputs = self.module(inputs.flatten(0, 1))
                outputs = outputs if isinstance(outputs, tuple) else (outputs,)
                return tuple(output.unflatten(0, (-1, case.rows)) for output in outputs)

        return TensorDictModule(Rows(), in_keys=["input"], out_keys=[name for name, _ in case.outputs])


class SlotAsk(Ask):
    """A TensorDict there, a TensorDict back."""

    def __init__(self, case: Case, client: Any) -> None:
        import torch
        from tensordict import TensorDict

        torch.set_num_threads(1)
        self._client = client
        self._tensor, self._dict = torch.from_numpy, TensorDict
        self._names = [name for name, _ in case.outputs]

    def __call__(self, inputs: NDArray[Any]) -> Sequence[NDArray[Any]]:
        answer = self._client(self._dict({"input": self._tensor(inputs)}), timeout=REQUEST_TIMEOUT)
        return [answer[name].numpy() for name in self._names]


class TorchRl(Contender):
    title = "TorchRL InferenceServer, process slots"
    peer = "torchrl"
    packages = ("torchrl", "tensordict")
    most_clients = 64
    why_most = "not run: its clients are torch processes, 256 of which take more memory than such a machine has"

    def start(self) -> None:
        import multiprocessing

        import torch
        from tensordict import TensorDict
        from torchrl.modules.inference_server import ProcessInferenceServer, ProcessSlotTransport

        case = self.case
        rows = () if case.single else (case.rows,)
        context = multiprocessing.get_context("spawn")
        transport = ProcessSlotTransport(
            TensorDict({"input": torch.zeros((*rows, *case.shape), dtype=getattr(torch, case.dtype))}),
            TensorDict({name: torch.zeros((*rows, *shape)) for name, shape in case.outputs}),
            num_slots=self.clients,
            ctx=context,
            copy_result=False,  # the answer is a view of the slot: checked before the next request
        )
        self._server = ProcessInferenceServer(
            policy_factory=Policy(case.name),
            transport=transport,
            max_batch_size=max(1, case.max_batch // case.rows),
            min_batch_size=1,
            collect_stats=False,
            policy_version_key=None,
            mp_context=context,
        )
        # One call for all: several calls of client() would share one endpoint and mix up the replies.
        self._endpoints = self._server.clients(self.clients)
        self._server.start()

    def endpoint(self, index: int) -> Any:
        return self._endpoints[index]

    @classmethod
    def client(cls, case: Case, index: int, endpoint: Any) -> SlotAsk:
        return SlotAsk(case, endpoint)

    def stop(self) -> None:
        self._server.shutdown()
