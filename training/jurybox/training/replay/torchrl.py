"""TorchRL's storage and sampler over a shared replay.

``ReplayBuffer(storage=SharedStorage(replay), sampler=SharedSampler(), collate_fn=as_drawn, batch_size=256)``: `extend`
and `add` write into the replay, `sample` draws from it what any process wrote, `update_priority` sets priorities. Rows
are drawn and copied in one step, since another process may overwrite a row between the two; so the two come as a pair.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.data.replay_buffers.storages import Storage

from jurybox.protocol.errors import Refused, SpecMismatch
from jurybox.training.replay.options import Windows
from jurybox.training.replay.replay import Replay

__all__ = ["SharedSampler", "SharedStorage", "as_drawn"]


class SharedStorage(Storage):  # type: ignore[misc]
    """A `Replay` as a storage; the tensordict's keys are the replay's fields.

    Raises:
        Refused: a row is asked for by its index, which only `SharedSampler` may do.
    """

    def __init__(self, replay: Replay) -> None:
        super().__init__(replay.capacity)
        self.replay = replay
        self.drawn: tuple[torch.Tensor, TensorDict] | None = None

    def set(self, cursor: Any, data: TensorDictBase, *, set_cursor: bool = True) -> None:
        """Add rows; the replay chooses the slots, so `cursor` is ignored."""
        if not isinstance(data, TensorDictBase | Mapping):
            raise SpecMismatch(
                f"expected a tensordict with {', '.join(self.replay.layout.fields)}, came {type(data).__name__}"
            )
        rows = {name: data[name].detach().cpu() for name in self.replay.layout.fields}
        single = isinstance(data, TensorDictBase) and data.batch_dims == 0
        rows = {name: _shaped(rows[name], spec.shape, single) for name, spec in self.replay.layout.fields.items()}
        if single:
            self.replay.add(**rows)
        else:
            self.replay.extend(**rows)

    def get(self, index: Any) -> Any:
        """The rows that the sampler has drawn as `index`."""
        if self.drawn is not None and isinstance(index, torch.Tensor) and torch.equal(index, self.drawn[0]):
            return self.drawn[1]
        raise Refused(
            "rows of a shared replay are not read by index: another process may have overwritten them; use sample()"
        )

    def __len__(self) -> int:
        return len(self.replay)

    def contains(self, item: Any) -> bool:
        """Whether the replay holds more rows than `item`."""
        return bool(0 <= int(item) < len(self))

    def _empty(self) -> None:
        self.replay.discard(self.replay.capacity)

    def dumps(self, path: Any) -> None:
        """Save the replay as ``replay.jbr`` in the folder `path`."""
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        self.replay.save(folder / "replay.jbr")

    def loads(self, path: Any) -> None:
        """Replace the replay's rows by those of `dumps`."""
        self.replay.restore(Path(path) / "replay.jbr")

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the rows are shared, and saved by `dumps`."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to load; see `state_dict`."""


class SharedSampler(Sampler):  # type: ignore[misc]
    """Draws from a `SharedStorage`: uniformly, or by priority where the replay is prioritized (adds "priority_weight").

    Args:
        windows: n-step returns, stacks or sequences; their masks come as "valid_<name>".
        beta: strength of the importance weights; may be changed as training goes on.
        replace: False: no row twice in a batch.
    """

    def __init__(self, windows: Windows | None = None, *, beta: float = 0.4, replace: bool = True) -> None:
        super().__init__()
        self.windows = windows or Windows()
        self.beta = beta
        self.replace = replace

    def sample(self, storage: Storage, batch_size: int) -> tuple[torch.Tensor, dict[str, Any]]:
        if not isinstance(storage, SharedStorage):
            raise SpecMismatch(f"SharedSampler draws from a SharedStorage, came {type(storage).__name__}")
        batch = storage.replay.sample(batch_size, windows=self.windows, beta=self.beta, replace=self.replace)
        columns = batch.torch() | {f"valid_{name}": torch.from_numpy(mask) for name, mask in batch.valid.items()}
        index = torch.from_numpy(batch.indices)
        storage.drawn = (index, TensorDict(columns, [batch_size]))
        weights = {} if batch.weights is None else {"priority_weight": torch.from_numpy(batch.weights)}
        return index, weights

    def update_priority(self, index: Any, priority: Any, *, storage: Storage | None = None, **_: Any) -> None:
        """Set priorities from TD errors; overwritten rows are ignored."""
        if isinstance(storage, SharedStorage):
            indices = torch.as_tensor(index, dtype=torch.int64).reshape(-1)
            errors = torch.as_tensor(priority, dtype=torch.float32).expand(indices.shape)
            storage.replay.update_priorities(indices.cpu().numpy(), errors.detach().cpu().numpy())

    def _empty(self) -> None:
        """Nothing is kept here."""

    def dumps(self, path: Any) -> None:
        """Nothing is kept here."""

    def loads(self, path: Any) -> None:
        """Nothing is kept here."""

    def state_dict(self) -> dict[str, Any]:
        return {"beta": self.beta}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.beta = state_dict["beta"]


def as_drawn(rows: TensorDict) -> TensorDict:
    """The `collate_fn` for a `SharedStorage`, which returns whole batches."""
    return rows


def _shaped(value: torch.Tensor, shape: tuple[int, ...], single: bool) -> torch.Tensor:
    """TorchRL gives numbers a last dimension of one; a field of shape () has none."""
    return value.reshape(shape if single else (-1, *shape))
