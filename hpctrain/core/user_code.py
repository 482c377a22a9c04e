"""User code that a configuration names: `module:Name`, `path/to/file.py:Name`, or a name offered by an installed package.

Only code that a configuration names is imported. A module is searched first on Python's path (installed packages), then in the
working directory, then next to the configuration file; a file is searched in the working directory, then next to the
configuration file. User code therefore never hides code that hpctrain imports itself.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import site
import sys
import sysconfig
import traceback
import zlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hpctrain.core.errors import ConfigError, HpctrainError
from hpctrain.core.files import read_bytes
from hpctrain.core.text import choices, nearest

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints

_REFERENCE = re.compile(r"(?P<place>[^:]+):(?P<name>[A-Za-z_]\w*)")
#: Python's error for arguments that a function does not have
_WRONG_CALL = re.compile(r"([A-Za-z_][\w.]*)\(\) (?:missing|takes|got)")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_MOST_CODE_BYTES = 1 << 28  # large enough for compiled modules
_NOT_THE_USERS = ("<frozen ", str(Path(importlib.__file__).parents[1]))
_OF_PACKAGES = ("/site-packages/", "/dist-packages/")
_PACKAGE = Path(__file__).parents[1]
#: prefix of the names of modules that were loaded from the file of a reference
_OF_FILES = "_hpctrain_"
#: package of instruments of hpctrain's own tests
_INSTRUMENTS = "hpctrain_testing"
#: names of the program itself as a module
_NO_NAMES = ("__main__", "__mp_main__")

#: directory of the configuration file that this process has read last; empty before
_config_folders: list[Path] = []
#: reference -> file of its code
_files: dict[str, Path] = {}


@dataclass(frozen=True)
class Offer:
    """Entry point of an installed package: a name for a class or function.

    Attributes:
        reference: module and class, "module:Name".
        package: name and version of the package.
    """

    name: str
    reference: str
    package: str


def is_reference(name: str) -> bool:
    """Return whether a name is a reference, `module:Name` or `file.py:Name`, and not a registered name."""
    return ":" in name


def search_next_to(file: Path) -> None:
    """Also search for modules and files in the directory of this configuration file, instead of that of an earlier call."""
    _config_folders[:] = [file.parent]


def folder_with(path: Path) -> Path | None:
    """Return the directory of the configuration file, or its parent, in which `path` is a file; None if neither has the file."""
    folders = (folder for known in _config_folders for folder in (known.resolve(), known.resolve().parent))
    return next((folder for folder in folders if (folder / path).is_file()), None)


def load(reference: str) -> Any:
    """Return the object of a reference, whose module is imported once per process.

    Raises:
        ConfigError: the module, file or name does not exist, or importing the module raised an error.
    """
    match = _REFERENCE.fullmatch(reference)
    if match is None:
        raise ConfigError(f'"{reference}" is not a reference to code; write module:Name or path/to/file.py:Name.')
    place, name = match["place"], match["name"]
    module = _from_file(reference, place) if place.endswith(".py") else _from_module(reference, place)
    if module.__file__ is not None:
        _files[reference] = Path(module.__file__)
    if not hasattr(module, name):
        public = [
            key for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__ and key[0] != "_"
        ]
        shown = place if place.endswith(".py") else f"The module {place} ({module.__file__})"
        raise ConfigError(f'{shown} defines no "{name}"; {choices(name, public)}.')
    return getattr(module, name)


def digests() -> dict[str, str]:
    """Return reference -> "FILE sha256 DIGEST" for the code that this process has loaded, in alphabetical order."""
    return {
        reference: f"{path.name} sha256 {hashlib.sha256(read_bytes(path, _MOST_CODE_BYTES)).hexdigest()}"
        for reference, path in sorted(_files.items())
    }


def modules() -> dict[str, str]:
    """Return the crc32, in hexadecimal, of the source file of each module of the user that this process has loaded, by its name.

    The result has neither Python's own modules, installed packages, hpctrain and its test instruments, nor files of references,
    whose modules have no names of their own; see `digests`.
    """
    of_python = (sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib"))
    places = {*of_python, *site.getsitepackages(), site.getusersitepackages(), str(_PACKAGE)}
    others = tuple(f"{place}{os.sep}" for place in places)
    files = {name: getattr(module, "__file__", None) for name, module in tuple(sys.modules.items())}
    return {
        name: f"{zlib.crc32(read_bytes(file)):08x}"
        for name, file in sorted(files.items())
        if file is not None and file.endswith(".py") and not file.startswith(others) and name not in _NO_NAMES
        if not name.startswith((_OF_FILES, _INSTRUMENTS)) and Path(file).is_file()
    }


def offers(group: str) -> tuple[Offer, ...]:
    """Return the offers of installed packages in a group of entry points, sorted by name. The packages are not imported."""
    return tuple(
        dict.fromkeys(
            Offer(point.name, point.value, "" if point.dist is None else f"{point.dist.name} {point.dist.version}")
            for point in sorted(_entry_points(tuple(sys.path)).select(group=group))
        )
    )


@cache
def _entry_points(path: tuple[str, ...]) -> EntryPoints:
    """Return the entry points of all packages on the import path, cached: each package has a file, which is read only once."""
    from importlib.metadata import entry_points  # loads more slowly than the rest of this module

    found: EntryPoints = entry_points()  # type: ignore[assignment]  # until 3.11, the annotation has an older type, too
    return found


def unnamed(file: str) -> str:
    """Return the error message for a file of code without the name of an object in it. The file is not imported."""
    path = _existing(file)
    if path is None:
        return f"There is no file {file} in {_places()}{_nearest_file(file)}; write it as path/to/file.py:NAME."
    try:
        nodes = ast.parse(read_bytes(path, _MOST_CODE_BYTES)).body
    except (SyntaxError, ValueError, OSError):
        nodes = []
    kinds = (ast.FunctionDef, ast.ClassDef)
    names = [node.name for node in nodes if isinstance(node, kinds) and not node.name.startswith("_")]
    defined = f"one of its functions and classes: {', '.join(names)}" if names else "one of its functions or classes"
    return f'"{file}" is a file of code; write {file}:NAME, with {defined}.'


def _existing(file: str) -> Path | None:
    return next((path for path in (root / file for root in (Path(), *_config_folders)) if path.is_file()), None)


def _nearest_file(file: str) -> str:
    """Return "; the nearest is PATH" for a missing file of code; empty if no file of its directory is similar."""
    given = Path(file)
    names = [found.name for root in (Path(), *_config_folders) for found in (root / given.parent).glob("*.py")]
    near = nearest(given.name, names)
    return "" if near is None else f"; the nearest is {given.with_name(near)}"


def _from_module(reference: str, name: str) -> ModuleType:
    if not _MODULE.fullmatch(name):
        raise ConfigError(
            f'"{reference}" is not a reference to a module; write module:Name, or the path of a file ending in .py.'
        )
    _extend_path(Path(), *_config_folders)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _failed(reference, error) from error
        raise ConfigError(
            f'There is no module "{name}" for "{reference}", neither installed nor in {_places()}; '
            f"for a file, write its path, as in {name.replace('.', '/')}.py:{reference.rpartition(':')[2]}."
        ) from None
    except (Exception, SystemExit) as error:
        raise _failed(reference, error) from error


def _from_file(reference: str, place: str) -> ModuleType:
    path = _existing(place)
    if path is None:
        raise ConfigError(f'There is no file {place} for "{reference}" in {_places()}{_nearest_file(place)}.')
    path = path.resolve()
    # A unique module name: the stem of the file may be the name of an installed package.
    name = f"{_OF_FILES}{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    _extend_path(path.parent)  # for modules next to the file
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _failed(reference, error) from error
    return module


def _extend_path(*directories: Path) -> None:
    """Append directories to Python's path, at the end, so that they hide no installed modules."""
    for directory in (str(directory.resolve()) for directory in directories):
        if directory not in sys.path:
            sys.path.append(directory)
    importlib.invalidate_caches()


