"""Sampling masks: the ids that each token was drawn from, on request (`return_sampling_mask`)."""
