"""From settings to a loaded model pair with its tokenizer."""
