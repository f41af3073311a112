"""GGUF files: header (file.py), configuration (config.py) and tensors (tensors.py)."""
