"""SiteJob scripts from one set of templates, a site's profile and a job."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from hpctrain.core.errors import ConfigError
from hpctrain.core.text import escaped, forbidden, shell_word, shortened
from hpctrain.site.job import SiteJob
from hpctrain.site.profile_files import Site

_TEMPLATES = {"slurm": "slurm.j2", "pbs": "pbs.j2", "hostfile": "mpiexec.j2", "local": "mpiexec.j2"}
#: of a script's file name
ENDINGS = {"slurm": ".sbatch", "pbs": ".pbs", "hostfile": ".sh", "local": ".sh"}
_COMMENT_AT = 32
_COLUMNS = 130

#: in scripts that are shipped, for people to replace
ACCOUNT = "PROJECT"


def render(site: Site, job: SiteJob) -> str:
    """Return the script, for bash, without trailing blanks and with a newline at its end.

    Raises:
        ConfigError: a text of the site or the job has a forbidden character, which may end or reverse a line.
    """
    for name, text in (("site", site.name), *_texts("", vars(job)), *_texts("profile.", site.profile.model_dump())):
        character = forbidden(text)
        if character is not None:
            raise ConfigError(f"{name} is {shortened(text)}, which has {character} and cannot stand in a job script; remove it.")
    template = _environment().get_template(_TEMPLATES[site.profile.scheduler])

    def line(setting: str, comment: str, edit: bool = True) -> str:
        return _line(setting, comment, edit=edit and job.train is None)

    account = ACCOUNT if _needs_account(site) else ""
    text = template.render(site=site.name, profile=site.profile, job=job, account=account, line=line)
    return "\n".join(each.rstrip() for each in text.strip().split("\n")) + "\n"


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("hpctrain.site"),
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {"quote": shell_word, "directive": _directive, "comment": _comment}
    return environment


def _texts(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of all texts inside a value, including keys."""
    if isinstance(value, str):
        yield name.removesuffix("."), value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield f"{name}{escaped(key)}", str(key)
            yield from _texts(f"{name}{escaped(key)}.", item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(name, item)


def _needs_account(site: Site) -> bool:
    return site.profile.account is not None and site.profile.account.needed


def _directive(text: str) -> str:
    """Return a text quoted as one word of an #SBATCH line. Slurm reads quotes as a shell does, but removes backslashes in them.

    Raises:
        ConfigError: the text has a backslash, which in a path also disables Slurm's replacements, such as that of %j.
    """
    if "\\" in text:
        raise ConfigError(f"output is {shortened(text)}, but Slurm takes backslashes away; choose a directory without one.")
    return shell_word(text)


def _comment(text: str) -> str:
    """Lines of comment."""
    return "\n".join(textwrap.wrap(text, _COLUMNS, initial_indent="# ", subsequent_indent="# ", break_long_words=False))


def _line(setting: str, comment: str, *, edit: bool) -> str:
    """A setting with its comment behind it, above it where both are too long; those that a person is to edit are marked."""
    words = " ".join(word for word in ("<--" if edit else "", comment) if word)
    line = f"{setting:{_COMMENT_AT}}  # {words}" if words else setting
    return line if len(line) <= _COLUMNS else f"{_comment(words)}\n{setting}"
