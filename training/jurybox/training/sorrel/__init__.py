"""Sorrel's environments (https://github.com/social-ai-uoft/sorrel) under the actor-learner runtime.

Nothing here imports sorrel: an environment brings its agents and models, and what they do is called as sorrel's own
`Environment.run_experiment` calls it.
"""

from jurybox.training.sorrel.experiment import Experiment, Multiprocessing, run_experiment

__all__ = ["Experiment", "Multiprocessing", "run_experiment"]
