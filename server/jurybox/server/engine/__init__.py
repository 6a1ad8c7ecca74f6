"""The engine: batches, models, and the loop that joins them. No socket is opened in the core."""