def _places() -> str:
    others = [
        f" or in {directory}, next to the configuration" for directory in _config_folders if directory.resolve() != Path.cwd()
    ]
    return "".join(["the working directory", *others])


def _failed(reference: str, error: BaseException) -> ConfigError:
    """Return the error for a failed import: the kind of the error, its message, and the line of user code."""
    return ConfigError(f'The code of "{reference}" cannot be imported: {_kind_and_words(error)} ({_line(error)}).')


def fault(error: Exception, subject: str = "") -> ConfigError | None:
    """Return the error to report for an exception that user code caused; None for other exceptions.

    The first line of the message is a sentence with the kind of the exception, its message, and the line of user code. The
    following lines begin with blanks and are the frames of user code, as in a traceback.

    The result is also None if no reference to user code has been loaded, or if a frame is of the program that runs (a user's
    script), because its traceback is more useful.

    Args:
        subject: subject of the sentence; "": the file of the code.
    """
    if not _files or isinstance(error, (HpctrainError, MemoryError, BrokenPipeError)):
        return None
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_of_user(frame.filename)]
    if any(Path(frame.filename).resolve() == Path(sys.argv[0]).resolve() for frame in frames):
        return None
    called = _called_wrongly(error) if isinstance(error, TypeError) and not frames else None
    if not frames and called is None:
        return None
    file, line = called or (frames[-1].filename, frames[-1].lineno)
    subject = subject or f"The code of {Path(file).name}"
    sentence = f"{subject} fails: {_kind_and_words(error)} ({file}, line {line})."
    return ConfigError("\n".join([sentence, *"".join(traceback.format_list(frames)).splitlines()]))


