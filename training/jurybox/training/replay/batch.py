"""Where a sample goes: named arrays, made fresh or once and filled again and again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from jurybox import native
from jurybox.protocol.errors import SpecMismatch
from jurybox.training.replay.layout import Layout
from jurybox.training.replay.options import Windows

if TYPE_CHECKING:
    import torch


class Batch(Mapping[str, npt.NDArray[Any]]):
    """Columns of `n` sampled rows: ``batch["observation"]`` has shape (n, ...).

    Attributes:
        n: rows.
        indices: (n,) int64; which rows these are, for `update_priorities`.
        weights: (n,) float32 importance weights, the largest is 1; None from a replay without priorities.
        valid: masks, uint8, by field (stacks: (n, stack)) or "sequence" ((n, length)).
        windows: what surrounds each row.
    """

    def __init__(
        self, layout: Layout, rings: list[native.ReplayRing], n: int, windows: Windows, *, pinned: bool = False
    ) -> None:
        self.n = n
        self.windows = windows
        self.valid: dict[str, npt.NDArray[np.uint8]] = {}
        self._arrays: dict[str, npt.NDArray[Any]] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self._pinned = pinned
        self.indices = np.empty(n, np.int64)
        self.weights = np.empty(n, np.float32) if layout.prioritized else None
        self.columns = [native.ReplayColumns() for _ in rings]
        self._place(layout, rings)
        for columns in self.columns:
            columns.indices(self.indices, self.weights)

    def _array(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        if self._pinned:
            import torch

            tensor = torch.from_numpy(np.empty(0, dtype)).new_empty(shape, pin_memory=True)
            self._tensors[name] = tensor
            array: npt.NDArray[Any] = tensor.numpy()
        else:
            array = np.empty(shape, dtype)
        self._arrays[name] = array
        return array

    def _mask(self, name: str, count: int) -> npt.NDArray[np.uint8]:
        return self.valid.setdefault(name, np.empty((self.n, count), np.uint8))

    def _place(self, layout: Layout, rings: list[native.ReplayRing]) -> None:
        w, n, names = self.windows, self.n, list(layout.fields)
        if not w.any:
            for number, (name, spec) in enumerate(layout.fields.items()):
                out = self._array(name, (n, *spec.shape), spec.dtype)
                for columns, ring in zip(self.columns, rings, strict=True):
                    columns.add(ring, number, out)
            return
        episodes = layout.episodes
        if episodes is None:
            raise SpecMismatch("this replay does not know its episodes: make it with episodes=Episodes(...)")
        for name in (*w.next, *w.stacked):
            if name not in layout.fields:
                raise SpecMismatch(f"there is no field {name!r}; expected some of {', '.join(names)}")
        if w.n_step and episodes.reward is None:
            raise SpecMismatch(
                "n-step returns need to know the reward: make the replay with episodes=Episodes(reward=...)"
            )
        for columns, ring in zip(self.columns, rings, strict=True):
            columns.window(ring, max(w.stack - 1, 0), w.steps, w.length, w.full_length, bool(w.next))
        for number, (name, spec) in enumerate(layout.fields.items()):
            if w.n_step and name == episodes.reward:
                returns = self._array(name, (n,), np.float32)
                discount = self._array("discount", (n,), np.float32)
                for columns, ring in zip(self.columns, rings, strict=True):
                    columns.returns(ring, number, w.gamma, returns, discount)
                continue
            # (name handed out, first row, rows, counted from the next row)
            count = w.stack if name in w.stacked else w.length or 1
            first = 1 - count if name in w.stacked else 0
            kinds = [(name, first, count, False)]
            if name in w.next:
                kinds.append((f"next_{name}", first, count, True))
            for key, start, rows, ahead in kinds:
                multiple = name in w.stacked or w.length > 0
                out = self._array(key, (n, rows, *spec.shape) if multiple else (n, *spec.shape), spec.dtype)
                mask = None
                if name in w.stacked:
                    mask = self._mask(key, rows)
                elif w.length and "sequence" not in self.valid:
                    mask = self._mask("sequence", rows)
                for columns, ring in zip(self.columns, rings, strict=True):
                    columns.add(ring, number, out, start, rows, ahead, mask)

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        try:
            return self._arrays[name]
        except KeyError:
            raise KeyError(f"{name!r}: this batch has {', '.join(self._arrays)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def torch(self) -> dict[str, torch.Tensor]:
        """The columns as tensors over the same memory (page-locked where the batch was made so)."""
        import torch

        return self._tensors or {name: torch.from_numpy(array) for name, array in self._arrays.items()}
