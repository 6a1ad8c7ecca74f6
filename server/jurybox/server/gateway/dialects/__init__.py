"""Reward protocols of other projects, each bound to a model."""
