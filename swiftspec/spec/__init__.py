"""Trees, masks, cache, sampling and verification: arithmetic on tensors, no model and no ranks."""
