"""Environments of the trainings, independent of the runtime and of learners."""
