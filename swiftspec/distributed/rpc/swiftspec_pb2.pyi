from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Shape(_message.Message):
    __slots__ = ("ahead", "verify_batch", "draft_leaves", "draft_steps", "verify", "proposal", "calibration", "catch_up", "adapt_steps")
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    VERIFY_BATCH_FIELD_NUMBER: _ClassVar[int]
    DRAFT_LEAVES_FIELD_NUMBER: _ClassVar[int]
    DRAFT_STEPS_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    CALIBRATION_FIELD_NUMBER: _ClassVar[int]
    CATCH_UP_FIELD_NUMBER: _ClassVar[int]
    ADAPT_STEPS_FIELD_NUMBER: _ClassVar[int]
    ahead: bool
    verify_batch: int
    draft_leaves: int
    draft_steps: int
    verify: str
    proposal: str
    calibration: float
    catch_up: bool
    adapt_steps: bool
    def __init__(self, ahead: _Optional[bool] = ..., verify_batch: _Optional[int] = ..., draft_leaves: _Optional[int] = ..., draft_steps: _Optional[int] = ..., verify: _Optional[str] = ..., proposal: _Optional[str] = ..., calibration: _Optional[float] = ..., catch_up: _Optional[bool] = ..., adapt_steps: _Optional[bool] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "guidance_scale", "seed", "max_tokens", "stop", "stop_token_ids", "ignore_eos", "logprobs", "prompt_logprobs", "grammar", "negative_prompt_ids", "verify_batch", "draft_steps")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    GUIDANCE_SCALE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    NEGATIVE_PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    VERIFY_BATCH_FIELD_NUMBER: _ClassVar[int]
    DRAFT_STEPS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    guidance_scale: float
    seed: int
    max_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    logprobs: int
    prompt_logprobs: int
    grammar: str
    negative_prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    verify_batch: int
    draft_steps: int
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., guidance_scale: _Optional[float] = ..., seed: _Optional[int] = ..., max_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., grammar: _Optional[str] = ..., negative_prompt_ids: _Optional[_Iterable[int]] = ..., verify_batch: _Optional[int] = ..., draft_steps: _Optional[int] = ...) -> None: ...

class Opening(_message.Message):
    __slots__ = ("protocol", "tokenizer", "model", "request", "prompt_len", "tokens", "sampling", "shape", "afresh")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LEN_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    AFRESH_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    tokenizer: bytes
    model: bytes
    request: int
    prompt_len: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    sampling: Sampling
    shape: Shape
    afresh: bool
    def __init__(self, protocol: _Optional[int] = ..., tokenizer: _Optional[bytes] = ..., model: _Optional[bytes] = ..., request: _Optional[int] = ..., prompt_len: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., shape: _Optional[_Union[Shape, _Mapping]] = ..., afresh: _Optional[bool] = ...) -> None: ...

class Drawn(_message.Message):
    __slots__ = ("tokens", "probs")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROBS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    probs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, tokens: _Optional[_Iterable[int]] = ..., probs: _Optional[_Iterable[float]] = ...) -> None: ...

class Proposal(_message.Message):
    __slots__ = ("request", "round", "prefix_len", "tokens", "parents", "drawn", "weights", "sources")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    PREFIX_LEN_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    DRAWN_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    request: int
    round: int
    prefix_len: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    parents: _containers.RepeatedScalarFieldContainer[int]
    drawn: Drawn
    weights: _containers.RepeatedScalarFieldContainer[float]
    sources: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request: _Optional[int] = ..., round: _Optional[int] = ..., prefix_len: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., parents: _Optional[_Iterable[int]] = ..., drawn: _Optional[_Union[Drawn, _Mapping]] = ..., weights: _Optional[_Iterable[float]] = ..., sources: _Optional[_Iterable[int]] = ...) -> None: ...

class TreeDelta(_message.Message):
    __slots__ = ("request", "round", "expansions", "first", "parents", "tokens", "weights")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    EXPANSIONS_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    request: int
    round: int
    expansions: int
    first: int
    parents: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    weights: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, request: _Optional[int] = ..., round: _Optional[int] = ..., expansions: _Optional[int] = ..., first: _Optional[int] = ..., parents: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ..., weights: _Optional[_Iterable[float]] = ...) -> None: ...

