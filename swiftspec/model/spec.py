"""Model spec: what a decoder is made of, as data. Each variation of a model family is a field, and no other code knows
families; architectures/ builds the spec of each family from its config.json.

A field with a default is optional. A code path refuses a model by the optional fields that it does not know
(`unknown_fields`), so that a new field is never ignored: `check_spec` of a backend, tools/width_expand.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, Literal

from swiftspec.capabilities import MODEL_FEATURES
from swiftspec.errors import UserError

RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope", "proportional", "none"]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding (RoPE): base `theta`, and the frequency scaling for contexts beyond the trained
    length.

    The checkpoint reader orders the rows of queries and keys so that the elements of a rotated pair are half a head
    apart, and the RoPE tables leave the other elements unchanged. Therefore operators read only the tables, and
    implement every field.
    """

    theta: float
    kind: RopeKind = "default"  # none: the layer has no position embedding (NoPE)
    factor: float = 1.0
    low_freq_factor: float = 1.0  # this field and the next one are for llama3 only
    high_freq_factor: float = 4.0
    original_max_position: int = 8192  # trained length, for llama3, yarn and longrope
    beta_fast: float = 32.0  # this field and the next two are for yarn only
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0  # factor of the rotated elements, for yarn and longrope
    short_factors: tuple[float, ...] = ()  # longrope: divisors of the frequencies within the trained length
    long_factors: tuple[float, ...] = ()  # longrope: divisors beyond it
    long_context: bool = False  # longrope: whether the divisors are `long_factors`; set by `ModelSpec.for_context`
    share: float = 1.0  # rotated share of a head's elements (partial RoPE)
    interleaved: bool = False  # the pairs are neighbours in the checkpoint: elements 2i and 2i + 1

    def rotated(self, head_dim: int) -> int:
        """Returns the number of a head's elements to which the pairs of the checkpoint belong. "proportional" has all
        of them, with frequency 0 for those that `share` excludes."""
        return head_dim if self.kind == "proportional" else int(head_dim * self.share)


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Causal attention with RoPE, as the token mixer of a layer. Query heads share key-value heads in equal groups
    (GQA).

    Each field is a trait that an architecture sets, and that a backend implements or not (`unknown_fields`).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec
    qkv_bias: bool = False
    o_bias: bool = False
    # RMSNorm of queries and keys, before RoPE unless `norm_after_rope`. head: of each head, with weights [head_dim]
    # that all heads share. projection: of all query heads together and of all key heads together, with a weight for
    # each element.
    qk_norm: Literal["none", "head", "projection"] = "none"
    norm_after_rope: bool = False  # qk_norm, which must be "head", comes after RoPE
    v_norm: bool = False  # RMSNorm of each value head, without weights; requires qk_norm "head"
    keys_as_values: bool = False  # the values are the keys before norm and RoPE (K = V)
    window: int | None = None  # sliding window: a position attends to this many positions, itself included
    scale: float | None = None  # of the attention scores; None: head_dim ** -0.5
    softcap: float | None = None  # c: a score s becomes c tanh(s / c)
    # b: a query at position p is multiplied by 1 + b log(1 + floor(p / rope.original_max_position)), as in Llama 4
    query_scale_beta: float = 0.0
    output_gate: bool = False  # the output is multiplied by sigmoid(gate); the gate has the size of the queries
    # attention sinks: a learned logit of each query head, one more term in the denominator of the softmax
    sinks: bool = False
    # a shared KV layer: it has queries only and attends to the keys and values of the last layer before it whose
    # attention is the same apart from this field
    shares_kv: bool = False

    @property
    def q_size(self) -> int:
        """Number of elements of a token's queries."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Number of elements of a token's keys, and of its values."""
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        """Number of elements of a token's queries, keys and values, of which a layer that shares keys and values has
        the queries only."""
        return self.q_size if self.shares_kv else self.q_size + 2 * self.kv_size

    @property
    def kind(self) -> AttentionSpec:
        """The attention of the layer that has the keys and values."""
        return replace(self, shares_kv=False) if self.shares_kv else self


