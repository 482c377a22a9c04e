"""Registries, which find an object by its name in the configuration. A new strategy, optimiser or model is one new file.

The name is the name of a module inside a package ("resnet" is `hpctrain.models.families.resnet`), or, if all objects of a kind
are in one module, the name of a class ("sgd" is `Sgd` of `hpctrain.optim.optimizers`). There is no list to edit. The options are
the fields of the class's frozen dataclass `Options` if its constructor has the argument `options`, else the keywords of the
constructor or of the function `build`. `__post_init__` of the dataclass raises an `OptionError` for values that the types allow
but the option does not. User code is found by a reference, `module:Name` or `file.py:Name`, or by the name of an entry point of
an installed package (see `hpctrain.core.user_code`), and is checked in the same way.
"""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import re
import sys
from abc import ABC
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import cache, wraps
from typing import Annotated, Any, Generic, TypeVar, cast, get_type_hints

from pydantic import ConfigDict, Field, InstanceOf, PydanticUserError, TypeAdapter, ValidationError

from hpctrain.core import user_code
from hpctrain.core.answers import rule_of
from hpctrain.core.errors import ConfigError, HpctrainError, OptionError
from hpctrain.core.text import MISSPELT, SYNONYMS, choices, joined, nearest, shortened

T = TypeVar("T")
_STRICT = ConfigDict(strict=True, arbitrary_types_allowed=True)


