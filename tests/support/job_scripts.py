"""The scripts in jobs/, which `python -m tests.support.job_scripts` (or `make docs`) writes from site profiles and templates."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from hpctrain.site import profile
from hpctrain.site.job import ACCOUNT, ENDINGS, JobFiles, JobRequest, plan_job, render
from hpctrain.site.profile import INSTALLED
from hpctrain.storage.atomic_write import write_text

JOBS = Path(__file__).parents[2] / "jobs"
SITES = sorted(path.stem for path in INSTALLED.glob("*.yaml"))

_NODES = {"slurm": 4, "polaris": 10, "local": 1}
_OTHERWISE = 2


def path_of(site: str) -> Path:
    """The file of a site's script."""
    return JOBS / f"{site}{ENDINGS[profile.read_site(site, {}).profile.scheduler]}"


def script_of(site: str) -> str:
    """The script of a site, for a person to edit."""
    found = profile.read_site(site, {})
    account = found.profile.account
    request = JobRequest(_NODES.get(site, _OTHERWISE), account=ACCOUNT if account is not None and account.needed else None)
    files = JobFiles("hpctrain", f"jobs/{path_of(site).name}", environment=".venv")
    return render(found, plan_job(found, request, files))


def require_sound(text: str, *options: str) -> None:
    """Require that shellcheck finds nothing in a script."""
    program = shutil.which("shellcheck", path=str(Path(sys.executable).parent)) or shutil.which("shellcheck")
    assert program is not None, "requirements-dev.txt brings shellcheck"
    done = subprocess.run([program, *options, "-"], input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def write() -> None:
    """Write the job script of every site."""
    for site in SITES:
        write_text(path_of(site), script_of(site))


if __name__ == "__main__":
    write()
