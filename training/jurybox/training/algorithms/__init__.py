"""Algorithms: what turns transitions into better weights. Import the module you need."""
