"""The jurors that ship with Jurybox: factories for ``[models.NAME] factory = "jurybox.server.jurors:panel"``.

``docs/jurors.md`` describes what each criterion measures, and how well.
"""

from jurybox.server.jurors.aesthetic import aesthetic_v2_5, siglip
from jurybox.server.jurors.image_reward import image_reward
from jurybox.server.jurors.measures import jpeg_size, ocr_match
from jurybox.server.jurors.panels import colour, exposure, naturalness, panel, sharpness
from jurybox.server.jurors.ranking import jury, ranked
from jurybox.server.jurors.ready import aesthetic_v1, clip_score, hpsv2, pick_score, text_reward

__all__ = [
    "aesthetic_v1",
    "aesthetic_v2_5",
    "clip_score",
    "colour",
    "exposure",
    "hpsv2",
    "image_reward",
    "jpeg_size",
    "jury",
    "naturalness",
    "ocr_match",
    "panel",
    "pick_score",
    "ranked",
    "sharpness",
    "siglip",
    "text_reward",
]
