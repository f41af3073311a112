"""GGUF files: header (file.py), families (families.py), configuration (config.py), tensors (tensors.py) and
tokenizer (tokenizer.py)."""
