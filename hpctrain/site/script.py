"""SiteJob scripts from one set of templates, a site's profile and a job."""

from __future__ import annotations

import re
import textwrap

from jinja2 import Environment, PackageLoader, StrictUndefined

from hpctrain.site.job import SiteJob
from hpctrain.site.profile_files import Site

_TEMPLATES = {"slurm": "slurm.j2", "pbs": "pbs.j2", "hostfile": "mpiexec.j2", "local": "mpiexec.j2"}
#: of a script's file name
ENDINGS = {"slurm": ".sbatch", "pbs": ".pbs", "hostfile": ".sh", "local": ".sh"}
_COMMENT_AT = 32
_COLUMNS = 130
# Commas make some shell readers think of lists, so that a word with one is quoted.
_PLAIN_WORD = re.compile(r"[\w@%+=:./-]+", re.ASCII)


#: in scripts that are shipped, for people to replace
ACCOUNT = "PROJECT"


def render(site: Site, job: SiteJob) -> str:
    """The script, for bash; it ends with a newline and has no trailing blanks."""
    environment = Environment(
        loader=PackageLoader("hpctrain.site"),
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {"quote": _quote, "comment": _comment}
    environment.globals["line"] = lambda setting, comment, edit=True: _line(setting, comment, edit=edit and job.train is None)
    template = environment.get_template(_TEMPLATES[site.profile.scheduler])
    text = template.render(site=site.name, profile=site.profile, job=job, account=ACCOUNT if _needs_account(site) else "")
    return "\n".join(line.rstrip() for line in text.strip().splitlines()) + "\n"


def _needs_account(site: Site) -> bool:
    return site.profile.account is not None and site.profile.account.needed


def _quote(text: str) -> str:
    """A text as one word of the shell, which fills in nothing in it."""
    if not text:
        return '""'
    return text if _PLAIN_WORD.fullmatch(text) else "'" + text.replace("'", "'\"'\"'") + "'"


def _comment(text: str) -> str:
    """Lines of comment."""
    return "\n".join(textwrap.wrap(text, _COLUMNS, initial_indent="# ", subsequent_indent="# ", break_long_words=False))


def _line(setting: str, comment: str, *, edit: bool) -> str:
    """A setting with its comment behind it, above it where both are too long; those that a person is to edit are marked."""
    words = " ".join(word for word in ("<--" if edit else "", comment) if word)
    line = f"{setting:{_COMMENT_AT}}  # {words}" if words else setting
    return line if len(line) <= _COLUMNS else f"{_comment(words)}\n{setting}"
