"""The relay: lets clients of other hosts in through ZeroMQ. To the server it is one more client.

Control messages are passed on to the supervisor. A lane is leased in the client's stead; tickets come with their rows
behind them, which are copied to the lane's, and go on as any local client's do.
"""