@dataclass(frozen=True, slots=True)
class GatedDeltaSpec:
    """Gated delta rule (linear attention with a recurrent state), as the token mixer of a layer. Queries, keys and
    values pass a causal convolution of each channel with SiLU. There are as many query heads as key heads, and value
    heads share them in equal groups. The output passes an RMSNorm of each head and is multiplied by SiLU(gate)."""

    num_k_heads: int
    num_v_heads: int
    k_head_dim: int
    v_head_dim: int
    conv_width: int  # positions that the convolution reads, its own included

    @property
    def k_size(self) -> int:
        """Number of elements of a token's keys, and of its queries."""
        return self.num_k_heads * self.k_head_dim

    @property
    def v_size(self) -> int:
        """Number of elements of a token's values, and of its gate."""
        return self.num_v_heads * self.v_head_dim

    @property
    def conv_size(self) -> int:
        """Number of channels of the convolution: queries, keys and values."""
        return 2 * self.k_size + self.v_size


# clamped_swiglu, of gates g and ups u: with g at most SWIGLU_LIMIT and u between -SWIGLU_LIMIT and SWIGLU_LIMIT,
# g * sigmoid(SWIGLU_ALPHA * g) * (u + 1)
Activation = Literal["silu", "gelu_tanh", "clamped_swiglu", "relu"]
SWIGLU_LIMIT, SWIGLU_ALPHA = 7.0, 1.702


@dataclass(frozen=True, slots=True)
class SigmoidRouting:
    """Choice of experts by sigmoid scores, as in DeepSeek-V3: a token uses the experts with the largest sums of score,
    sigmoid(router(x)), and a learned correction bias. Their weights are the scores without the bias, times
    `multiplier`.

    With several groups, the experts of a token are in the `groups_per_token` groups with the largest scores; that of a
    group is the sum of its two largest sums. A group is an equal run of experts."""

    groups: int = 1
    groups_per_token: int = 1
    multiplier: float = 1.0


SMALLEST_SUM = 1e-20  # is added to the sum by which sigmoid scores are divided, as in transformers


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """Mixture of experts (MoE): for each token a router chooses the `experts_per_token` experts with the largest
    probabilities, softmax(router(x)), and the outputs of these MLPs are added, each times its probability. A shared
    expert is a further MLP, which all tokens use: its output is added, times sigmoid(gate(x)), one number for each
    token."""

    num_experts: int  # without the shared expert
    experts_per_token: int
    norm_topk_prob: bool  # the probabilities of a token's experts are divided by their sum
    shared_intermediate_size: int = 0  # of the shared expert; 0: there is none
    shared_gate: bool = True  # False: the checkpoint has no gate of the shared expert, and its factor is 1
    sigmoid: SigmoidRouting | None = None  # instead of softmax; None: softmax

    @property
    def router_rows(self) -> int:
        """Number of outputs of the router, the gate of the shared expert included."""
        return self.num_experts + (1 if self.shared_intermediate_size else 0)


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """Gated MLP: down(activation(gate(x)) * up(x)). SwiGLU with "silu", GeGLU with "gelu_tanh"; "clamped_swiglu" is
    defined above."""

    intermediate_size: int  # of each expert that a router chooses
    bias: bool = False  # of all three projections; in a mixture of experts also of the router
    activation: Activation = "silu"
    experts: ExpertsSpec | None = None  # None: a dense MLP

    @property
    def num_experts(self) -> int:
        """Number of MLPs with weights of their own: 1 for a dense MLP."""
        return 1 if self.experts is None else self.experts.num_experts


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer: a token mixer and an MLP, each with a residual connection."""

    mixer: AttentionSpec | GatedDeltaSpec
    mlp: MlpSpec
    # RMSNorm before mixer and MLP, after them (before the residual is added), or both
    norms: Literal["before", "after", "both"] = "before"
    residual_multiplier: float = 1.0  # of the outputs of mixer and MLP, before the residual is added
    output_scale: bool = False  # the checkpoint has a number with which the output of the layer is multiplied

    @property
    def writes_cache(self) -> bool:
        """Whether the layer has a state in a cache: all layers but shared KV layers."""
        return not isinstance(self.mixer, AttentionSpec) or not self.mixer.shares_kv

    @property
    def attention(self) -> AttentionSpec:
        """The mixer, which must be attention. Raises UserError if it is not."""
        if not isinstance(self.mixer, AttentionSpec):
            raise UserError("a model with gated delta layers is not supported here: only attention layers are")
        return self.mixer


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """The block of a block head: the positions that one forward drafts, the root's included, and their attention. All
    positions but the root's have the mask token."""

    size: int  # positions
    mask_token: int
    # a position of the block does not attend to later ones; False: in layers with a sliding window only
    causal: bool = False
    target_layers: int | None = None  # number of layers of the target; None: unknown


