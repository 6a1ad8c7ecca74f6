"""Published weights in a torch module: for actors that run a small policy themselves."""

from __future__ import annotations

from typing import Any

import torch

from jurybox.client.weights_reader import WeightsReader
from jurybox.protocol.errors import SpecMismatch
from jurybox.protocol.weights import WeightsLayout


class TorchWeights:
    """Keeps a module at the newest published version.

    Args:
        reader: of the channel that the module's weights are published on.
        module: with the channel's names, shapes and dtypes in its ``state_dict()``, on any device.

    Attributes:
        version: of the weights in the module; 0 before the first.
        extra: what was published with them.

    Raises:
        SpecMismatch: the module's tensors differ from the channel's; the message names how.
    """

    def __init__(self, reader: WeightsReader, module: torch.nn.Module) -> None:
        self.version = 0
        self.extra: dict[str, Any] = {}
        self._reader = reader
        # state_dict() gives the module's own tensors, so that copying into them is loading.
        self._tensors = module.state_dict()
        if difference := reader.layout.difference(WeightsLayout.of(self._tensors)):
            raise SpecMismatch(f"the module doesn't fit weights channel {reader.channel.name}: {difference}")
        self._flat = torch.empty(reader.layout.nbytes, dtype=torch.uint8)
        self._sources = [
            self._flat[place.offset : place.offset + place.nbytes].view(getattr(torch, place.dtype)).view(place.shape)
            for place in reader.layout.places.values()
        ]

    def refresh(self, timeout: float = 1.0) -> bool:
        """Load the newest version into the module if it has an older one; whether it did.

        Raises:
            Timeout: there is a newer version, and it could not be read whole in time.
        """
        if not self._reader.newer_than(self.version):
            return False
        version, extra = self._reader.read_flat(self._flat.numpy(), timeout=timeout)
        with torch.no_grad():
            for name, source in zip(self._reader.layout.places, self._sources, strict=True):
                self._tensors[name].copy_(source)
        self.version, self.extra = version, extra
        return True
