"""From a name in the configuration to an object: a new strategy, optimiser or model is one new file, and no list is edited.

The name is a module's name inside a package ("resnet" is `hpctrain.models.families.resnet`), or, if all objects of a kind lie in
one module, a class's name ("sgd" is `Sgd` of `hpctrain.optim.optimizers`). The options are the fields of the frozen dataclass
`Options` of the class, where its constructor takes `options`, else the keywords of that constructor or of the function `build`.
`__post_init__` of a dataclass refuses, by an `OptionError`, values that its types allow. A user's own code is found by a
reference, `module:Name` or `file.py:Name`, or by the name of an entry point of an installed package (see
`hpctrain.core.user_code`), and is checked alike.
"""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from typing import Any, Generic, TypeVar, cast, get_type_hints

from pydantic import PydanticUserError, TypeAdapter, ValidationError

from hpctrain.core import user_code
from hpctrain.core.errors import ConfigError, OptionError
from hpctrain.core.text import choices, joined, rule

T = TypeVar("T")


class Registry(Generic[T]):
    """The objects of one kind by name: hpctrain's own, those of installed packages, and those of the user.

    hpctrain's own lie in a package or in one module. Each module of a package defines one public class that subclasses `base`,
    or, if `base` is None, a function `build`; "base" and modules whose name starts with "_" are helpers. A single module has all
    of them: its public subclasses of `base` that are not abstract, each by its name in snake case.

    Args:
        package: dotted name of the package or module, such as "hpctrain.optim.optimizers".
        kind: what its objects are called in messages, such as "optimizer"; "hpctrain.optimizers" is the group of entry points.
        base: the class that the objects derive from; None: they are made by functions.
        given: keywords of their constructors that the program gives, and that are no options.
    """

    def __init__(self, package: str, kind: str, base: type[T] | None, given: Collection[str] = ()) -> None:
        self.package = package
        self.kind = kind
        self.base = base
        self.given = frozenset(given)

    def names(self) -> tuple[str, ...]:
        """Return hpctrain's own names in alphabetical order; imports the package but none of its modules."""
        package = importlib.import_module(self.package)
        if not hasattr(package, "__path__"):
            return tuple(sorted(self._classes()))
        modules = (module.name for module in pkgutil.iter_modules(package.__path__))
        return tuple(sorted(name for name in modules if name != "base" and not name.startswith("_")))

    def offers(self) -> tuple[user_code.Offer, ...]:
        """Return the names that installed packages offer; imports none of them."""
        return user_code.offers(f"hpctrain.{self.kind}s")

    def find(self, name: str) -> Callable[..., T]:
        """Return the class or the function of that name or reference.

        Raises:
            ConfigError: no such name; a module that does not define exactly one object; code of the user's that cannot be
                imported or is not of this kind; a name that two packages offer, or a package and hpctrain.
        """
        outside = self.find_outside(name, self.names())
        if outside is not None:
            return outside
        if not hasattr(importlib.import_module(self.package), "__path__"):
            return self._classes()[name]
        module = importlib.import_module(f"{self.package}.{name}")
        entries = [value for key, value in vars(module).items() if self._is_entry(key, value, module.__name__)]
        if len(entries) != 1:
            wanted = "a function build" if self.base is None else f"exactly one public subclass of {self.base.__name__}"
            raise ConfigError(f"Module {module.__name__} must define {wanted}; it defines {len(entries)}.")
        entry: Callable[..., T] = entries[0]
        return entry

    def find_outside(self, name: str, names: Collection[str]) -> Callable[..., T] | None:
        """Return the class or the function of a reference or an offered name; None for one of `names`, which are ours.

        Raises:
            ConfigError: as `find`.
        """
        if user_code.is_reference(name):
            return self._checked(name, user_code.load(name))
        offers = [offer for offer in self.offers() if offer.name == name]
        if not offers and name not in names:
            raise unknown(self.kind, name, (*names, *(offer.name for offer in self.offers())))
        if len(offers) + (name in names) > 1:
            sources = [*(["hpctrain"] if name in names else []), *(f"the package {offer.package}" for offer in offers)]
            raise ConfigError(
                f'{_capital(self.kind)} "{name}" is one of {" and one of ".join(sources)}; name it by its module and class, '
                f'as in "{offers[-1].reference}".'
            )
        return self._checked(name, user_code.load(offers[0].reference)) if offers else None

    def check(self, name: str, options: Mapping[str, Any]) -> None:
        """Check options without making the object.

        Raises:
            ConfigError: no such name; OptionError: as `check_options`.
        """
        with self.refusals(name):
            check_options(self.find(name), f'{self.kind} "{name}"', options, self.given)

    def create(self, name: str, options: Mapping[str, Any], **fixed: Any) -> T:
        """Make the object of that name from its options and the program's own keywords.

        Raises:
            ConfigError: as `check`, and what the constructor raises.
        """
        entry = self.find(name)
        with self.refusals(name):
            return entry(**fixed, **check_options(entry, f'{self.kind} "{name}"', options, {*self.given, *fixed}))

    @contextmanager
    def refusals(self, name: str) -> Iterator[None]:
        """Turn a ValueError, by which code of the user's refuses a value, into a sentence.

        Raises:
            ConfigError: it refuses one. Errors of hpctrain's own code pass unchanged.
        """
        try:
            yield
        except ValueError as error:
            if not user_code.is_reference(name) and name not in (offer.name for offer in self.offers()):
                raise
            raise ConfigError(f'{_capital(self.kind)} "{name}" is refused: {str(error).rstrip(".")}.') from error

    def _classes(self) -> dict[str, Callable[..., T]]:
        """Return the entries of a single module by name: "sgd" for `Sgd`, "two_words" for `TwoWords`."""
        entries = [value for key, value in vars(sys.modules[self.package]).items() if self._is_entry(key, value, self.package)]
        return {
            re.sub(r"(?<!^)(?=[A-Z])", "_", entry.__name__).lower(): entry for entry in entries if not inspect.isabstract(entry)
        }

    def _is_entry(self, key: str, value: Any, module: str) -> bool:
        if getattr(value, "__module__", None) != module or key.startswith("_"):
            return False
        if self.base is None:
            return key == "build" and inspect.isfunction(value)
        return inspect.isclass(value) and issubclass(value, self.base) and value.__name__ == key

    def _checked(self, name: str, entry: Any) -> Callable[..., T]:
        """Return the user's class or function, which must be of this kind.

        Raises:
            ConfigError: it is not.
        """
        if self.base is None:
            if not (inspect.isfunction(entry) or inspect.isclass(entry)):
                raise ConfigError(
                    f'"{name}" is {entry!r}, but {_article(self.kind)} {self.kind} is a function or a class that makes it.'
                )
            return cast(Callable[..., T], entry)
        wanted = f"{_article(self.kind)} {self.kind} is a class derived from {self.base.__module__}.{self.base.__name__}"
        if not (inspect.isclass(entry) and issubclass(entry, self.base)):
            raise ConfigError(f'"{name}" is {entry!r}, but {wanted}.')
        if inspect.isabstract(entry):
            missing = ", ".join(sorted(getattr(entry, "__abstractmethods__", ())))
            raise ConfigError(f'"{name}" does not define {missing}; {wanted} that defines all that is abstract there.')
        return entry


