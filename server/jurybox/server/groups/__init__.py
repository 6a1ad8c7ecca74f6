"""Policies of one shape computed as one, by `torch.func.vmap` over stacked weights; the core knows nothing of it."""
