"""Measurements: what the kernels compile to, how fast they, the training step and the input path are, and of what."""
