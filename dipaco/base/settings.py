"""What a command can be told: a frozen dataclass, each field annotated with an `Option`.

    @dataclass(frozen=True, kw_only=True)
    class ServeSettings(Settings):
        port: Annotated[int, Option("TCP port to listen on", "PORT", least=0, most=65535)] = 31337

Flags (`command_line`), defaults, checks and messages follow from it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from types import NoneType
from typing import Annotated, Any, ClassVar, get_args, get_origin, get_type_hints

from .errors import ConfigurationError


@dataclass(frozen=True)
class Option:
    """How a field of settings is given.

    A flag is the field's name with hyphens unless `flag` says otherwise; `positional` arguments
    have none, and are named by `metavar`. `least` and `most` bound a number; `check` raises for a
    word that cannot be. Where some options of a command are `common`, `--help` shows these alone.
    Words that no flag takes are values of a field with `loose`. The flag of a list takes all words
    that follow, but with `one_by_one` it takes one, and is given again for more.
    """

    help: str
    metavar: str | None = None
    flag: str = ""
    least: float | None = None
    most: float | None = None
    positional: bool = False
    check: Callable[[str], object] | None = None
    common: bool = False
    loose: bool = False
    one_by_one: bool = False


@dataclass(frozen=True)
class Argument:
    """A field of settings together with its option."""

    field: Field[Any]
    option: Option
    kind: Any
    """The type of the value, without None."""
    group: str

    @property
    def name(self) -> str:
        return self.field.name

    @property
    def shown(self) -> str:
        """What a user types, for messages."""
        if self.option.positional:
            return self.option.metavar or self.name
        return self.option.flag or f"--{self.name.replace('_', '-')}"

    @property
    def takes_words(self) -> bool:
        """Whether it takes all words up to the next flag."""
        return get_origin(self.kind) is tuple

    @property
    def default(self) -> Any:
        """The default, MISSING if there is none."""
        factory = self.field.default_factory
        return self.field.default if factory is MISSING else factory()

    @property
    def help(self) -> str:
        """The help, with the default where that is a value to type and not mentioned."""
        default = self.default
        if default is MISSING and not self.option.positional:
            return f"{self.option.help} (required)"
        if default in (MISSING, None, (), "") or self.kind is bool or "default" in self.option.help:
            return self.option.help
        shown = f"{default:g}" if isinstance(default, float) else default
        return f"{self.option.help} (default: {shown})"

    def check(self, value: Any) -> None:
        """Raise ConfigurationError for a number out of bounds, and what `check` raises."""
        if self.option.check is not None:
            for word in value if self.takes_words else [value] if value is not None else ():
                self.option.check(word)
        if self.kind not in (int, float) or value is None:
            return
        least, most = self.option.least, self.option.most
        if not math.isfinite(value):
            raise ConfigurationError(f"{self.shown} {value} must be a finite number")
        if (least is None or value >= least) and (most is None or value <= most):
            return
        bounds = f"at least {least:g}" if most is None else f"{least or 0:g} to {most:g}"
        raise ConfigurationError(f"{self.shown} {value} must be {bounds}")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What every command can be told. Values that cannot be raise ConfigurationError."""

    group: ClassVar[str] = ""
    """Heading in the help for the fields of a class."""

    def __post_init__(self) -> None:
        for argument in arguments_of(type(self)):
            argument.check(getattr(self, argument.name))


@dataclass(frozen=True)
class Typed:
    """What a user typed of settings, by name of the field: now, and of what still holds before."""

    now: Mapping[str, Any] = field(default_factory=dict)
    before: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RunSettings(Settings):
    """Which run of a swarm is meant."""

    run: Annotated[str | None, Option("name or id of the run, if the swarm has several", "RUN")] = (
        None
    )


@dataclass(frozen=True, kw_only=True)
class ComputeSettings(Settings):
    """The options of where a command computes; `dipaco.modules.device` acts on them."""

    group = "computing"

    device: Annotated[str, Option("auto, cpu, cuda or cuda:N (also of ROCm)", "D")] = "auto"
    threads: Annotated[
        int | None, Option("CPU threads for arithmetic (default: all)", "N", least=1)
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_device("--device", self.device)


def check_device(flag: str, device: str) -> None:
    """Raise ConfigurationError if a flag gives something that cannot be a device."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise ConfigurationError(
            f"{flag} '{device}' is not a device; give auto, cpu, cuda or cuda:0"
        )


def arguments_of(settings: type[Settings]) -> list[Argument]:
    """Return all fields of settings: the group that must be given first, then a class's own
    before those of its bases. The one place that knows every setting of a command."""
    hints = get_type_hints(settings, include_extras=True)
    classes = [base for base in settings.__mro__ if issubclass(base, Settings)]
    found = []
    for one in fields(settings):
        if get_origin(hints[one.name]) is not Annotated:
            continue
        # A field that is written again, with another default, stays in the group of the first.
        owner = [c for c in classes if one.name in vars(c).get("__annotations__", {})][-1]
        annotation, option = get_args(hints[one.name])
        kinds = get_args(annotation)
        kind = kinds[0] if len(kinds) == 2 and kinds[1] is NoneType else annotation
        argument = Argument(one, option, kind, vars(owner).get("group", ""))
        found.append((classes.index(owner), argument))
    needed = {place for place, argument in found if argument.default is MISSING}
    found.sort(key=lambda pair: (pair[0] not in needed, pair[0]))
    return [argument for _, argument in found]
