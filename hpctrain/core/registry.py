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
import operator
import os
import pkgutil
import re
import sys
from abc import ABCMeta
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import cache, partial, wraps
from pathlib import Path
from types import UnionType
from typing import Any, Generic, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from pydantic import PydanticUserError, TypeAdapter, ValidationError

from hpctrain.core import user_code
from hpctrain.core.answers import rule_of
from hpctrain.core.errors import ConfigError, HpctrainError, OptionError
from hpctrain.core.text import MISSPELT, SYNONYMS, choices, joined, nearest, shortened

T = TypeVar("T")


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
        """Return hpctrain's own names in alphabetical order. Imports the package but none of its modules."""
        package = importlib.import_module(self.package)
        if not hasattr(package, "__path__"):
            return tuple(sorted(self._classes()))
        modules = (module.name for module in pkgutil.iter_modules(package.__path__))
        return tuple(sorted(name for name in modules if name != "base" and not name.startswith("_")))

    def offers(self) -> tuple[user_code.Offer, ...]:
        """Return the names that installed packages offer. Imports none of the packages."""
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

        An HpctrainError passes; if a call in user code raised it, its message also names the line of this call. Bugs of hpctrain
        pass unchanged.

        Raises:
            ConfigError: user code raised an exception. A ValueError raised by a statement of user code refuses a value.
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
        entry: class or function.
        label: name of the entry in messages, such as 'optimiser "sgd"'.
        reserved: keywords that the program sets.

    Raises:
        OptionError: an option is unknown, missing, reserved, of the wrong type, or refused by `Options`.
    """
    options_type = options_of(entry)
    if options_type is entry:
        return _converted_options(entry, label, options, reserved)
    given = {key for key in parameters_of(entry) if key != "options"} - set(parameters_of(options_type))
    return {"options": options_type(**_converted_options(options_type, label, options, {*given, *reserved}))}


def options_of(entry: Callable[..., Any]) -> Callable[..., Any]:
    """Return the callable whose keywords are the options: the dataclass `entry.Options`, or `entry` if it has none."""
    options: Callable[..., Any] | None = getattr(entry, "Options", None)
    return entry if options is None or "options" not in parameters_of(entry) else options


def _converted_options(
    entry: Callable[..., Any], label: str, options: Mapping[str, Any], reserved: Collection[str]
) -> dict[str, Any]:
    """Return the options as keywords of `entry`, converted according to its signature."""
    parameters = parameters_of(entry)
    known = tuple(key for key in parameters if key not in reserved)
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in inspect.signature(entry).parameters.values())
    for key in options:
        if key in reserved:
            raise OptionError(f'Option "{key}" of {label} is set by the program; remove it.', key)
        if key not in parameters and not open_ended:
            raise OptionError.of_parts(f'{_capital(label)} has no option "{key}"', choices(key, known), key, known)
    for key in known:
        if key not in options and parameters[key].default is inspect.Parameter.empty:
            raise OptionError.of_parts(f'{_capital(label)} needs the option "{key}"', "", key)
    return {
        key: _converted(value, parameters[key].annotation, f'Option "{key}" of {label}', key) if key in parameters else value
        for key, value in options.items()
    }


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
        return get_type_hints(annotated)
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


def check_counts(*optional: str, **counts: tuple[Any, int]) -> None:
    """Raise unless each argument is an integer of at least its minimum. Integers of NumPy are accepted.

    Args:
        optional: names of the arguments that may be None.
        counts: pairs (value, minimum) by the name of the argument.

    Raises:
        ConfigError: an argument is not. The message has its name and its value.
    """
    for name, (value, least) in counts.items():
        if value is None and name in optional:
            continue
        try:
            if not isinstance(value, bool) and operator.index(value) >= least:
                continue
        except TypeError:  # no integer, or an array of several
            pass
        raise ConfigError(f"{name} is {value!r}, but must be an integer of at least {least}.")


#: words for a type in messages of `check_types`: one value, and several
_TYPE_WORDS: dict[object, tuple[str, str]] = {
    str: ("a string", "strings"),
    Path: ("a path", "paths"),
    os.PathLike: ("a path", "paths"),
    int: ("an integer", "integers"),
    float: ("a number", "numbers"),
    bool: ("True or False", "truth values"),
    type(None): ("None", "None"),
}


def check_types(function: Callable[..., Any], arguments: Mapping[str, Any], **legal: str) -> None:
    """Raise unless the arguments of a function have the types of its annotations.

    NumPy's numbers are accepted, and any sequence for a tuple. Arrays and unknown types are not checked.

    Args:
        arguments: arguments by name; names that are no parameters are ignored.
        legal: legal value by name, for the message.

    Raises:
        ConfigError: an argument has another type. The message has its name and its value.
    """
    types, parameters = _types(function), inspect.signature(function).parameters
    for name, value in arguments.items():
        expected = types.get(name, Any)
        if name in parameters and not _test(expected)(value):
            raise _wrong_type(name, value, expected, legal.get(name))


class CheckedArguments(ABCMeta):
    """Metaclass of public base classes, such as `Layer`: constructors of hpctrain's subclasses check their arguments.

    Generated constructors of dataclasses are included. Constructors of user classes are not checked, but the constructors of
    hpctrain that they call are. Public methods of user classes raise an error unless their results have the types that the base
    class in hpctrain declares.
    """

    def __init__(cls, name: str, bases: tuple[type, ...], attributes: dict[str, Any], **keywords: Any) -> None:
        super().__init__(name, bases, attributes, **keywords)
        for key, value in attributes.items():
            if inspect.isfunction(value) and (key == "__init__" or not key.startswith("_")):
                setattr(cls, key, value)

    # `dataclass` assigns its generated constructor after the class exists.
    def __setattr__(cls, name: str, value: Any) -> None:
        if cls.__module__.startswith("hpctrain."):
            value = _with_checked_types(cls, value) if name == "__init__" else value
        elif inspect.isfunction(value) and not name.startswith("_"):
            inherited = [vars(base).get(name) for base in cls.__mro__[1:] if base.__module__.startswith("hpctrain.")]
            declared = [method for method in inherited if inspect.isfunction(method)]
            value = _with_checked_result(cls, value, declared[-1]) if declared else value
        super().__setattr__(name, value)


def _with_checked_result(cls: type, method: Callable[..., Any], declared: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of a user class that raises a ConfigError unless its result has the type that hpctrain declares."""
    expected: list[tuple[Any, frozenset[type]]] = []  # read at the first call, when all names are defined

    @wraps(method)
    def checked(*arguments: Any, **keywords: Any) -> Any:
        result = method(*arguments, **keywords)
        if not expected:
            annotation = _types(declared).get("return", Any)
            expected.append((annotation, _usual_types(annotation)))
        annotation, usual = expected[0]
        if type(result) not in usual and not _test(annotation)(result):
            summary = (declared.__doc__ or "Return its result").partition(".")[0]
            wanted = "None" if annotation is type(None) else summary.removeprefix("Return ")
            shown = " ".join(shortened(result).split())
            raise ConfigError(f"{user_code.place(cls, declared.__name__)} returns {shown}, but must return {wanted}.")
        return result

    return checked


