"""`hpctrain submit` and `hpctrain sites`: submit job scripts, and list the machines they can be written for. Neither needs MPI.

A script is written to the output directory and handed to the site's scheduler.
"""

from __future__ import annotations

from pathlib import Path

import click

from hpctrain.cli.arguments import AUTO, OVERRIDES, FilePath, complete_sites, with_auto
from hpctrain.cli.config import two_columns
from hpctrain.core.text import counted, echo, echo_block


@click.command()
@click.argument("name", required=False, shell_complete=complete_sites)
def sites(name: str | None) -> None:
    """List the machines for which hpctrain can submit jobs.

    With NAME, print all settings of one machine as YAML. Your own profiles are read from sites/ of hpctrain's configuration
    directory; a profile may extend another one.
    """
    from hpctrain.site import profile

    if name is not None:
        import yaml

        site = profile.read_site(name)
        settings = site.profile.model_dump(mode="json", exclude_none=True)
        echo_block(f"# {site.path}\n" + yaml.safe_dump(settings, sort_keys=False, width=120))
        return
    known = [profile.read_site(site) for site in profile.profile_paths()]
    rows = [(site.name, site.profile.description + ("" if site.is_installed else f" ({site.path})")) for site in known]
    echo_block(two_columns(rows))
    echo()
    echo(f"Your own profiles: {profile.where_own()}/NAME.yaml")


@click.command()
@click.argument("file", metavar="CONFIG", type=FilePath(path_type=Path))
@OVERRIDES
@AUTO
@click.option(
    "--site",
    "site_name",
    required=True,
    metavar="NAME",
    shell_complete=complete_sites,
    help="Name of the machine (see `hpctrain sites`).",
)
@click.option("--nodes", type=click.IntRange(min=1), default=1, show_default=True, help="Number of nodes.")
@click.option(
    "--ranks-per-node", type=click.IntRange(min=1), help="Number of ranks per node; default: that of the machine's profile."
)
@click.option(
    "--cores-per-rank",
    type=click.IntRange(min=1),
    help="Number of cores per rank; default: the cores of a node divided among its ranks.",
)
@click.option("--time", "limit", metavar="HH:MM:SS", help="Time limit of the job, which is requeued when it reaches the limit.")
@click.option("--account", help="Account or project to charge.")
@click.option("--queue", help="Queue, partition or quality of service.")
@click.option("--hostfile", type=FilePath(dir_okay=False, path_type=Path), help="File with the hosts to start on, one per line.")
@click.option(
    "--stage",
    type=FilePath(dir_okay=False, path_type=Path),
    metavar="TAR",
    help="Tar archive of an environment, which the job unpacks on the local disk of each node and runs from there.",
)
@click.option("--restarts", type=click.IntRange(min=0), help="Maximum number of times that a stopped job is requeued.")
@click.option("--no-doctor", is_flag=True, help="Train without running `hpctrain doctor` on the nodes first.")
@click.option("--dry-run", is_flag=True, help="Print the job script without writing or submitting it.")
def submit(
    file: Path,
    overrides: tuple[str, ...],
    auto: bool,
    site_name: str,
    nodes: int,
    ranks_per_node: int | None,
    cores_per_rank: int | None,
    limit: str | None,
    account: str | None,
    queue: str | None,
    hostfile: Path | None,
    stage: Path | None,
    restarts: int | None,
    no_doctor: bool,
    dry_run: bool,
) -> None:
    """Submit the training of CONFIG to a scheduler.

    OVERRIDES such as optimizer.lr=0.2 override keys of the file. The script is written to jobs/ in the output directory, next to
    its log. Running the same command again resumes the newest run of that name from its newest checkpoint.
    """
    from hpctrain.assembly.faults import load_checked
    from hpctrain.assembly.images import check_files
    from hpctrain.config.schema import SYNTHETIC
    from hpctrain.runs.directory import latest
    from hpctrain.runs.owner import living_owner
    from hpctrain.site import profile
    from hpctrain.site.job import JobRequest, check_backend, job_files, plan_job, render, submission_notes
    from hpctrain.site.job import submit as hand_over

    config = load_checked(file, with_auto(overrides, auto=auto))
    checked = check_files(config)
    for note in () if checked is None else checked[1].notes:
        echo(note, err=True)
    site = profile.read_site(site_name)
    request = JobRequest(
        nodes, ranks_per_node, cores_per_rank, limit, account, queue, hostfile, stage, restarts, doctor=not no_doctor
    )
    check_backend(site, config.backend, request)
    files = job_files(site, config.name, Path(config.output), (str(file), *overrides, *(["--auto"] if auto else [])))
    job = plan_job(site, request, files, own_limit=config.max_time is not None)
    script = render(site, job)
    weights = [] if config.init.weights is None else [config.init.weights]
    files_read = [Path(path) for path in (*config.data.files.values(), *weights) if path != SYNTHETIC]
    for note in submission_notes(site, files_read):
        echo(f"note: {note}", err=True)
    if dry_run:
        echo_block(script)
        return
    submission = hand_over(site, job)
    ranks = f"{counted(job.nodes, 'node')} with {counted(job.ranks, 'rank')} each"
    echo(f"job {submission.number} on {site.name}: {ranks}")
    echo(f"script: {submission.script}")
    for line in submission.lines:
        echo(line)
    run = latest(Path(config.output), config.name)
    if run is not None and (owner := living_owner(run.path)) is not None:
        echo(
            f"note: the run {run.path} of the same name is being written to by {owner}. "
            f"This job is refused until that process ends; afterwards it resumes that run. For a new run, choose another name."
        )