class Likelihoods(_message.Message):
    __slots__ = ("logprobs", "width", "top_tokens", "top_logprobs")
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    width: int
    top_tokens: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprobs: _Optional[_Iterable[float]] = ..., width: _Optional[int] = ..., top_tokens: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class VerifyResult(_message.Message):
    __slots__ = ("request", "round", "prefix_len", "path", "tokens", "overlaps", "likelihoods", "prompt")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    PREFIX_LEN_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    OVERLAPS_FIELD_NUMBER: _ClassVar[int]
    LIKELIHOODS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    request: int
    round: int
    prefix_len: int
    path: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    overlaps: _containers.RepeatedScalarFieldContainer[float]
    likelihoods: Likelihoods
    prompt: Likelihoods
    def __init__(self, request: _Optional[int] = ..., round: _Optional[int] = ..., prefix_len: _Optional[int] = ..., path: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ..., overlaps: _Optional[_Iterable[float]] = ..., likelihoods: _Optional[_Union[Likelihoods, _Mapping]] = ..., prompt: _Optional[_Union[Likelihoods, _Mapping]] = ...) -> None: ...

class Telemetry(_message.Message):
    __slots__ = ("span", "began", "wall", "queue", "model")
    SPAN_FIELD_NUMBER: _ClassVar[int]
    BEGAN_FIELD_NUMBER: _ClassVar[int]
    WALL_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    span: int
    began: int
    wall: int
    queue: int
    model: int
    def __init__(self, span: _Optional[int] = ..., began: _Optional[int] = ..., wall: _Optional[int] = ..., queue: _Optional[int] = ..., model: _Optional[int] = ...) -> None: ...

class DraftRequest(_message.Message):
    __slots__ = ("session", "draft_steps", "opening", "result")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    DRAFT_STEPS_FIELD_NUMBER: _ClassVar[int]
    OPENING_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    draft_steps: int
    opening: Opening
    result: VerifyResult
    def __init__(self, session: _Optional[bytes] = ..., draft_steps: _Optional[int] = ..., opening: _Optional[_Union[Opening, _Mapping]] = ..., result: _Optional[_Union[VerifyResult, _Mapping]] = ...) -> None: ...

class DraftAnswer(_message.Message):
    __slots__ = ("session", "telemetry", "proposal", "delta")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TELEMETRY_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    telemetry: Telemetry
    proposal: Proposal
    delta: TreeDelta
    def __init__(self, session: _Optional[bytes] = ..., telemetry: _Optional[_Union[Telemetry, _Mapping]] = ..., proposal: _Optional[_Union[Proposal, _Mapping]] = ..., delta: _Optional[_Union[TreeDelta, _Mapping]] = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ("session", "opening", "proposal")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    OPENING_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    opening: Opening
    proposal: Proposal
    def __init__(self, session: _Optional[bytes] = ..., opening: _Optional[_Union[Opening, _Mapping]] = ..., proposal: _Optional[_Union[Proposal, _Mapping]] = ...) -> None: ...

class Opened(_message.Message):
    __slots__ = ("kept",)
    KEPT_FIELD_NUMBER: _ClassVar[int]
    kept: int
    def __init__(self, kept: _Optional[int] = ...) -> None: ...

class VerifyAnswer(_message.Message):
    __slots__ = ("session", "telemetry", "opened", "result")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TELEMETRY_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    telemetry: Telemetry
    opened: Opened
    result: VerifyResult
    def __init__(self, session: _Optional[bytes] = ..., telemetry: _Optional[_Union[Telemetry, _Mapping]] = ..., opened: _Optional[_Union[Opened, _Mapping]] = ..., result: _Optional[_Union[VerifyResult, _Mapping]] = ...) -> None: ...

class EndSessionRequest(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    def __init__(self, session: _Optional[bytes] = ...) -> None: ...

class EndSessionAnswer(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PingRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PingAnswer(_message.Message):
    __slots__ = ("protocol", "version", "name", "model", "tokenizer", "vocab_size", "max_model_len", "eos_token_ids", "dtype")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    version: str
    name: str
    model: bytes
    tokenizer: bytes
    vocab_size: int
    max_model_len: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    def __init__(self, protocol: _Optional[int] = ..., version: _Optional[str] = ..., name: _Optional[str] = ..., model: _Optional[bytes] = ..., tokenizer: _Optional[bytes] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ...) -> None: ...

class ReadTokenizerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FilePiece(_message.Message):
    __slots__ = ("name", "data")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    name: str
    data: bytes
    def __init__(self, name: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...
