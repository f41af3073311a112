from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class Frame(_message.Message):
    __slots__ = ("opcode", "words")
    OPCODE_FIELD_NUMBER: _ClassVar[int]
    WORDS_FIELD_NUMBER: _ClassVar[int]
    opcode: int
    words: bytes
    def __init__(self, opcode: _Optional[int] = ..., words: _Optional[bytes] = ...) -> None: ...

class PingRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PingAnswer(_message.Message):
    __slots__ = ("protocol", "model_info")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    MODEL_INFO_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    model_info: str
    def __init__(self, protocol: _Optional[int] = ..., model_info: _Optional[str] = ...) -> None: ...