class Registry(Generic[T]):
    """The objects of one kind by name: those of hpctrain, of installed packages, and of the user.

    The objects of hpctrain are in a package or in one module. Each module of a package defines one public subclass of `base`, or,
    if `base` is None, a function `build`; "base" and modules whose names start with "_" are helpers. A single module defines all
    objects: its public concrete subclasses of `base`, each by its name in snake case.

    Args:
        package: dotted name of the package or module, such as "hpctrain.optim.optimizers".
        kind: name of the kind in messages, such as "optimizer"; "hpctrain.optimizers" is the group of entry points.
        base: base class of the objects; None if functions make them.
        given: keywords of the constructors that the program sets and that are not options.
    """

    def __init__(self, package: str, kind: str, base: type[T] | None, given: Collection[str] = ()) -> None:
        self.package = package
        self.kind = kind
        self.base = base
        self.given = frozenset(given)

    def names(self) -> tuple[str, ...]:
        """Return hpctrain's own names in alphabetical order. The call imports the package, but none of its modules."""
        package = importlib.import_module(self.package)
        if not hasattr(package, "__path__"):
            return tuple(sorted(self._classes()))
        modules = (module.name for module in pkgutil.iter_modules(package.__path__))
        return tuple(sorted(name for name in modules if name != "base" and not name.startswith("_")))

    def offers(self) -> tuple[user_code.Offer, ...]:
        """Return the names that installed packages offer. The call imports none of the packages."""
        return user_code.offers(f"hpctrain.{self.kind}s")

    def find(self, name: str) -> Callable[..., T]:
        """Return the class or function of a name or reference.

        Raises:
            ConfigError: the name is unknown, a module does not define exactly one object, user code cannot be imported or is not
                of this kind, or several packages define the name.
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
        """Return the class or function of a reference or an offered name; None for one of `names`, which are hpctrain's own.

        Raises:
            ConfigError: as for `find`.
        """
        if user_code.is_reference(name):
            return self._checked(name, user_code.load(name))
        offers = [offer for offer in self.offers() if offer.name == name]
        if not offers and name not in names:
            raise unknown(self.kind, name, (*names, *(offer.name for offer in self.offers())))
        if len(offers) + (name in names) > 1:
            sources = [*(["hpctrain"] if name in names else []), *(f"the package {offer.package}" for offer in offers)]
            raise ConfigError(
                f'{_capital(self.kind)} "{name}" is defined by {" and by ".join(sources)}; write its module and class, as in '
                f'"{offers[-1].reference}".'
            )
        return self._checked(name, user_code.load(offers[0].reference)) if offers else None

    def check(self, name: str, options: Mapping[str, Any]) -> None:
        """Check options without making the object.

        Raises:
            ConfigError: the name is unknown.
            OptionError: as for `check_options`.
        """
        with self.refusals(name):
            check_options(self.find(name), f'{self.kind} "{name}"', options, self.given)

    def create(self, name: str, options: Mapping[str, Any], **fixed: Any) -> T:
        """Make the object of a name from its options and the program's own keywords.

        Raises:
            ConfigError: as for `check`, or raised by the constructor.
        """
        entry = self.find(name)
        with self.refusals(name):
            return entry(**fixed, **check_options(entry, f'{self.kind} "{name}"', options, {*self.given, *fixed}))

    @contextmanager
    def refusals(self, name: str) -> Iterator[None]:
        """Convert an exception of user code into a ConfigError (context manager).

        An HpctrainError passes. Unless it is an OptionError, its message also names the line of the call in user code that raised
        it. Bugs of hpctrain pass unchanged.

        Raises:
            ConfigError: user code raised an exception; a ValueError of its own `raise` statement means that a value is invalid.
        """
        label = f'{_capital(self.kind)} "{name}"'
        try:
            yield
        except HpctrainError as error:
            line = "" if isinstance(error, OptionError) else user_code.calling_line(error)
            if line:
                error.args = (f"{str(error).removesuffix('.')} ({line}).", *error.args[1:])
            raise
        except Exception as error:
            if not user_code.is_reference(name) and name not in (offer.name for offer in self.offers()):
                raise
            if isinstance(error, ValueError) and user_code.raises_itself(error):
                raise ConfigError(f"{label} is invalid: {str(error).rstrip('.')}.") from error
            fault = user_code.fault(error, label)
            if fault is None:
                raise
            raise fault from error

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
        """Return the user's class or function if it is of this kind.

        Raises:
            ConfigError: it is not of this kind.
        """
        if self.base is None:
            if not (inspect.isfunction(entry) or inspect.isclass(entry)):
                raise ConfigError(
                    f'"{name}" is {entry!r}, but {_article(self.kind)} {self.kind} must be a function or a class that makes it.'
                )
            return cast(Callable[..., T], entry)
        wanted = f"{_article(self.kind)} {self.kind} must be a class derived from {self.base.__module__}.{self.base.__name__}"
        if not (inspect.isclass(entry) and issubclass(entry, self.base)):
            raise ConfigError(f'"{name}" is {entry!r}, but {wanted}.')
        if inspect.isabstract(entry):
            missing = ", ".join(sorted(getattr(entry, "__abstractmethods__", ())))
            raise ConfigError(f'"{name}" does not define {missing}; {wanted} that defines all abstract methods.')
        return entry


def check_options(
    entry: Callable[..., Any], label: str, options: Mapping[str, Any], reserved: Collection[str] = ()
) -> dict[str, Any]:
    """Return the keywords of `entry` for these options, each converted to its annotated type (1 for a float becomes 1.0).

    If `entry` has `Options`, the only keyword is `options`.

    Args:
        label: name of the entry in messages, such as 'optimiser "sgd"'.
        reserved: keywords that the program sets.

    Raises:
        OptionError: an option is unknown, missing, reserved, of the wrong type, or refused by `Options`.
    """
    options_type = options_of(entry)
    parameters = parameters_of(options_type)
    if options_type is not entry:
        reserved = {*reserved, *(parameters_of(entry).keys() - parameters.keys() - {"options"})}
    known = tuple(key for key in parameters if key not in reserved)
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in inspect.signature(options_type).parameters.values())
    for key in options:
        if key in reserved:
            raise OptionError(f'Option "{key}" of {label} is set by the program; remove it.', key)
        if key not in parameters and not open_ended:
            raise OptionError.of_parts(f'{_capital(label)} has no option "{key}"', choices(key, known), key, known)
    for key in known:
        if key not in options and parameters[key].default is inspect.Parameter.empty:
            raise OptionError.of_parts(f'{_capital(label)} needs the option "{key}"', "", key)
    keywords = {
        key: _converted(value, parameters[key].annotation, f'Option "{key}" of {label}', key) if key in parameters else value
        for key, value in options.items()
    }
    return keywords if options_type is entry else {"options": options_type(**keywords)}


def options_of(entry: Callable[..., Any]) -> Callable[..., Any]:
    """Return the callable whose keywords are the options: the dataclass `entry.Options`, or `entry` if it has none."""
    options: Callable[..., Any] | None = getattr(entry, "Options", None)
    return entry if options is None or "options" not in parameters_of(entry) else options


def parameters_of(entry: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the keyword parameters in order, with annotations as types if they can be resolved."""
    types = _types(entry)
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {
        key: parameter.replace(annotation=types.get(key, parameter.annotation))
        for key, parameter in inspect.signature(entry).parameters.items()
        if parameter.kind in by_keyword
    }


