"""EAGLE-3 draft head (arXiv 2503.01840) as a torch module whose state dict has the names of published checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

KeysValues = tuple[Tensor, Tensor]  # [sequences, key-value heads, rows, head_dim] each


@dataclass(frozen=True)
class HeadShape:
    """Sizes of a head, with the names of config.json, and the number of the target's layers that it reads."""

    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    target_layers: int = 3


class Attention(nn.Module):
    """Attention of a head, whose inputs are embedding and hidden state of a row."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        queries, keys = (n * shape.head_dim for n in (shape.num_attention_heads, shape.num_key_value_heads))
        self.q_proj = nn.Linear(2 * shape.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(2 * shape.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(2 * shape.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden_size, bias=False)
        self.head_dim = shape.head_dim

    def forward(self, x: Tensor, angles: Tensor, earlier: list[KeysValues], mask: Tensor) -> tuple[Tensor, KeysValues]:
        """Returns the output for x [sequences, rows, inputs], and the keys and values of these rows.

        angles: of RoPE, [rows, head_dim / 2]. earlier: keys and values of earlier steps. mask [rows, all keys]: what a
        row attends to; its last columns are the rows themselves.
        """
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for project in projections)
        q, own = rotate(q, angles), (rotate(k, angles), v)
        keys, values = (torch.cat([pair[i] for pair in (*earlier, own)], 2) for i in range(2))
        shared = q.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(shared, 1), values.repeat_interleave(shared, 1)
        mixed = F.scaled_dot_product_attention(q, keys, values, mask)
        return self.o_proj(mixed.transpose(1, 2).flatten(2)), own


class Mlp(nn.Module):
    """SwiGLU MLP."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """The layer of a head."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(shape), Mlp(shape)
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps) for _ in range(3)
        )

    def forward(
        self, states: Tensor, embedded: Tensor, angles: Tensor, earlier: list[KeysValues], mask: Tensor
    ) -> tuple[Tensor, KeysValues]:
        x = torch.cat((self.input_layernorm(embedded), self.hidden_norm(states)), -1)
        mixed, own = self.self_attn(x, angles, earlier, mask)
        states = states + mixed
        return states + self.mlp(self.post_attention_layernorm(states)), own


class Eagle3Head(nn.Module):
    """EAGLE-3 head. A row has the target's hidden states at a position, or the output of the head in their stead, and
    the next token; its logits are those of the token after."""

    def __init__(self, shape: HeadShape, embedding: Tensor) -> None:
        """`embedding`: the target's, [vocabulary, hidden]. It is not part of the state dict."""
        super().__init__()
        self.shape = shape
        self.midlayer = DecoderLayer(shape)
        self.fc = nn.Linear(shape.target_layers * shape.hidden_size, shape.hidden_size, bias=False)
        self.norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.draft_vocab_size, bias=False)
        self.register_buffer("embedding", embedding, persistent=False)
        self.embedding: Tensor

    def forward(
        self, hidden: Tensor, tokens: Tensor, rows: list[Tensor], positions: Tensor | None = None
    ) -> list[Tensor]:
        """Returns the outputs of successive forwards (training-time test), [sequences, computed rows, hidden] each.

        hidden [sequences, rows, layers, hidden]: the target's hidden states. tokens [sequences, rows]: the token after
        each of them. rows: for each step after the first the computed rows, ascending, a part of those of the step
        before. positions [rows]: of the tokens; None: consecutive ones.

        In step s, counted from 0, the input of row i is the output for row i in step s - 1, and its token is s places
        further, as in decoding after s drafted tokens. It attends to the rows up to i of the first step, to row i of
        the other earlier steps, and to itself.
        """
        every = torch.arange(tokens.shape[1])
        positions, own_rows = every if positions is None else positions, every
        states, outputs = self.fc(hidden.flatten(2)).to(self.norm.weight.dtype), list[Tensor]()
        earlier, keys = list[KeysValues](), list[Tensor]()  # keys: rows of the keys of each step
        for step, chosen in enumerate([every, *rows]):
            states, own_rows = states[:, torch.searchsorted(own_rows, chosen)], chosen
            seen = [chosen[:, None] >= keys[0], *(chosen[:, None] == k for k in keys[1:])] if step else []
            own = torch.eye(len(chosen)).bool() if step else every[:, None] >= every
            embedded = self.embedding[tokens[:, chosen + step]]
            angles = rope_angles(positions[chosen] + step, self.shape)
            states, pair = self.midlayer(states, embedded, angles, earlier, torch.cat([*seen, own], 1))
            earlier.append(pair)
            keys.append(chosen)
            outputs.append(states)
        return outputs


def rope_angles(positions: Tensor, shape: HeadShape) -> Tensor:
    """Returns the angles [rows, head_dim / 2] of RoPE in float64."""
    half = shape.head_dim // 2
    return positions[:, None].double() * shape.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Applies RoPE to x [..., rows, head_dim], in the order of Hugging Face checkpoints."""
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
