"""Does a server that runs and runs grow? Mixed load for any length of time, and what the processes hold meanwhile."""
