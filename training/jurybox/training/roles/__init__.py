"""Roles of trainings, of any algorithm: policies that act, learners from a replay and from rollouts."""
