"""The scripts in jobs/, which `python -m tests.support.job_scripts` (or `make docs`) writes from site profiles and templates."""

from __future__ import annotations

from pathlib import Path

from hpctrain.site import profile_files
from hpctrain.site.job import JobFiles, JobRequest, plan_job
from hpctrain.site.profile_files import INSTALLED
from hpctrain.site.script import ACCOUNT, ENDINGS, render

JOBS = Path(__file__).parents[2] / "jobs"
SITES = sorted(path.stem for path in INSTALLED.glob("*.yaml"))

_NODES = {"slurm": 4, "polaris": 10, "local": 1}
_OTHERWISE = 2


def path_of(site: str) -> Path:
    """The file of a site's script."""
    return JOBS / f"{site}{ENDINGS[profile_files.read(site, {}).profile.scheduler]}"


def script_of(site: str) -> str:
    """The script of a site, for a person to edit."""
    found = profile_files.read(site, {})
    account = found.profile.account
    request = JobRequest(_NODES.get(site, _OTHERWISE), account=ACCOUNT if account is not None and account.needed else None)
    files = JobFiles("hpctrain", f"jobs/{path_of(site).name}", environment=".venv")
    return render(found, plan_job(found, request, files))


def write() -> None:
    """Write all of them."""
    for site in SITES:
        path_of(site).write_text(script_of(site), encoding="utf-8")


if __name__ == "__main__":
    write()
