"""Environments in worker processes over shared memory, behind Gymnasium's VectorEnv."""

from jurybox.training.vector.process_env import ProcessVectorEnv

__all__ = ["ProcessVectorEnv"]
