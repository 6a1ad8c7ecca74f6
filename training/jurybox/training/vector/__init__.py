"""Environments in worker processes over shared memory, behind Gymnasium's VectorEnv."""

from .process_env import ProcessVectorEnv

__all__ = ["ProcessVectorEnv"]
