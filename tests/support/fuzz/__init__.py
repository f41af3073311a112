"""What is fed with hostile input, and what may come of it."""
