"""The jurors that ship with Jurybox: factories for ``[models.NAME] factory = "jurybox.server.jurors:panel"``.

What each criterion measures, and how well, is in ``docs/jurors.md``.
"""

from jurybox.server.jurors.aesthetic import siglip
from jurybox.server.jurors.panels import colour, exposure, naturalness, panel, sharpness

__all__ = ["colour", "exposure", "naturalness", "panel", "sharpness", "siglip"]
