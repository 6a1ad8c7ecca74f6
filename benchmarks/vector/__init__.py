"""Environments in worker processes, beside those of Gymnasium, Stable-Baselines3, PufferLib and EnvPool."""
