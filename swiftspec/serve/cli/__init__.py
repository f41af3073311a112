"""The commands `chat`, `generate`, `race` and `worker`, and their arguments."""
