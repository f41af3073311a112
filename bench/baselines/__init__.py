"""What other people have for the same work: engines that run the same weights, kernels that take the same inputs."""
