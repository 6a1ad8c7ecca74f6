"""Trainings on many machines, with Ray (the extra ``ray``): `launcher` runs the plans of `runtime`, `env_workers`
hold the environments of other trainings."""
