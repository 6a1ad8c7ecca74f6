"""Environments of the trainings: each stands alone, and knows neither the runtime nor a learner."""
