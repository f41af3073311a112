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

from swiftspec.errors import UserError, shown

T = TypeVar("T")
TAKES = {  # of each type of a field: what is meant by it, and how a message names that
    bool: (bool, "true or false"), int: (Integral, "a whole number"), float: (Real, "a number"), str: (str, "text"),
    dict: (Mapping, "numbers by token id"),
}  # fmt: skip


class Config(Protocol):
    """Any dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Setting:
    """What a declaration says beside the type and the default: how the setting is shown, and which values it takes."""

    help: str | None = None  # None: it has no flag, code sets it
    group: str = ""  # the heading in --help
    metavar: str | None = None  # the word for its value; None: its choices
    shown: str | None = None  # its default in words, where the value says little
    place: int = 0  # in its group: below 0 at the start, above 0 at the end, else as the fields stand
    from_model: str | None = None  # its name in a model's generation_config.json: left out, it is the model's own
    shapes: str | None = None  # what it shapes; a mode that has no such thing refuses it
    profile: bool = False  # `python -m swiftspec.profile` has the flag too

    choices: tuple[str, ...] = ()
    least: float | None = None
    above: float | None = None
    most: float | None = None
    zero: bool = False  # 0 is fine too, outside the range
    must: str | None = None  # the rule in words, where `least`, `above` and `most` do not say all
    finite: bool = False  # infinity and NaN are refused by name
    beside: str | None = None  # the field that its check looks at too

    @property
    def rule(self) -> str:
        """What a value must do: `lie in 1..64`. Empty where any will do."""
        if self.must is not None:
            return self.must
        if self.choices:
            return f"be one of {', '.join(self.choices)}"
        if self.above is not None:
            return f"lie above {self.above:.15g}" + ("" if self.most is None else f" and at most {self.most:.15g}")
        if self.least is not None and self.most is not None:
            return f"lie in {self.least:.15g}..{self.most:.15g}"
        if self.least is not None:
            return f"be at least {self.least:.15g}"
        return "" if self.most is None else f"be at most {self.most:.15g}"

    def check(self, name: str, value: Any) -> None:
        """Raises UserError on a value that breaks the rule."""
        if self.finite:
            require(math.isfinite(value), f"{name} must be a finite number")
        if not self._allows(value):
            raise UserError(f"{name} must {self.rule}, not {shown(value)}")

    def _allows(self, value: Any) -> bool:
        if self.choices:
            return value in self.choices
        high = self.most is None or value <= self.most
        low = (self.least is None or value >= self.least) and (self.above is None or value > self.above)
        return (low and high) or (self.zero and value == 0)


def setting(default: T, *args: Any, **kwargs: Any) -> T:
    """A field of a dataclass with this default, declared by `Setting(*args, **kwargs)`."""
    metadata = {"setting": Setting(*args, **kwargs)}
    if isinstance(default, dict):  # dataclasses want a new one for each instance, and it has no hash
        return cast(T, field(default_factory=default.copy, hash=False, metadata=metadata))
    return cast(T, field(default=default, metadata=metadata))


def declared(config: Config | type[Config]) -> Iterator[tuple[Field[Any], Setting]]:
    """The fields of a dataclass that `setting` made, and what they declare."""
    return ((item, item.metadata["setting"]) for item in fields(config) if "setting" in item.metadata)


def check_fields(config: Config) -> None:
    """Makes of each field's value what its type says, where that was meant: numpy's and torch's numbers for Python's, a
    whole one for any, a list or a single one for a tuple. Raises UserError on the first that is something else, or
    breaks its own rule; None is fine where it is the default."""
    for item in fields(config):  # whose types are types: their files leave annotations as they are, not as text
        object.__setattr__(config, item.name, meant(item.name, item.type, getattr(config, item.name)))
    for item, declaration in declared(config):
        value = getattr(config, item.name)
        if value is not None or item.default is not None:
            declaration.check(item.name, value)


def meant(name: str, kind: Any, value: Any) -> Any:
    """The value as a field of this type holds it. Raises UserError where it is none."""
    outer, inner = get_origin(kind), get_args(kind)
    value = value.item() if getattr(value, "ndim", None) == 0 else value  # numpy's and torch's scalars
    if outer is UnionType:  # of a type and None
        return None if value is None else meant(name, inner[0], value)
    if outer is tuple:
        items = value if hasattr(value, "__len__") and not isinstance(value, str) else [value]
        plain = all(type(item) is inner[0] for item in items)
        return tuple(items if plain else (meant(name, inner[0], item) for item in items))
    if outer is dict and isinstance(value, Mapping):
        return {meant(name, inner[0], key): meant(name, inner[1], item) for key, item in value.items()}
    takes, words = TAKES.get(outer or kind) or (kind, f"a {kind.__name__}")
    if not isinstance(value, takes) or (kind is bool) != isinstance(value, bool):
        raise UserError(f"{name} takes {words}, not {shown(value)}")
    if kind is float and abs(value) > 2**1000:  # float() would raise
        return math.inf if value > 0 else -math.inf
    return kind(value) if kind in (int, float) else value


def require(ok: bool, message: str) -> None:
    """Raises UserError unless `ok`."""
    if not ok:
        raise UserError(message)
