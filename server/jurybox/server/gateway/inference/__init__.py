"""The Open Inference Protocol, whatever it travels by: requests, parameters, models, shared memory, the repository."""
