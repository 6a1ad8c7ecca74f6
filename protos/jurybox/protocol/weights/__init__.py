"""The weights channel: two copies of a model's weights in shared memory, read and written without a lock."""

from jurybox.protocol.weights.channel import Mode, WeightsChannel, WeightsClaim
from jurybox.protocol.weights.layout import TensorPlace, WeightsLayout, widen

__all__ = ["Mode", "TensorPlace", "WeightsChannel", "WeightsClaim", "WeightsLayout", "widen"]
