"""Photo editing with a juror's score as reward: a Gymnasium environment without torch."""

from jurybox.training.environments.photo.edits import TOOLS, Edits, apply
from jurybox.training.environments.photo.environment import PhotoConfig, PhotoEdit, build, make_environment
from jurybox.training.environments.photo.evaluate import Evaluation, Outcome, RandomEdits, evaluate, no_edits
from jurybox.training.environments.photo.photos import Photo, PhotoError, PhotoLibrary
from jurybox.training.environments.photo.scorer import LocalScorer, Scorer, ScorerError, ServerScorer

__all__ = [
    "TOOLS",
    "Edits",
    "Evaluation",
    "LocalScorer",
    "Outcome",
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
