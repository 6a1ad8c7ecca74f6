"""Policies of one shape computed as one, by `torch.func.vmap` over stacked weights."""
