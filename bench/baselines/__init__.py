"""Baselines: other engines that run the same weights, and kernels of other projects that take the same inputs."""