def check_options(
    entry: Callable[..., Any], label: str, options: Mapping[str, Any], reserved: Collection[str] = ()
) -> dict[str, Any]:
    """Return the keywords of `entry` for these options, each converted to its annotated type (1 for a float becomes 1.0).

    They are the options themselves, or, where `entry` has `Options`, the one keyword `options`.

    Args:
        entry: a class or a function. label: its name in messages, such as 'optimiser "sgd"'.
        reserved: keywords that the program gives itself.

    Raises:
        OptionError: an option that is unknown, missing, reserved or of the wrong type, or that `Options` refuses.
    """
    options_type = options_of(entry)
    if options_type is entry:
        return _converted_options(entry, label, options, reserved)
    given = {key for key in parameters_of(entry) if key != "options"} - set(parameters_of(options_type))
    return {"options": options_type(**_converted_options(options_type, label, options, {*given, *reserved}))}


def options_of(entry: Callable[..., Any]) -> Callable[..., Any]:
    """Return the callable whose keywords are the options: the dataclass `entry.Options`, or `entry` itself if it has none."""
    options: Callable[..., Any] | None = getattr(entry, "Options", None)
    return entry if options is None or "options" not in parameters_of(entry) else options


def _converted_options(
    entry: Callable[..., Any], label: str, options: Mapping[str, Any], reserved: Collection[str]
) -> dict[str, Any]:
    """Return the options as keywords of `entry`, by its signature."""
    parameters = parameters_of(entry)
    known = tuple(key for key in parameters if key not in reserved)
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in inspect.signature(entry).parameters.values())
    for key in options:
        if key in reserved:
            raise OptionError(f'Option "{key}" of {label} is set by the program; remove it.', key)
        if key not in parameters and not open_ended:
            raise OptionError(f'{_capital(label)} has no option "{key}"; {choices(key, known)}.', key)
    for key in known:
        if key not in options and parameters[key].default is inspect.Parameter.empty:
            raise OptionError(f'{_capital(label)} needs the option "{key}".', key)
    return {
        key: _converted(value, parameters[key].annotation, f'Option "{key}" of {label}', key) if key in parameters else value
        for key, value in options.items()
    }


def parameters_of(entry: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return parameters that can be given by keyword, in order, annotations as types where they resolve."""
    types = _types(entry)
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {
        key: parameter.replace(annotation=types.get(key, parameter.annotation))
        for key, parameter in inspect.signature(entry).parameters.items()
        if parameter.kind in by_keyword
    }


def _types(entry: Callable[..., Any]) -> dict[str, Any]:
    """Return annotations by parameter, as types; empty if one of them is imported for type checkers only."""
    # The fields of a dataclass may be inherited from one in another module, whose names its own __init__ does not know.
    annotated = entry.__init__ if inspect.isclass(entry) and not is_dataclass(entry) else entry
    try:
        return get_type_hints(annotated)
    except NameError:
        return {}


def _converted(value: Any, annotation: Any, label: str, key: str) -> Any:
    if annotation is inspect.Parameter.empty or isinstance(annotation, str):
        return value
    try:
        adapter = TypeAdapter(annotation)
        # JSON's strict rules are those wanted here: a list may become a tuple and a name an enumeration's member, but
        # neither does "3" become a number nor True a 1.
        return adapter.validate_json(json.dumps(value), strict=True)
    except (PydanticUserError, TypeError):  # a type that no configuration can hold, or a value from a program
        return value
    except ValidationError as error:
        reasons = joined(rule(item) for item in error.errors(include_url=False))
        raise OptionError(f"{label} is {json.dumps(value)}, but {reasons}.", key) from None


def unknown(kind: str, name: str, names: Iterable[str]) -> ConfigError:
    """Return the error of a name that is none of `names`."""
    return ConfigError(f'There is no {kind} "{name}"; {choices(name, names)}.')


def _article(noun: str) -> str:
    return "an" if noun[0] in "aeiou" else "a"


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
