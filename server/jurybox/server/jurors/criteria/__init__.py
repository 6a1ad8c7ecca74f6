"""What can be marked in a picture, one module a criterion."""

from jurybox.server.jurors.criteria.colour import Colour
from jurybox.server.jurors.criteria.criterion import Criterion
from jurybox.server.jurors.criteria.exposure import Exposure
from jurybox.server.jurors.criteria.naturalness import Naturalness
from jurybox.server.jurors.criteria.sharpness import Sharpness

# In the order of the panel's outputs.
CRITERIA: tuple[type[Criterion], ...] = (Naturalness, Exposure, Colour, Sharpness)

__all__ = ["CRITERIA", "Colour", "Criterion", "Exposure", "Naturalness", "Sharpness"]
