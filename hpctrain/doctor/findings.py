"""A finding of the doctor: how bad it is, a sentence, and the one line that mends it. Imports neither NumPy nor MPI."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from hpctrain.launch import process_end


class Severity(StrEnum):
    """How bad a finding is, from the best to the worst."""

    OK = "ok"
    REMARK = "remark"
    WARNING = "warning"
    FAULT = "fault"


@dataclass(frozen=True)
class DoctorFinding:
    """One finding. key: of its kind, for programs; empty where all is well. mend: a command, a setting or a short advice."""

    severity: Severity
    sentence: str
    mend: str = ""
    key: str = ""


@dataclass(frozen=True)
class FindingKind:
    """A kind of finding that a check may make.

    Attributes:
        key: its name for programs, which stays. meaning: of the finding, for the documentation.
        remedy: what mends it, in general.
    """

    key: str
    severity: Severity
    meaning: str
    remedy: str

    def found(self, sentence: str, mend: str = "") -> DoctorFinding:
        """A finding of this kind. mend: the line for this case; by default the general remedy."""
        return DoctorFinding(self.severity, sentence, mend or self.remedy, self.key)

    def from_error(self, error: str) -> DoctorFinding:
        """A finding from the sentence of an error, whose last part, behind a semicolon, says what mends it."""
        fact, semicolon, mend = error.removesuffix(".").rpartition("; ")
        return self.found(f"{fact}.", capital(f"{mend}.")) if semicolon else self.found(error)


def fine(sentence: str) -> DoctorFinding:
    """All is well, or there is nothing to look at."""
    return DoctorFinding(Severity.OK, sentence)


def capital(text: str) -> str:
    """The text with a capital at its beginning, unless it begins with a name, such as that of a key."""
    word = text.partition(" ")[0]
    return text[:1].upper() + text[1:] if word.rstrip(".,:").isalpha() else text


def exit_code(findings: Iterable[DoctorFinding], *, strict: bool) -> int:
    """0 where nothing stops or spoils a training, else 2. strict: warnings count, too."""
    bad = (Severity.FAULT, Severity.WARNING) if strict else (Severity.FAULT,)
    return process_end.USER_ERROR if any(finding.severity in bad for finding in findings) else process_end.FINISHED
