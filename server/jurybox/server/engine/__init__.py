"""The engine: batches, models, and the loop that connects them. The core opens no socket."""
