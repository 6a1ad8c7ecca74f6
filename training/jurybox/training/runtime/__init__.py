"""The actor-learner runtime: roles written once, driven serially or as processes that watch over each other."""