@dataclass(frozen=True, slots=True)
class DraftHeadSpec:
    """What makes a decoder a draft head: it reads hidden states of the target, and cannot run alone.

    A row of eagle3 and mtp, which have one layer, has a token and the hidden state of the position before it: the
    target's, or for a drafted token the output of the head for its parent.

    eagle3 (EAGLE-3, arXiv:2503.01840): a projection of the target's hidden states after three layers is the residual
    stream; queries, keys and values are projections of the normalised embedding and of the normalised hidden state. The
    LM head may have a part of the vocabulary.
    mtp (multi-token prediction, as in Qwen3-Next and Qwen3.5): a projection of the normalised embedding and of the
    normalised final hidden state is the residual stream. Embedding and LM head are the target's.
    dflash (DFlash, arXiv:2602.06036): a block head, which drafts all positions of a block in one forward. Keys and
    values of earlier positions are projections of one vector in every layer: the normalised projection of the target's
    hidden states there. Embedding and LM head are the target's.
    """

    kind: Literal["eagle3", "mtp", "dflash"]
    target_hidden_size: int
    draft_vocab_size: int  # rows of the LM head
    # layers of the target whose inputs are read, as checkpoints number them; empty: 2, half of the layers and the
    # last but two. Of mtp it is the output of the last layer, and of dflash the ids are those of layers whose outputs
    # are read.
    target_layer_ids: tuple[int, ...] = ()
    norm_before_residual: bool = False  # eagle3: the residual stream is the normalised hidden state
    block: BlockSpec | None = None  # dflash

    def hidden_layers(self, num_layers: int) -> tuple[int, ...]:
        """Returns the layers, counted from 0, of a target with `num_layers` layers after which its hidden states are
        read. Raises UserError if the target does not have them."""
        if self.kind == "mtp":
            return (num_layers - 1,)
        if self.block is not None:
            return self._block_layers(self.block, num_layers)
        ids = self.target_layer_ids or (2, num_layers // 2, num_layers - 3)
        if sorted({*ids} & {*range(1, num_layers + 1)}) != [*ids]:
            raise UserError(
                f"the draft head reads the inputs of layers {[*ids]}, but its target has {num_layers} layers"
            )
        return tuple(layer - 1 for layer in ids)

    def _block_layers(self, block: BlockSpec, num_layers: int) -> tuple[int, ...]:
        if block.target_layers not in (None, num_layers):
            raise UserError(
                f"the draft head is that of a target with {block.target_layers} layers, but its target has {num_layers}"
            )
        ids = self.target_layer_ids
        # transformers, on which DFlash heads are trained, has no output of the last layer without the final norm
        if sorted({*ids} & {*range(num_layers - 1)}) != [*ids]:
            raise UserError(
                f"the draft head reads the outputs of layers {[*ids]}, but those of 0..{num_layers - 2} of its target"
                " are supported, in ascending order"
            )
        return ids


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder: embedding, layers, final RMSNorm and LM head."""

    vocab_size: int  # rows of the embedding; may exceed the tokenizer's vocabulary
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float  # of every RMSNorm
    tie_word_embeddings: bool  # the embedding is also the LM head
    norm_unit_offset: bool = False  # an RMSNorm multiplies by 1 + weight
    embedding_multiplier: float = 1.0
    logit_multiplier: float = 1.0
    logit_softcap: float | None = None  # c: a logit s becomes c tanh(s / c)
    # Elements of the per-layer embeddings, 0: none. For each token and layer l a vector of this size is
    # e_l = (RMSNorm((P x)_l / sqrt(hidden_size)) + sqrt(size) T_l) / sqrt(2), where x is the token's embedding, P a
    # projection and T the token's row of a second table. After its MLP a layer adds RMSNorm(D(activation(G x) * e_l)).
    per_layer_size: int = 0
    draft_head: DraftHeadSpec | None = None  # None: a model that runs alone

    @property
    def layer(self) -> LayerSpec:
        """The spec of every layer. Raises UserError if the layers differ."""
        first = self.layers[0]
        if any(layer != first for layer in self.layers):
            raise UserError("models whose layers differ in shape are not supported")
        return first

    def for_context(self, tokens: int) -> ModelSpec:
        """Returns the spec of the same model with a context of `tokens` tokens, which decides the factors of
        longrope."""

        def resolved(mixer: AttentionSpec) -> AttentionSpec:
            is_long = mixer.rope.kind == "longrope" and tokens > mixer.rope.original_max_position
            return replace(mixer, rope=replace(mixer.rope, long_context=is_long))

        layers = (
            replace(layer, mixer=resolved(layer.mixer)) if isinstance(layer.mixer, AttentionSpec) else layer
            for layer in self.layers
        )
        return replace(self, layers=tuple(layers))

    @property
    def cache_shapes(self) -> tuple[tuple[int, int], ...]:
        """The distinct pairs of KV heads and head dimension of the attention layers, in the order of the layers. Each
        has a KV cache of its own."""
        return tuple(dict.fromkeys((mixer.num_kv_heads, mixer.head_dim) for mixer in self.attention_mixers))

    @property
    def attention_mixers(self) -> tuple[AttentionSpec, ...]:
        """The mixers of the attention layers, in the order of the layers."""
        return tuple(layer.mixer for layer in self.layers if isinstance(layer.mixer, AttentionSpec))

    @property
    def delta_mixers(self) -> tuple[GatedDeltaSpec, ...]:
        """The mixers of the delta layers, in the order of the layers."""
        return tuple(layer.mixer for layer in self.layers if isinstance(layer.mixer, GatedDeltaSpec))


# Optional fields that the checkpoint reader alone implements; RopeSpec: see there
READER_FIELDS = frozenset(("qkv_bias", "o_bias", "bias", "keys_as_values", "shared_gate"))


def traits(spec: ModelSpec) -> dict[str, None]:
    """Returns the optional fields of a model that are in use, without `READER_FIELDS`, as the keys of
    `capabilities.MODEL_FEATURES`."""
    used = {"gated_delta": None} if spec.delta_mixers else {}
    return used | dict.fromkeys(name for part in _parts(spec) for name in _used_fields(part))


def unknown_fields(spec: ModelSpec, known: Collection[str] = ()) -> str | None:
    """Returns a description of the traits of a model that are not in `known`, those that a code path implements, or
    None."""
    titles = {name: feature.title for name, feature in MODEL_FEATURES.items()}
    found = [f"{titles.get(name, 'support')} ({name})" for name in traits(spec) if name not in known]
    return ", no ".join(found) or None


def _parts(spec: ModelSpec) -> Iterator[Any]:
    yield spec
    for layer in dict.fromkeys(spec.layers):
        yield from (layer, layer.mixer, layer.mlp)
        if layer.mlp.experts is not None:
            yield layer.mlp.experts


def _used_fields(part: Any) -> Iterator[str]:
    """Yields the names of the optional fields whose value is not the default, with the value if that is a trait."""
    for field in fields(part):
        value = getattr(part, field.name)
        if field.default is not MISSING and value != field.default and field.name not in READER_FIELDS:
            trait = f"{field.name}={value}"
            yield trait if trait in MODEL_FEATURES else field.name
