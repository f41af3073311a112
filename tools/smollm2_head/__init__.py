"""Trains an EAGLE-3 draft head for SmolLM2-135M-Instruct on the CPU, and writes it as a checkpoint.

    python -m tools.smollm2_draft.conversations TARGET.gguf --hidden-layers 1 14 26 \\
        --out build/smollm2_head/conversations
    python -m tools.smollm2_head.train TARGET.gguf --minutes 40
    python -m tools.smollm2_head.export
    python -m bench.drafters --model TARGET.gguf --draft-model DRAFT.gguf --head build/smollm2_head/checkpoint

Conversations with hidden states take 3.5 kB per token on disk.
"""
