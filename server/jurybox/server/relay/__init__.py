"""The relay: serves clients of other hosts over ZeroMQ. To the server it is one more client.

Control messages are forwarded to the supervisor. The relay leases a lane for each client; tickets arrive with their
rows, which are copied to the lane, and are then sent as those of a local client.
"""
