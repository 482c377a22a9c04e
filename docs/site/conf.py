"""How Sphinx makes the pages of docs/ a web site (`make site`). It asks nothing of any other server when it is read.

The pages stay as they are read in the repository. CONTRIBUTING and CHANGELOG, which lie outside of docs/, stand on the site in
the place of pages that have no text of their own; the site begins with docs/index.md in the place of README.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

project = "hpctrain"
copyright = "the authors of hpctrain; Apache-2.0"
extensions = ["myst_parser", "sphinx_copybutton"]
root_doc = "index"
exclude_patterns: list[str] = []
html_theme = "furo"
html_title = "hpctrain"
html_static_path = ["static"]
html_css_files = ["narrow.css"]
html_copy_source = False
html_show_sphinx = False
smartquotes = False  # options begin with two hyphens
myst_heading_anchors = 4
suppress_warnings = ["misc.highlighting_failure"]  # blocks with "..." in the place of what is left out

#: page of the repository -> page of the site
PAGES = {"CONTRIBUTING.md": "site/contributing.md", "CHANGELOG.md": "site/changelog.md"}
#: where links to a page of the repository lead
PLACES = {**PAGES, "README.md": "index.md"}
_LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)\s]*)?\))")


def setup(app: Any) -> None:
    """Sphinx calls it."""
    app.connect("source-read", _read)


def _read(app: Any, name: str, source: list[str]) -> None:
    """Put a page from outside of docs/ in front of what stands for it, and links in their places on the site."""
    outside = next((path for path, page in PAGES.items() if page == f"{name}.md"), None)
    if outside is not None:
        source[0] = as_linked((ROOT / outside).read_text(encoding="utf-8"), outside) + "\n" + source[0]
    else:
        source[0] = as_linked(source[0], f"docs/{name}.md")


def as_linked(text: str, path: str) -> str:
    """The text of a page of the repository with its links as the site needs them."""
    return _LINK.sub(lambda match: f"{match[1]}{link(match[2], path)}{match[3]}", text)


def link(target: str, source: str) -> str:
    """A link from a page of the repository to another one or to a file, relative to the page's place on the site.

    A directory becomes the first file in it, as a site shows no directories.
    """
    if "://" in target:
        return target
    path = _normal(PurePosixPath(source).parent / target)
    if (ROOT / path).is_dir():
        path = next(str(file.relative_to(ROOT)) for file in sorted((ROOT / path).iterdir()) if file.is_file())
    here, there = PurePosixPath(_place(source)).parent, PurePosixPath(_place(path))
    shared = 0
    while shared < min(len(here.parts), len(there.parts)) and here.parts[shared] == there.parts[shared]:
        shared += 1
    relative = "/".join([".."] * (len(here.parts) - shared) + list(there.parts[shared:]))
    is_page = path in PLACES or path.startswith("docs/")
    return relative if is_page or not path.endswith(".md") else f"path:{relative}"  # a file to load, as it is no page


def _place(path: str) -> str:
    """The place of a file of the repository as Sphinx sees it, relative to the repository."""
    return f"docs/{PLACES[path]}" if path in PLACES else path


def _normal(path: PurePosixPath) -> str:
    """Without `..`; pages name nothing outside of the repository."""
    parts: list[str] = []
    for part in path.parts:
        if part == "..":
            parts.pop()
        else:
            parts.append(part)
    return "/".join(parts)
