"""The relay: serves clients on other hosts over ZeroMQ. To the server it is an ordinary client.

Control messages are forwarded to the supervisor. The relay leases a lane for each client. Tickets arrive with their
rows, which the relay copies to the lane before it sends the tickets like those of a local client.
"""
