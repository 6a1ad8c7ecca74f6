"""Trainings on many machines, with Ray (the extra ``ray``): `launcher` carries out any plan of `runtime` there,
`env_workers` hold the environments of trainings that are none."""
