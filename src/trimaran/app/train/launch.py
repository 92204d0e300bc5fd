"""`trimaran launch`: plans a run, checks the target, writes files that a person can read and run, and submits them."""

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from trimaran.app.recipe.options import Json, NoCheck, RecipeFile, Settings


def complete_target(incomplete: str) -> list[str]:
    """Return the targets that complete `incomplete`."""
    from trimaran.launch.targets.target import target_names

    return [name for name in target_names() if name.startswith(incomplete)]


ON_HELP = "local, ssh, slurm, k8s, ray, sky or a plug-in."
RUN_DIR_HELP = "A new folder for the run, as the nodes see it. [default: runs/NAME]"
SITE_HELP = "Override a field of targets.yaml, such as partition=gpu. Repeatable."
HOSTS_HELP = "For ssh: a,b,c or the name of a hostfile."
Out = Annotated[Path | None, typer.Option(metavar="DIR", help="Write the files there. [default: RUN/launch]")]


def launch(
    recipe: RecipeFile = None,
    on: Annotated[str, typer.Option(metavar="TARGET", help=ON_HELP, autocompletion=complete_target)] = "local",
    run_dir: Annotated[Path | None, typer.Option(metavar="DIR", help=RUN_DIR_HELP)] = None,
    settings: Settings = None,
    hosts: Annotated[str, typer.Option(metavar="LIST", help=HOSTS_HELP, show_default=False)] = "",
    site: Annotated[list[str] | None, typer.Option(metavar="FIELD=VALUE", help=SITE_HELP)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write and show the files; submit nothing.")] = False,
    out: Out = None,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the run to its end; exit with its code.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Only check: the site file and the target.")] = False,
    no_check: NoCheck = False,
    as_json: Json = False,
) -> int:
    """Launch a run on this machine, over SSH, on Slurm, Kubernetes, Ray or SkyPilot.

    The plan and the checks come first: if one fails, nothing is submitted. Then the files are written that a person can
    read, compare and submit without Trimaran, and the command that submits them is shown.

    A site's defaults (partition, account, image, queue) are in ~/.config/trimaran/targets.yaml. `--check` checks it,
    with a recipe also what the run needs.

    Exit codes: 0 submitted, or done with --wait; 2 a mistake or a failed check; with --wait those of `trimaran train`.

    \b
    trimaran launch recipes/stdlib-tiny.yaml --on slurm --set cluster=4x8xH100 --dry-run
    trimaran launch recipes/stdlib-tiny.yaml --on ssh --hosts a,b --set cluster=2x2xcpu --wait
    trimaran launch --check
    """
    from trimaran.app.train.launch_answer import LaunchOptions, launch_on, launch_request, read_site, resolved
    from trimaran.core import EXIT_DONE, EXIT_USER
    from trimaran.launch.targets.site_file import read_site_file, site_path
    from trimaran.launch.targets.target import SiteCheck, open_target, target_names

    target = open_target(on)
    if hosts and Path(hosts).is_file():
        from trimaran.launch.targets.ssh_session import read_hostfile

        hosts = ",".join(read_hostfile(Path(hosts)))
    options = LaunchOptions(run_dir=run_dir, hosts=hosts, site=site or [], check=not no_check)
    if check:
        path = site_path(os.environ)
        sections = read_site_file(path)
        about = f": {', '.join(sections) or 'no sections'}" if path.exists() else " does not exist: no defaults"
        checks = [SiteCheck(name="site file", found=f"{path}{about}")]
        for name in target_names():
            if name in sections and name != target.name:
                read_site(open_target(name), ())  # raises if a section has a mistake
        if recipe is None and not settings:
            checks += target.check(None, read_site(target, options.site))
        else:
            request = launch_request(target, resolved(target, recipe, settings or [], options), options)
            checks += target.check(request, request.site)
        failed = [each for each in checks if each.error is not None]
        if as_json:
            found = [
                {"check": each.name, "found": each.found, "error": each.error.as_dict() if each.error else None}
                for each in checks
            ]
            typer.echo(json.dumps({"checks": found, "failed": len(failed)}))
        else:
            for each in checks:
                typer.echo(f"{'FAIL' if each.error else 'pass'} {each.name}: {each.found}")
                if each.error:
                    typer.echo(f"     {each.error.code} {each.error.where}\n     fix: {each.error.fix}")
        return EXIT_USER if failed else EXIT_DONE
    return launch_on(target, recipe, settings or [], options, dry_run=dry_run, out=out, wait=wait, as_json=as_json)
