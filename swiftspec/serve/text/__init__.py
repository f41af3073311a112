"""Text to tokens and tokens to text: tokenizer, chat template, incremental detokenization."""
