"""The engine: inbox, batcher, models, and the loop that joins them. No socket is opened in the core."""
