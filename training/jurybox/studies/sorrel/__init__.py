"""Sorrel's environments (https://github.com/social-ai-uoft/sorrel) under the actor-learner runtime.

This package does not import sorrel: an environment contains its agents and models, and their methods are called as
sorrel's own `Environment.run_experiment` calls them.
"""

from jurybox.studies.sorrel.experiment import Experiment, Multiprocessing, run_experiment

__all__ = ["Experiment", "Multiprocessing", "run_experiment"]
