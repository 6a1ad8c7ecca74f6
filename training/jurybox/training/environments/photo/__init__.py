"""Photo editing against a juror: a Gymnasium environment whose workers need neither torch nor a copy of the picture."""

from .edits import TOOLS, Edits, apply
from .environment import PhotoEdit
from .evaluate import Evaluation, Outcome, RandomEdits, evaluate, no_edits
from .factory import PhotoConfig, build, make_environment
from .photos import Photo, PhotoError, PhotoLibrary
from .scorer import LocalScorer, Scorer, ScorerError, ServerScorer

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
