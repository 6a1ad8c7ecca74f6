"""Photo editing with a juror's score as reward: a Gymnasium environment without torch."""

from jurybox.studies.photo.environment.edits import TOOLS, Edits, apply
from jurybox.studies.photo.environment.evaluate import EditedEpisode, Evaluation, RandomEdits, evaluate, no_edits
from jurybox.studies.photo.environment.photo_edit import PhotoConfig, PhotoEdit, build, make_environment
from jurybox.studies.photo.environment.photos import Photo, PhotoError, PhotoLibrary
from jurybox.studies.photo.environment.scorer import LocalScorer, Scorer, ScorerError, ServerScorer

__all__ = [
    "TOOLS",
    "EditedEpisode",
    "Edits",
    "Evaluation",
    "LocalScorer",
    "Photo",
    "PhotoConfig",
    "PhotoEdit",
    "PhotoError",
    "PhotoLibrary",
    "RandomEdits",
    "Scorer",
    "ScorerError",
    "ServerScorer",
    "apply",
    "build",
    "evaluate",
    "make_environment",
    "no_edits",
]
