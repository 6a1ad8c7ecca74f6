"""Trainings of their own worlds, made of what every user of `jurybox.training` has."""
