"""The transformer, its weights and its tensor parallelism; no sampling, no trees."""
