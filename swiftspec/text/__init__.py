"""Tokenizer, chat templates and incremental detokenization."""
