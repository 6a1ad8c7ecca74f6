"""Ways to an engine, seen from the client."""
