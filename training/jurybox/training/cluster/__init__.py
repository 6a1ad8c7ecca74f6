"""Trainings on many machines, with Ray (the extra ``ray``): `launcher` carries out any plan of `runtime` there."""
