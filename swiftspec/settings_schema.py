"""How a setting is declared: once, at the dataclass field that holds its value.

    top_p: float = setting(1.0, "Keep the likeliest tokens that reach this mass.", SAMPLING, "P", above=0, most=1)

The check of its value, its flag, environment variable, key in a YAML file and lines in --help all come from there.
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
ACCEPTED_TYPES = {  # of each type of a field: what is meant by it, and how a message names that
    bool: (bool, "true or false"), int: (Integral, "a whole number"), float: (Real, "a number"), str: (str, "text"),
    dict: (Mapping, "numbers by token id"),
}  # fmt: skip


class DataclassInstance(Protocol):
    """Any dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Setting:
    """What a declaration says beside the type and the default: how the setting is shown, and which values it takes."""

    help: str | None = None  # None: it has no flag, code sets it
    group: str = ""  # the heading in --help
    metavar: str | None = None  # the word for its value; None: its choices
    default_text: str | None = None  # its default in words, where the value says little
    order: int = 0  # in its group: below 0 at the start, above 0 at the end, else as the fields stand
    from_model: str | None = None  # its name in a model's generation_config.json: left out, it is the model's own
    applies_to: str | None = None  # what it shapes; a mode that has no such thing refuses it
    profile: bool = False  # `python -m swiftspec.profile` has the flag too

    choices: tuple[str, ...] = ()
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    allow_zero: bool = False  # 0 is fine too, outside the range
    rule: str | None = None  # the rule in words, where `least`, `above` and `most` do not say all
    finite: bool = False  # infinity and NaN are refused by name
    depends_on: str | None = None  # the field that its check looks at too

    @property
    def rule_text(self) -> str:
        """What a value must do: `lie in 1..64`. Empty where any will do."""
        if self.rule is not None:
            return self.rule
        if self.choices:
            return f"be one of {', '.join(self.choices)}"
        if self.gt is not None:
            return f"lie above {self.gt:.15g}" + ("" if self.le is None else f" and at most {self.le:.15g}")
        if self.ge is not None and self.le is not None:
            return f"lie in {self.ge:.15g}..{self.le:.15g}"
        if self.ge is not None:
            return f"be at least {self.ge:.15g}"
        return "" if self.le is None else f"be at most {self.le:.15g}"

    def check(self, name: str, value: Any) -> None:
        """Raises UserError on a value that breaks the rule."""
        if self.finite:
            require(math.isfinite(value), f"{name} must be a finite number")
        if not self._allows(value):
            raise UserError(f"{name} must {self.rule_text}, not {truncated_repr(value)}")

    def _allows(self, value: Any) -> bool:
        if self.choices:
            return value in self.choices
        high = self.le is None or value <= self.le
        low = (self.ge is None or value >= self.ge) and (self.gt is None or value > self.gt)
        return (low and high) or (self.allow_zero and value == 0)


def setting(default: T, *args: Any, **kwargs: Any) -> T:
    """A field of a dataclass with this default, declared by `Setting(*args, **kwargs)`."""
    metadata = {"setting": Setting(*args, **kwargs)}
    if isinstance(default, dict):  # dataclasses want a new one for each instance, and it has no hash
        return cast(T, field(default_factory=default.copy, hash=False, metadata=metadata))
    return cast(T, field(default=default, metadata=metadata))


def declared_settings(config: DataclassInstance | type[DataclassInstance]) -> Iterator[tuple[Field[Any], Setting]]:
    """The fields of a dataclass that `setting` made, and what they declare."""
    return ((item, item.metadata["setting"]) for item in fields(config) if "setting" in item.metadata)


def check_fields(config: DataclassInstance) -> None:
    """Makes of each field's value what its type says, where that was meant: numpy's and torch's numbers for Python's, a
    whole one for any, a list or a single one for a tuple. Raises UserError on the first that is something else, or
    breaks its own rule; None is fine where it is the default."""
    for item in fields(config):  # whose types are types: their files leave annotations as they are, not as text
        object.__setattr__(config, item.name, coerce(item.name, item.type, getattr(config, item.name)))
    for item, declaration in declared_settings(config):
        value = getattr(config, item.name)
        if value is not None or item.default is not None:
            declaration.check(item.name, value)


def coerce(name: str, kind: Any, value: Any) -> Any:
    """The value as a field of this type holds it. Raises UserError where it is none."""
    outer, inner = get_origin(kind), get_args(kind)
    value = value.item() if getattr(value, "ndim", None) == 0 else value  # numpy's and torch's scalars
    if outer is UnionType:  # of a type and None
        return None if value is None else coerce(name, inner[0], value)
    if outer is tuple:
        items = value if hasattr(value, "__len__") and not isinstance(value, str) else [value]
        plain = all(type(item) is inner[0] for item in items)
        return tuple(items if plain else (coerce(name, inner[0], item) for item in items))
    if outer is dict and isinstance(value, Mapping):
        return {coerce(name, inner[0], key): coerce(name, inner[1], item) for key, item in value.items()}
    takes, words = ACCEPTED_TYPES.get(outer or kind) or (kind, f"a {kind.__name__}")
    if not isinstance(value, takes) or (kind is bool) != isinstance(value, bool):
        raise UserError(f"{name} takes {words}, not {truncated_repr(value)}")
    if kind is float and abs(value) > 2**1000:  # float() would raise
        return math.inf if value > 0 else -math.inf
    return kind(value) if kind in (int, float) else value


def require(ok: bool, message: str) -> None:
    """Raises UserError unless `ok`."""
    if not ok:
        raise UserError(message)
