"""Site profiles by name: those that are installed with hpctrain, and a user's own, which may extend one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hpctrain.core.yaml_source import KeyPath, Source, read_yaml
from hpctrain.core.errors import ConfigError
from hpctrain.core.files import TEXT_BYTES, read_text
from hpctrain.nearest import choices
from hpctrain.paths import user_directory
from hpctrain.site.profile import SiteProfile
from hpctrain.site.profile_faults import faults

# A link to the folder at the top of the repository; a wheel holds the files themselves.
INSTALLED = Path(__file__).parents[1] / "examples" / "jobs" / "sites"
_EXTENDS = "extends"


@dataclass(frozen=True)
class Site:
    """A profile with its name and the file that it is from."""

    name: str
    path: Path
    profile: SiteProfile

    @property
    def is_installed(self) -> bool:
        """Whether it came with hpctrain."""
        return self.path.parent == INSTALLED


def own_directory(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the directory of a user's own profiles, hpctrain/sites in $XDG_CONFIG_HOME or ~/.config. None without a home."""
    directory = user_directory("XDG_CONFIG_HOME", ".config", environ)
    return None if directory is None else directory / "sites"


def where_own(environ: Mapping[str, str] = os.environ) -> str:
    """Return the directory of a user's own profiles, for messages."""
    directory = own_directory(environ)
    return "$XDG_CONFIG_HOME/hpctrain/sites" if directory is None else str(directory)


def paths(environ: Mapping[str, str] = os.environ) -> dict[str, Path]:
    """The file of each profile by its name, in the order of names; a user's own one hides an installed one of that name."""
    folders = [folder for folder in (INSTALLED, own_directory(environ)) if folder is not None]
    by_name = {path.stem: path for folder in folders for path in folder.glob("*.yaml")}
    return {name: by_name[name] for name in sorted(by_name)}


def read(name: str, environ: Mapping[str, str] = os.environ) -> Site:
    """The profile of that name, with what it extends.

    Raises:
        ConfigError: there is none; else one sentence for each fault, with its file and line.
    """
    known = paths(environ)
    if name not in known:
        raise ConfigError(f"There is no site {name!r}; {choices(name, known)}. Profiles of your own lie in {where_own(environ)}.")
    data, places = _extended(known[name], environ, ())
    source = Source(str(known[name]), places)
    try:
        return Site(name, known[name], SiteProfile.model_validate(data))
    except ValidationError as error:
        sentences = [str(source.error(path, sentence)) for path, sentence in faults(error)]
    raise ConfigError("\n".join(dict.fromkeys(sentences)))


def _extended(path: Path, environ: Mapping[str, str], below: tuple[Path, ...]) -> tuple[Any, dict[KeyPath, str]]:
    """The data of a file laid over that of the profile which it extends, and the places of both."""
    data, places = _data(path)
    if not isinstance(data, dict) or _EXTENDS not in data:
        return data, places
    base = data.pop(_EXTENDS)
    # A profile that extends its own name means the installed one, which it hides.
    known = {**paths(environ), **({path.stem: INSTALLED / path.name} if path.parent != INSTALLED else {})}
    known = {name: file for name, file in known.items() if file != path and file.exists()}
    place = places.get((_EXTENDS,), str(path))
    if not isinstance(base, str) or base not in known:
        raise ConfigError(f"{place}: extends is {base!r}, but must be the name of a site; {choices(str(base), known)}.")
    if known[base] in below:
        raise ConfigError(f"{place}: extends is {base}, which extends this profile itself; take one of the two out.")
    base_data, base_places = _extended(known[base], environ, (*below, path))
    return _merged(base_data, data), {**base_places, **places}


def _data(path: Path) -> tuple[Any, dict[KeyPath, str]]:
    try:
        return read_yaml(read_text(path, TEXT_BYTES), str(path))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: The byte at {error.start} is not UTF-8; save the file as UTF-8.") from None
    except OSError as error:
        raise ConfigError(f"{path}: The site profile cannot be read: {error.strerror}.") from None


def _merged(base: Any, over: Any) -> Any:
    """Mappings are merged key by key, null takes an entry away, and everything else replaces what was there."""
    if not isinstance(base, Mapping) or not isinstance(over, Mapping):
        return over
    merged = {**base, **{key: _merged(base.get(key), value) for key, value in over.items()}}
    return {key: value for key, value in merged.items() if value is not None or key not in base}
