"""How a setting is declared: once, at the dataclass field that holds its value.

    top_p: float = setting(1.0, "Keep the likeliest tokens that reach this mass.", SAMPLING, "P", above=0, most=1)

The check of its value, its flag, environment variable, key in a YAML file and lines in --help all come from there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import Field, dataclass, field, fields
from typing import Any, ClassVar, Concatenate, ParamSpec, Protocol, TypeVar, cast

from swiftspec.errors import UserError

P = ParamSpec("P")
T = TypeVar("T")


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
            return f"lie above {self.above:g}" + ("" if self.most is None else f" and at most {self.most:g}")
        if self.least is not None and self.most is not None:
            return f"lie in {self.least:g}..{self.most:g}"
        if self.least is not None:
            return f"be at least {self.least:g}"
        return "" if self.most is None else f"be at most {self.most:g}"

    def check(self, name: str, value: Any) -> None:
        """Raises UserError on a value that breaks the rule."""
        if self.finite:
            require(math.isfinite(value), f"{name} must be a finite number")
        require(self._allows(value), f"{name} must {self.rule}, not {value!r}")

    def _allows(self, value: Any) -> bool:
        if self.choices:
            return value in self.choices
        high = self.most is None or value <= self.most
        low = (self.least is None or value >= self.least) and (self.above is None or value > self.above)
        return (low and high) or (self.zero and value == 0)


def _with_default(declare: Callable[P, Setting]) -> Callable[Concatenate[T, P], T]:
    """`declare` as a maker of dataclass fields: it takes the default first. A type checker sees the default's type."""

    def made(default: T, *args: P.args, **kwargs: P.kwargs) -> T:
        metadata = {"setting": declare(*args, **kwargs)}
        if isinstance(default, dict):  # dataclasses want a new one for each instance
            return cast(T, field(default_factory=default.copy, metadata=metadata))
        return cast(T, field(default=default, metadata=metadata))

    return made


setting = _with_default(Setting)


def declared(config: Config | type[Config]) -> Iterator[tuple[Field[Any], Setting]]:
    """The fields of a dataclass that `setting` made, and what they declare."""
    return ((item, item.metadata["setting"]) for item in fields(config) if "setting" in item.metadata)


def check_fields(config: Config) -> None:
    """Raises UserError on the first field that breaks its own rule; None is fine where it is the default."""
    for item, declaration in declared(config):
        value = getattr(config, item.name)
        if value is not None or item.default is not None:
            declaration.check(item.name, value)


def require(ok: bool, message: str) -> None:
    """Raises UserError unless `ok`."""
    if not ok:
        raise UserError(message)
