"""The JSON of one stage: written again with every figure, so that a stage that is cut off leaves what it had."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

PASSED, FAILED, SKIPPED, NOT_BUILT, RUNNING = "passed", "failed", "skipped", "not built yet", "running"


class StageReport:
    """Figures and checks of one stage. Every check that fails makes the stage "failed"; the others go on.

    Args:
        path: of the JSON file.
    """

    def __init__(self, path: Path, stage: str, device: str) -> None:
        self._path, self._begin = path, time.monotonic()
        self.content: dict[str, Any] = {"stage": stage, "device": device, "status": RUNNING, "summary": "", "checks": []}
        self._save()

    def add(self, name: str, value: Any) -> None:
        """A figure, or several."""
        self.content[name] = value
        self._save()

    def check(self, name: str, passed: bool, text: str = "") -> None:
        """A rule and whether it holds; `text` says by how much."""
        self.content["checks"].append({"name": name, "passed": bool(passed), "text": text})
        self._save()

    def note(self, text: str) -> None:
        """One more piece of the line that the table shows."""
        self.content["summary"] = ", ".join(filter(None, (self.content["summary"], text)))
        self._save()

    def finish(self, status: str | None = None, reason: str = "") -> None:
        """End with a status; by default the one that the checks say. A stage without any check is not "passed" but "failed"."""
        failed = [check["name"] for check in self.content["checks"] if not check["passed"]]
        if status is None:
            status = PASSED if self.content["checks"] and not failed else FAILED
            reason = reason or ("" if self.content["checks"] else "nothing was checked")
        if failed:
            status = FAILED
            reason = f"{len(failed)} checks failed, the first: {failed[0]}" + (f"; {reason}" if reason else "")
        self.content["status"] = status
        if reason:
            self.content["summary"] = "; ".join(filter(None, (reason, self.content["summary"])))
        self._save()

    def _save(self) -> None:
        self.content["seconds"] = round(time.monotonic() - self._begin, 3)
        partial = self._path.with_name(self._path.name + ".partial")
        partial.write_text(json.dumps(self.content, indent=1) + "\n")
        partial.replace(self._path)
