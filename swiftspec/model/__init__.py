"""The transformer, its weights and tensor parallelism; without sampling and trees."""
