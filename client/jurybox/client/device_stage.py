"""Weights on their way from a device: gathered there, then brought over in one transfer.

torch is never imported here: a caller that hands over a tensor on a device has it loaded already.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from jurybox.protocol.weights import WeightsChannel
from jurybox.protocol.weights.layout import DTYPES


class DeviceStage:
    """A flat buffer on a device in a channel's layout, and the channel's slots as targets of its transfers.

    One transfer of the whole instead of one per tensor: each small one costs a launch and a synchronisation. The slots
    are page-locked where CUDA lets us, so that the device writes into shared memory itself, with no bounce buffer.

    Args:
        channel: whose layout and slots.
        device: a ``torch.device``.
    """

    def __init__(self, channel: WeightsChannel, device: Any) -> None:
        self._torch = torch = sys.modules["torch"]
        self.device = device
        self._channel = channel
        places = channel.layout.places.values()
        self._flat = torch.empty(channel.layout.nbytes, dtype=torch.uint8, device=device)
        self._views = {
            place.name: self._flat[place.offset : place.offset + place.nbytes]
            .view(getattr(torch, place.dtype))
            .view(place.shape)
            for place in places
        }
        self._floating = [place.name for place in places if DTYPES[place.dtype].width]
        self._targets = [
            torch.from_numpy(channel.writable_slot(number)) for number in range(1 + (channel.mode == "double_buffer"))
        ]
        self._locked = [target for target in self._targets if self._page_lock(target)]

    @property
    def page_locked(self) -> bool:
        """Whether transfers go straight into the slots."""
        return len(self._locked) == len(self._targets)

    def gather(self, tensors: Mapping[str, Any]) -> None:
        """Copy the tensors into the flat buffer, in as few kernels as torch has for it."""
        with self._torch.no_grad():
            sources = [tensors[name].detach() for name in self._views]
            self._torch._foreach_copy_(list(self._views.values()), sources)

    def not_finite(self) -> str | None:
        """The first gathered tensor that holds NaN or infinity; one synchronisation for all of them."""
        if not self._floating:
            return None
        # float8 has no isfinite of its own; float32 holds each of its values exactly.
        finite = [
            self._torch.isfinite(view.float() if view.element_size() == 1 else view).all()
            for view in (self._views[name] for name in self._floating)
        ]
        verdicts = self._torch.stack(finite).tolist()
        return next((name for name, good in zip(self._floating, verdicts, strict=True) if not good), None)

    def transfer(self, slot: int) -> None:
        """Bring the flat buffer into slot `slot` and wait until it is there."""
        self._targets[slot].copy_(self._flat)

    def close(self) -> None:
        """Undo the page-locking; memory must not be unmapped before."""
        for target in self._locked:
            self._torch.cuda.cudart().cudaHostUnregister(target.data_ptr())
        self._locked.clear()

    def _page_lock(self, target: Any) -> bool:
        if self.device.type != "cuda" or target.numel() == 0:
            return False
        # A refusal (locked-memory limit, a driver without support) costs speed and nothing else: the copy then goes
        # through CUDA's own page-locked buffer.
        return int(self._torch.cuda.cudart().cudaHostRegister(target.data_ptr(), target.numel(), 0)) == 0