def raises_itself(error: BaseException) -> bool:
    """Return whether a `raise` statement of user code raised an error, or no frame is of user code."""
    frames = traceback.extract_tb(error.__traceback__)
    if not any(_is_of_user(frame.filename) for frame in frames):
        return True
    return _is_of_user(frames[-1].filename) and (frames[-1].line or "").startswith("raise")


def wrong_call(error: Exception) -> str | None:
    """Return the sentence for a call in user code with arguments that the function does not have; None for other errors."""
    if not isinstance(error, TypeError) or _WRONG_CALL.match(str(error)) is None:
        return None
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{_kind_and_words(error)} ({frame.filename}, line {frame.lineno})." if _is_of_user(frame.filename) else None


def place(kind: type, method: str) -> str:
    """Return the names of a class and its method, and the file and line of the method if it is a function."""
    code = getattr(inspect.unwrap(getattr(kind, method)), "__code__", None)  # a callable object has none
    return f"{kind.__name__}.{method}" + ("" if code is None else f" ({code.co_filename}, line {code.co_firstlineno})")


def read_only(array: Any) -> Any:
    """Return a view of an array for user code, to which NumPy refuses to write."""
    view = array.view()
    view.flags.writeable = False
    return view


def calling_line(error: BaseException) -> str:
    """Return the file and line of the call in user code that raised an error; empty if there is no such call."""
    frames = traceback.extract_tb(error.__traceback__)
    of_user = [frame for frame in frames if _is_of_user(frame.filename)]
    return f"{of_user[-1].filename}, line {of_user[-1].lineno}" if of_user and of_user[-1] is not frames[-1] else ""


def _is_of_user(file: str) -> bool:
    """Return whether a file contains user code: a reference loaded it, or it belongs neither to Python nor to a package."""
    if Path(file) in _files.values():
        return True
    is_of_package = file.startswith((*_NOT_THE_USERS, str(_PACKAGE))) or any(folder in file for folder in _OF_PACKAGES)
    return not is_of_package and Path(file).is_file()


def _called_wrongly(error: TypeError) -> tuple[str, int] | None:
    """Return (file, line) of the user's function that was called with wrong arguments; None for other functions."""
    match = _WRONG_CALL.match(str(error))
    for module in tuple(sys.modules.values()) if match else ():
        if not _is_of_user(getattr(module, "__file__", None) or ""):
            continue
        called: Any = module
        for name in match[1].split(".") if match else ():
            called = getattr(called, name, None)
        code = getattr(inspect.unwrap(called), "__code__", None)
        if code is not None and _is_of_user(code.co_filename):
            return code.co_filename, code.co_firstlineno
    return None


def _kind_and_words(error: BaseException) -> str:
    words = " ".join(str(error).split()).rstrip(".")
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def _line(error: BaseException) -> str:
    """Return the file and line of a syntax error, else of the innermost call in user code."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{error.filename}, line {error.lineno}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) != Path(__file__)]
    frame = ([frame for frame in frames if _is_of_user(frame.filename)] or frames)[-1]
    return f"{frame.filename}, line {frame.lineno}"
