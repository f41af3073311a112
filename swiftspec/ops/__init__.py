"""The fused functions of one forward: a reference and the native backends, chosen once."""
