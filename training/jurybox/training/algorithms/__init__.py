"""Learning algorithms as plain objects: no processes, no environments, no files."""
