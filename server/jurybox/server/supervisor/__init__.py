"""The supervisor: starts, watches, restarts and drains engines and gateway; owns all shared memory."""
