"""Declaration of settings: each is declared once, at the dataclass field that holds its value.

    top_p: float = setting(1.0, "Keep the likeliest tokens that reach this mass.", SAMPLING, "P", gt=0, le=1)

Validation, command-line flag, YAML key and --help text are all derived from the declaration.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from numbers import Integral, Real
from types import UnionType
from typing import Any, ClassVar, Protocol, TypeVar, cast, get_args, get_origin

from swiftspec.errors import UserError, truncated_repr

T = TypeVar("T")
ACCEPTED_TYPES = {  # per field type: the accepted type, and its name in a message
    bool: (bool, "true or false"),
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    str: (str, "a string"),
    dict: (Mapping, "a mapping from token id to number"),
}


class DataclassInstance(Protocol):
    """Any dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueRule:
    """Rule for the valid values of a setting, beyond their type. By default every value is valid."""

    choices: tuple[str, ...] = ()
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    allow_zero: bool = False  # 0 is valid although outside the range
    finite: bool = False  # infinity and NaN are rejected, with their own error message
    depends_on: str | None = None  # another field that the check of the dataclass reads
    wording: str | None = None  # text of the rule, if `ge`, `gt` and `le` do not describe it completely

    @property
    def text(self) -> str:
        """The rule in words, such as `lie in 1..64`. Empty if every value is valid."""
        if self.wording is not None:
            return self.wording
        if self.choices:
            return f"be one of {', '.join(self.choices)}"
        if self.gt is not None:
            return f"be above {self.gt:.15g}" + ("" if self.le is None else f" and at most {self.le:.15g}")
        if self.ge is not None and self.le is not None:
            return f"lie in {self.ge:.15g}..{self.le:.15g}"
        if self.ge is not None:
            return f"be at least {self.ge:.15g}"
        return "" if self.le is None else f"be at most {self.le:.15g}"

    def check(self, name: str, value: Any) -> None:
        """Raises UserError on a value that breaks the rule. `name`: name of the setting in the message."""
        if self.finite:
            require(math.isfinite(value), f"{name} must be a finite number")
        if not self._allows(value):
            raise UserError(f"{name} must {self.text}, not {truncated_repr(value)}")

    def _allows(self, value: Any) -> bool:
        if self.choices:
            return value in self.choices
        high = self.le is None or value <= self.le
        low = (self.ge is None or value >= self.ge) and (self.gt is None or value > self.gt)
        return (low and high) or (self.allow_zero and value == 0)


RULE_FIELDS = frozenset(item.name for item in fields(ValueRule))


@dataclass(frozen=True, slots=True)
class Setting:
    """Declaration of a setting: how it is given and shown, and the rule for its values. The dataclass field has its
    type and default."""

    help: str | None = None  # None: the setting has no flag and is set by code
    group: str = ""  # the heading in --help
    metavar: str | None = None  # name of its value in --help; None: its choices
    default_text: str | None = None  # description of the default, if the value alone is unclear
    order: int = 0  # position in its group: below 0 at the start, above 0 at the end, 0 in field order
    from_model: str | None = None  # key in the model's generation_config.json that supplies the default
    feature: str | None = None  # row of the capability table that any value but the default uses (capabilities.py)
    applies_to: str | None = None  # the part that it configures; a mode without that part rejects or ignores it
    profile: bool = False  # also a flag of `python -m swiftspec.profile`
    variable: bool = False  # can also be set by an environment variable
    json_flag: str | None = None  # the flag with a JSON object of which it is a field, instead of a flag of its own
    python_only: bool = False  # an option of `LLM`, without a flag
    rule: ValueRule = ValueRule()

    @property
    def has_flag(self) -> bool:
        """Whether the command line has a flag of this name."""
        return self.json_flag is None and not self.python_only


def setting(default: T, *args: Any, **kwargs: Any) -> T:
    """Returns a dataclass field with this default, with its `Setting` in the metadata. The keyword arguments are fields
    of `Setting` and of its `ValueRule`."""
    rule = ValueRule(**{name: kwargs.pop(name) for name in RULE_FIELDS & kwargs.keys()})
    metadata = {"setting": Setting(*args, rule=rule, **kwargs)}
    if isinstance(default, dict):  # a mutable default needs a factory, and a dict is not hashable
        return cast(T, field(default_factory=default.copy, hash=False, metadata=metadata))
    return cast(T, field(default=default, metadata=metadata))


def declared_settings(config: DataclassInstance | type[DataclassInstance]) -> Iterator[tuple[Field[Any], Setting]]:
    """Returns the fields of a dataclass that were made by `setting`, each with its declaration."""
    return ((item, item.metadata["setting"]) for item in fields(config) if "setting" in item.metadata)


def check_fields(config: DataclassInstance) -> None:
    """Coerces each field to its declared type: NumPy and Torch scalars to Python numbers, integral floats to int, a
    list or a single value to a tuple.

    Raises UserError on the first value that cannot be converted or that breaks its rule. None is valid if it is the
    default.
    """
    for item in fields(config):  # `item.type` is a type: these modules import no annotations from __future__
        object.__setattr__(config, item.name, coerce(item.name, item.type, getattr(config, item.name)))
    for item, declaration in declared_settings(config):
        value = getattr(config, item.name)
        if value is not None or item.default is not None:
            declaration.rule.check(item.name, value)


def coerce(name: str, kind: Any, value: Any) -> Any:
    """Converts a value to `kind`, the type of a field. Raises UserError if that is not possible. `name`: name of the
    field in the message."""
    outer, inner = get_origin(kind), get_args(kind)
    value = value.item() if getattr(value, "ndim", None) == 0 else value  # NumPy and Torch scalars
    if outer is UnionType:  # a type or None
        return None if value is None else coerce(name, inner[0], value)
    if outer is tuple:
        items = value if hasattr(value, "__len__") and not isinstance(value, str) else [value]
        plain = all(type(item) is inner[0] for item in items)
        return tuple(items if plain else (coerce(name, inner[0], item) for item in items))
    if outer is dict and isinstance(value, Mapping):
        return {coerce(name, inner[0], key): coerce(name, inner[1], item) for key, item in value.items()}
    takes, words = ACCEPTED_TYPES.get(outer or kind) or (kind, f"a {kind.__name__}")
    if not isinstance(value, takes) or (kind is bool) != isinstance(value, bool):
        raise UserError(f"{name}: expected {words}, not {truncated_repr(value)}")
    if kind is float and abs(value) > 2**1000:  # float() would raise OverflowError
        return math.inf if value > 0 else -math.inf
    return kind(value) if kind in (int, float) else value


def require(ok: bool, message: str) -> None:
    """Raises UserError with this message unless `ok`."""
    if not ok:
        raise UserError(message)
