"""Ways into an engine."""