def _with_checked_types(cls: type, constructor: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor that raises unless its arguments have the annotated types of its parameters."""
    parameters = dict(inspect.signature(constructor).parameters)
    del parameters[next(iter(parameters))]  # self
    by_place = [name for name, parameter in parameters.items() if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    types: dict[str, Any] = {}
    # A network has hundreds of layers, so most arguments must pass by a comparison of their type alone.
    usual: dict[str, frozenset[type]] = {}

    @wraps(constructor)
    def checked(self: Any, *arguments: Any, **keywords: Any) -> None:
        if parameters and not usual:  # at the first call, when a dataclass is complete
            types.update(_types(cls if is_dataclass(cls) else constructor))
            usual.update({name: _usual_types(types.get(name, Any)) for name in (*parameters, *types)})
        for name, value in (*zip(by_place, arguments, strict=False), *keywords.items()):
            if name in types and type(value) not in usual[name] and not _test(types[name])(value):
                raise _wrong_type(name, value, types[name], owner=f" of {cls.__name__}")
        constructor(self, *arguments, **keywords)

    return checked


def _usual_types(expected: Any) -> frozenset[type]:
    """Return the plain types all of whose values are legal for an annotation. Other types need `_test`."""
    members = _members(expected)
    plain = {kind for kind in members if kind in (int, float, bool, str, type(None))}
    return frozenset(plain | ({int} if float in plain else set()))


def _wrong_type(name: str, value: Any, expected: Any, legal: str | None = None, *, owner: str = "") -> ConfigError:
    """Return the error for an argument of a wrong type; `owner` follows its name, as in "kernel of Conv2d"."""
    parameter, (name, value, expected) = name, _wrong_item(name, value, expected)
    kind = get_origin(_members(expected)[0]) or _members(expected)[0]
    advice = "" if legal is None or name != parameter else f"; use {legal}"
    if inspect.isclass(value) and inspect.isclass(kind) and issubclass(value, kind):
        advice = f"; call the class, as in {value.__name__}()"
    return ConfigError(f"{name}{owner} is {shortened(value)}, but must be {_words(expected)}{advice}.")


def _wrong_item(name: str, value: Any, expected: Any) -> tuple[str, Any, Any]:
    """Return (name, value, expected type) of the first wrong item of a mapping or a list; the arguments if there is none."""
    for member in _members(expected):
        origin, kind = get_origin(member), (get_args(member) or (Any,))[-1]  # of the values
        if origin is Mapping and isinstance(value, Mapping):
            items = list(value.items())
        elif origin is Sequence and isinstance(value, list | tuple):
            items = list(enumerate(value))
        else:
            continue
        fits = _test(kind)
        if origin is Mapping or (inspect.isclass(kind) and kind not in _TYPE_WORDS):
            wrong = ((f"{name}[{key!r}]", item, kind) for key, item in items if not fits(item))
            return next(wrong, (name, value, expected))
    return name, value, expected


def _members(expected: Any) -> tuple[Any, ...]:
    """Return the types of a union, or the type itself. A type that another one includes is left out."""
    if get_origin(expected) not in (Union, UnionType):
        return (expected,)
    members = get_args(expected)
    return tuple(member for member in members if not (member is int and float in members))


@cache
def _test(expected: Any) -> Callable[[Any], bool]:
    """Return a function of a value that returns whether the value is legal for an annotation."""
    members = _members(expected)
    if len(members) > 1:
        tests = [_test(member) for member in members]
        return lambda value: any(test(value) for test in tests)
    origin, inner = get_origin(expected) or expected, get_args(expected)
    if expected is Any:
        return lambda value: True
    if expected in (int, float):
        return partial(_is_number, kind=expected)
    if expected is bool:
        return _is_bool
    if expected is Path:
        return lambda value: isinstance(value, os.PathLike)
    if origin is Literal:
        return lambda value: any(type(value) is type(legal) and value == legal for legal in inner)
    if origin in (tuple, Sequence):
        kinds = inner if origin is tuple else (*inner, ...)
        return partial(_is_sequence, kinds=tuple(kind if kind is ... else _test(kind) for kind in kinds))
    if origin is Mapping and inner:
        of_key, of_value = _test(inner[0]), _test(inner[1])
        return lambda value: isinstance(value, Mapping) and all(of_key(key) and of_value(item) for key, item in value.items())
    if origin is Callable:
        return callable
    is_array = getattr(expected, "__module__", None) == "numpy"
    if is_array or not isinstance(origin, type) or getattr(origin, "_is_protocol", False):
        return lambda value: True
    return lambda value: isinstance(value, origin)


def _is_number(value: Any, kind: type[int] | type[float]) -> bool:
    if type(value) in (kind, int):
        return True
    if _is_bool(value) or isinstance(value, str | bytes):
        return False
    try:
        operator.index(value) if kind is int else float(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return True


def _is_sequence(value: Any, kinds: tuple[Any, ...]) -> bool:
    """Return whether a value is a sequence whose items pass the tests `kinds`; (test, ...) tests every item."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        return False
    if not isinstance(value, Sized):  # an iterator, which a test would exhaust
        return True
    if kinds[-1] is ...:
        return all(map(kinds[0], value))
    return len(value) == len(kinds) and all(test(item) for test, item in zip(kinds, value, strict=True))


def _is_bool(value: Any) -> bool:
    return type(value).__name__ in ("bool", "bool_")  # NumPy's types have these names


def _words(expected: Any, several: bool = False) -> str:
    """Return a type as words, such as "a path or None"."""
    members = _members(expected)
    if any((get_origin(member) or member) in (Path, os.PathLike) for member in members):
        members = tuple(member for member in members if member is not str)  # a string is a path, too
    if len(members) > 1:
        *first, last = dict.fromkeys(_words(member, several) for member in members)
        return f"{', '.join(first)} or {last}" if first else last
    (kind,), origin = members, get_origin(members[0]) or members[0]
    if origin in _TYPE_WORDS:
        return _TYPE_WORDS[origin][several]
    if origin is Literal:
        return " or ".join(map(repr, get_args(kind)))
    if origin is tuple and get_args(kind)[-1] is not ...:
        return f"{'lists of ' if several else ''}{len(get_args(kind))} {_words(get_args(kind)[0], several=True)}"
    if origin in (tuple, Sequence):
        return f"{'lists' if several else 'a list'} of {_words(get_args(kind)[0], several=True)}"
    if origin is Mapping:
        of = "" if Any in get_args(kind)[1:] else " of " + " to ".join(_words(inner, several=True) for inner in get_args(kind))
        return f"{'mappings' if several else 'a mapping'}{of}"
    if origin is Callable:
        return "functions" if several else "a function"
    name = origin.__name__.lower() if origin.__name__.istitle() else origin.__name__
    return f"{name}s" if several else f"{_article(name)} {name}"


def unknown(kind: str, name: str, names: Iterable[str]) -> ConfigError:
    """Return the error for a name that is not in `names`: a file without a name in it, a key of the configuration, or a typo."""
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
