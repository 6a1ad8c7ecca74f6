"""Photo editing with the reward of a juror: environment, training on Stable-Baselines3, evaluation and report."""
