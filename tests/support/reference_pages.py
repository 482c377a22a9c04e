"""The parts of docs/ that are written by the program: `python -m tests.support.reference_pages` (or `make docs`) writes them.

docs/options.md and docs/commands.md are written as a whole; in docs/config.md the table of keys after its last heading is, and
the findings in docs/doctor.md.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import click
from pydantic_core import PydanticUndefined

from hpctrain.assembly.options import FOLLOWING, Choice, choices
from hpctrain.cli.main import cli
from hpctrain.config.load import known_paths, section_at
from hpctrain.core.answers import show
from hpctrain.core.yaml_source import KeyPath, dotted
from hpctrain.doctor.job import CHECKS, JOB_KINDS
from hpctrain.storage.atomic_write import write_text

_HEAD = """# Commands

The option `--help` of each command prints the same texts. `hpctrain completion bash` prints a script that
enables completion. Start `train`, `eval`, `predict`, `script`, `doctor` and `calibrate` on ranks, as in
`mpiexec -n 4 python -m mpi4py -m hpctrain train ...`. All other commands are one process; `run`, `submit` and `bench scaling`
start the ranks of their jobs.

`make docs` writes this page from the program.
"""


def commands_page() -> str:
    """The whole page."""
    context = click.Context(cli, info_name="hpctrain")
    return "\n".join([_HEAD, *(line for name in cli.list_commands(context) for line in _lines(context, name, "##"))])


def _lines(parent: click.Context, name: str, heading: str) -> Iterator[str]:
    group = parent.command
    assert isinstance(group, click.Group)
    command = group.get_command(parent, name)
    assert command is not None
    context = click.Context(command, info_name=name, parent=parent)
    yield from (f"{heading} {context.command_path}", "")
    arguments = [piece for piece in command.collect_usage_pieces(context) if piece != "[OPTIONS]"]
    if arguments and not isinstance(command, click.Group):
        yield from (f"Arguments: `{' '.join(arguments)}`", "")
    yield from (_escaped(inspect.cleandoc(command.help or "")), "")
    options = [option for option in command.params if isinstance(option, click.Option)]
    if options:
        yield from ("| option | meaning |", "|---|---|", *(_option(option, context) for option in options), "")
    if isinstance(command, click.Group):
        for inner in command.list_commands(context):
            yield from _lines(context, inner, f"{heading}#")


def _option(option: click.Option, context: click.Context) -> str:
    names, meaning = option.get_help_record(context) or ("", "")
    return f"| `{_escaped(names)}` | {_escaped(' '.join(meaning.split()))} |"


def _escaped(text: str) -> str:
    """Words of a help text that Markdown would take for a tag or a column."""
    return text.replace("<", "&lt;").replace("|", "\\|")


DOCS = Path(__file__).parents[2] / "docs"

KEYS_HEADING = "## Every key\n"

FINDINGS_HEADING = "## Every finding\n"

_KINDS = {
    "models": ("Models", "model", "The defaults of these options come from the data or from other keys:"),
    "optimizers": ("Optimisers", "optimizer", "`optimizer.lr`, the base learning rate, is required in addition."),
    "schedules": ("Schedules", "schedule", "`schedule.warmup_epochs`, the epochs of linear warm-up, is a key of every schedule."),
    "averagers": ("Averagers", "averager", "[averaging.md](averaging.md) describes how averagers work and helps to choose one."),
    "augmentations": ("Augmentations", "data.augment", "[data.md](data.md) describes how augmentations are drawn."),
    "reporters": (
        "Reporters",
        "metrics.reporters",
        "Reporters receive the reports of rank 0, as the console and `metrics.jsonl` do.",
    ),
}

_OPTIONS_HEAD = """# Options

This page lists the names that a configuration can choose, and their options. An option is a key next to `name` in the section
([config.md](config.md)). `hpctrain list models` (or `optimizers`, `schedules`, `averagers`, `augmentations`, `reporters`) prints
the names. `hpctrain config show FILE` prints a configuration with the values of all options. `hpctrain config schema` prints all
names and options as a JSON schema for editors.

`make docs` writes this page from the constructors.
"""

_KEYS_NOTE = """
Keys marked "needed" have no default. Further keys of `model`, `optimizer`, `schedule`, `averager`, augmentations and reporters
are options ([options.md](options.md)). `make docs` writes this table.

