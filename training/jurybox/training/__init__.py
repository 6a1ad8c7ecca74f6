"""Trainings: clients of the server, with a shared replay and an actor-learner runtime."""
