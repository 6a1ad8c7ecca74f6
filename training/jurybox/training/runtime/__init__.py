"""The actor-learner runtime: roles that run serially or as processes."""