def _types(entry: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations by parameter, as types; empty if one of them is imported only for type checkers."""
    # A dataclass may inherit fields from another module, whose names the globals of its own __init__ do not contain.
    annotated = entry.__init__ if inspect.isclass(entry) and not is_dataclass(entry) else entry
    try:
        return get_type_hints(annotated, include_extras=True)
    except NameError:
        return {}


def _converted(value: Any, annotation: Any, label: str, key: str) -> Any:
    if annotation is inspect.Parameter.empty or isinstance(annotation, str):
        return value
    try:
        adapter = TypeAdapter(annotation)
        # JSON's strict rules fit: a list may become a tuple, and a name the member of an enumeration, but "3" does not become
        # a number, nor True a 1.
        return adapter.validate_json(json.dumps(value), strict=True)
    except (PydanticUserError, TypeError):  # a type that YAML cannot express, or a value from a program
        return value
    except ValidationError as error:
        reasons = joined(rule_of(item) for item in error.errors(include_url=False))
        raise OptionError(f"{label} is {json.dumps(value)}, but {reasons}.", key) from None


#: annotations of counts, whose minimum `check_types` checks, too
Count = Annotated[int, Field(ge=1)]
CountFromZero = Annotated[int, Field(ge=0)]

_MOST_OF_A_LIST = 1 << 16  # longer arrays are weights or images


def check_types(function: Callable[..., Any], arguments: Mapping[str, Any], owner: str = "") -> None:
    """Raise unless the arguments of a function have the types of its annotations.

    NumPy's numbers are accepted, and lists and arrays for tuples. Parameters that are arrays are not checked.

    Args:
        arguments: arguments by name; names that are no parameters are ignored.
        owner: words after the name of an argument, such as " of Conv2d".

    Raises:
        ConfigError: an argument has another type. The message has its name and its value.
    """
    adapters = _adapters(function)
    for name, value in arguments.items():
        given = native(value) if name in adapters else value
        items = _violations(adapters[name], given) if name in adapters else []
        if not items:
            continue
        # If one alternative of a union accepts the value but not one of its items, the user meant this alternative.
        inner = next((item for item in items if item["input"] is not given), None)
        if inner is not None:
            name, value, items = f"{name}[{inner['loc'][-1]!r}]", inner["input"], [inner]
        raise ConfigError(f"{name}{owner} is {shortened(value)}, but {joined(map(rule_of, items))}.")


class Checked(ABC):  # noqa: B024 - its subclasses declare the abstract methods
    """Base of classes that users derive from, such as `Layer`.

    Constructors of hpctrain's subclasses check their arguments. Public methods of user classes raise an error unless their
    results have the types that the class in hpctrain declares.
    """

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        is_ours = cls.__module__.startswith("hpctrain.")
        for name, method in [item for item in vars(cls).items() if inspect.isfunction(item[1])]:
            if is_ours and name == "__init__":
                setattr(cls, name, _with_checked_arguments(method, f" of {cls.__name__}"))
            elif is_ours and name == "__post_init__":  # of a dataclass, whose constructor does not exist yet
                setattr(cls, name, _after_checked_fields(method))
            elif not is_ours and not name.startswith("_"):
                bases = (base for base in cls.__mro__[1:] if base.__module__.startswith("hpctrain."))
                declared = [vars(base)[name] for base in bases if inspect.isfunction(vars(base).get(name))]
                if declared:
                    setattr(cls, name, _with_checked_result(cls, method, declared[-1]))

    def __post_init__(self) -> None:  # of dataclasses without rules of their own
        check_types(type(self), vars(self), f" of {type(self).__name__}")


def _after_checked_fields(method: Callable[[Any], None]) -> Callable[[Any], None]:
    @wraps(method)
    def checked(self: Any) -> None:
        Checked.__post_init__(self)
        method(self)

    return checked


def _with_checked_arguments(constructor: Callable[..., None], owner: str) -> Callable[..., None]:
    names = list(inspect.signature(constructor).parameters)[1:]

    @wraps(constructor)
    def checked(self: Any, *arguments: Any, **keywords: Any) -> None:
        check_types(constructor, {**dict(zip(names, arguments, strict=False)), **keywords}, owner)
        constructor(self, *arguments, **keywords)

    return checked


def _with_checked_result(cls: type, method: Callable[..., Any], declared: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of a user class that raises a ConfigError unless its result has the type that hpctrain declares."""

    @wraps(method)
    def checked(*arguments: Any, **keywords: Any) -> Any:
        result = method(*arguments, **keywords)
        adapter = _adapters(declared).get("return")
        if adapter is not None and _violations(adapter, native(result)):
            summary = (declared.__doc__ or "Return its result").partition(".")[0]
            wanted = "None" if _types(declared)["return"] is type(None) else summary.removeprefix("Return ")
            shown = " ".join(shortened(result).split())
            raise ConfigError(f"{user_code.place(cls, declared.__name__)} returns {shown}, but must return {wanted}.")
        return result

    return checked


@cache
def _adapters(function: Callable[..., Any]) -> dict[str, TypeAdapter[Any]]:
    """Return the strict validators of a function's annotations, without those that accept anything."""
    names = {*inspect.signature(function).parameters, "return"}
    adapters = {name: _adapter(annotation) for name, annotation in _types(function).items() if name in names}
    return {name: adapter for name, adapter in adapters.items() if adapter is not None}


@cache
def _adapter(annotation: Any) -> TypeAdapter[Any] | None:
    """Return the strict validator of an annotation; None for arrays and types that pydantic does not know."""
    if annotation is Any or getattr(annotation, "__module__", None) == "numpy":
        return None
    try:
        if is_dataclass(annotation):  # pydantic accepts no `config` here
            return TypeAdapter(Annotated[annotation, InstanceOf()])
        return TypeAdapter(annotation, config=_STRICT)
    except PydanticUserError:
        return None


def _violations(adapter: TypeAdapter[Any], value: Any) -> list[Any]:
    """Return pydantic's errors for a value; empty if it is legal."""
    try:
        adapter.validate_python(value)
    except ValidationError as error:
        return list(error.errors(include_url=False))
    return []


def native(value: Any) -> Any:
    """Return a value with Python's numbers in place of NumPy's, and tuples in place of lists and short arrays."""
    if type(value).__module__ == "numpy" and getattr(value, "ndim", 2) < 2 and value.size <= _MOST_OF_A_LIST:
        value = value.tolist()
    if isinstance(value, list | tuple):
        return tuple(map(native, value))
    return {key: native(item) for key, item in value.items()} if isinstance(value, Mapping) else value


def unknown(kind: str, name: str, names: Iterable[str]) -> ConfigError:
    """Return the error for a name that is not in `names`. It says whether a file of code, a key or a similar name is meant."""
    if name.endswith(".py"):
        return ConfigError(user_code.unnamed(name))
    keys = [key for key, words in SYNONYMS.items() if "." in key and name.lower().replace("-", "_") in words]
    if keys and nearest(name, names, MISSPELT) is None:
        return ConfigError(f'There is no {kind} "{name}"; the key {keys[0]} sets it.')
    return ConfigError(f'There is no {kind} "{name}"; {choices(name, names)}.')


def _article(noun: str) -> str:
    return "an" if noun[0] in "aeiou" else "a"


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
