"""Trainings: clients of the server, on one replay and one actor-learner runtime."""
