"""Roles of trainings, of any algorithm: learners from a replay and from rollouts."""
