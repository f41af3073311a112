"""Makes the draft model that ships for SmolLM2-135M-Instruct: conversations of the target, distillation, GGUF file."""
