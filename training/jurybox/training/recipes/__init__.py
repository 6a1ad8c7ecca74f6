"""Trainings, ready to run: settings, the loop, and what a run leaves behind. Import the module you need."""