"""

_FINDINGS_NOTE = """
The doctor runs these checks. The table has the same order.

{checks}

Findings of the check "job" concern the doctor itself: it did not end in time, a library ended it, or one of its checks failed.
With `--json`, the doctor prints the key of each finding. `make docs` writes this list and the table.

"""


def options_page() -> str:
    """docs/options.md."""
    return "\n".join([_OPTIONS_HEAD, *(line for kind in _KINDS for line in _section(kind))])


def keys_section() -> str:
    """The last section of docs/config.md, without its heading."""
    lines = ["| key | default | meaning |", "|---|---|---|", *(_key(path) for path in known_paths() if section_at(path) is None)]
    return _KEYS_NOTE + "\n".join(lines) + "\n"


def findings_section() -> str:
    """The last section of docs/doctor.md, without its heading."""
    checks = "\n".join(f"- {check.name}: {check.looks_at}" for check in CHECKS)
    kinds = [(check.name, kind) for check in CHECKS for kind in check.kinds] + [("job", kind) for kind in JOB_KINDS]
    lines = ["| key | check | severity | meaning | fix |", "|---|---|---|---|---|"]
    lines += [f"| `{kind.key}` | {name} | {kind.severity} | {kind.meaning} | {_remedy(kind.remedy)} |" for name, kind in kinds]
    return _FINDINGS_NOTE.format(checks=checks) + "\n".join(lines) + "\n"


def _remedy(line: str) -> str:
    """A command in backticks, a sentence as it is."""
    return line if line.endswith(".") or "`" in line else f"`{line}`"


def _key(path: KeyPath) -> str:
    section = section_at(path[:-1])
    assert section is not None
    field = section.model_fields[str(path[-1])]
    default = "needed" if field.default is PydanticUndefined else f"`{show(field.default)}`".replace("`()`", "`[]`")
    return f"| `{dotted(path)}` | {default} | {field.description} |"


def _section(kind: str) -> Iterator[str]:
    title, section, note = _KINDS[kind]
    yield from (f"## {title}", "", f"The section is `{section}`. {note}", "")
    if kind == "models":
        yield from ("| option | meaning |", "|---|---|")
        yield from (f"| `{name}` | {meaning} |" for name, meaning in FOLLOWING.items())
        yield ""
    by_family = sorted(choices(kind), key=lambda choice: (choice.family, [*choice.fixed.values()]))
    for _, members in groupby(by_family, key=lambda choice: choice.family):
        yield from _family(list(members))


def _family(members: list[Choice]) -> Iterator[str]:
    head, *variants = members
    yield from (f"### {head.name}", "", head.sentence, "")
    if variants:
        settled = ", ".join(f"`{choice.name}` ({_settled(choice.fixed)})" for choice in variants)
        yield from (f"Names with fixed options: {settled}.", "")
    if not head.options:
        yield from ("It has no options.", "")
        return
    yield from ("| option | type | default | meaning |", "|---|---|---|---|")
    for option in head.options:
        default = "needed" if option.needed else f"`{show(option.default)}`"
        yield f"| `{option.name}` | {_type(option.schema)} | {default} | {option.meaning} |"
    yield ""


def _settled(fixed: Mapping[str, Any]) -> str:
    return ", ".join(f"{option} {show(value)}" for option, value in fixed.items())


def _type(schema: Mapping[str, Any]) -> str:
    """A JSON schema in words."""
    if "anyOf" in schema:
        return " or ".join(_type(one) for one in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "prefixItems" in schema:
        return f"[{', '.join(_type(item) for item in schema['prefixItems'])}]"
    if schema.get("type") == "array":
        return f"list of {_type(schema['items'])}s"
    kind = str(schema["type"])
    return {"boolean": "`true`, `false`", "null": "`null`"}.get(kind, kind)


def write(docs: Path = DOCS) -> None:
    """Write all generated pages and sections."""
    write_text(docs / "options.md", options_page())
    write_text(docs / "commands.md", commands_page())
    config = docs / "config.md"
    head = config.read_text(encoding="utf-8").split(KEYS_HEADING)[0]
    write_text(config, head + KEYS_HEADING + keys_section())
    doctor = docs / "doctor.md"
    head = doctor.read_text(encoding="utf-8").split(FINDINGS_HEADING)[0]
    write_text(doctor, head + FINDINGS_HEADING + findings_section())


if __name__ == "__main__":
    write()
