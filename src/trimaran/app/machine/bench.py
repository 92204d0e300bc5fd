"""`trimaran bench`: measures how fast this machine is."""

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trimaran.app.recipe.options import Json, Settings, complete_recipe, starting
from trimaran.core import EXIT_DONE, EXIT_USER, UserError, needed_user_cache, write_atomically
from trimaran.machine import Calibration, calibration_folder, detect, machine_name, num_cores
from trimaran.runs import check_disk_folder, refuse_unusable

if TYPE_CHECKING:
    from rich.console import Console

bench = typer.Typer(help="Measure how fast this machine is.", rich_markup_mode=None)

DEFAULT_SECONDS = 20.0
MAX_SECONDS = 600.0
COLLECTIVES_HELP = "Some of all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send_recv."
SIZES_HELP = "Message sizes: 1KiB,1MiB or 1KiB..64MiB*2. [default: 1KiB..16MiB, and 1KiB..256MiB between GPUs]"
GROUPS_HELP = (
    "world, node, a number of neighbours, or axes of --recipe: tp, dp, pp, cp, dp_shard, dp_replicate. "
    "[default: world, node, and the axes]"
)


def complete_collectives(incomplete: str) -> list[str]:
    """Return the collectives that complete the last word of a list with commas."""
    from trimaran.machine.comm_result import BUS_FACTORS

    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{word}" for word in starting([*BUS_FACTORS, "all"], last)]


def complete_comm_groups(incomplete: str) -> list[str]:
    """Return the groups of ranks that complete the last word of a list with commas."""
    from trimaran.app.machine.comm_request import JOINED_AXES, MESH_AXES

    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{word}" for word in starting(["world", "node", *MESH_AXES, *JOINED_AXES], last)]


@bench.callback()
def _group() -> None:
    """Measure how fast this machine is."""


@bench.command("calibrate")
def calibrate(
    seconds: Annotated[
        float, typer.Option(min=1.0, max=MAX_SECONDS, help="Rough duration, without the start of torch.")
    ] = DEFAULT_SECONDS,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write to this file instead of the user's cache.")
    ] = None,
    disk: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Also measure the disk of this folder, for plan.disk.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure matmuls, memory and collectives here. The planner then uses them for `cluster: auto` and `2xcpu`.

    \b
    trimaran bench calibrate
    trimaran bench calibrate --output our-node.json   # for `calibration:` in a cluster file
    trimaran bench calibrate --disk /nvme/scratch     # and the disk that plan.disk.path offloads to
    """
    from trimaran.app.show.clean_console import open_console, plain_table

    cluster = detect(visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"))
    path = output or (calibration_folder(os.environ) or needed_user_cache(os.environ)) / f"{machine_name(cluster)}.json"
    refuse_unwritable(path)
    refuse_unusable(os.environ)
    if disk is not None:
        check_disk_folder(str(disk), any_filesystem=True)
    # Two gloo ranks are useful even on one core; GPU collectives need several GPUs.
    ranks = max(2, cluster.world_size) if cluster.device.traits.shares_cores else cluster.world_size
    command = [sys.executable, "-m", "trimaran.machine.probe.calibrate", f"--kind={cluster.device.kind}",
               f"--cores={num_cores()}", f"--ranks={ranks}", f"--seconds={seconds}",
               *([f"--disk={disk.resolve()}"] if disk else [])]  # fmt: skip
    console, environment = open_console(stderr=True), {"GLOO_SOCKET_IFNAME": "lo", **os.environ}
    measured = run_measurement(command, environment=environment, console=console, where="trimaran bench calibrate")
    name = f"cpu, {num_cores()} cores" if cluster.device.traits.shares_cores else cluster.device.name
    calibration = Calibration.model_validate({"device": name, "date": f"{date.today():%Y-%m-%d}", **measured})
    write_calibration(path, calibration)
    for old in path.parent.glob(f"{machine_name(cluster)}-*x*-torch-*.json") if output is None else ():
        old.unlink(missing_ok=True)  # rates of CPU ranks, which the next run measures again
    if as_json:
        typer.echo(json.dumps({"path": str(path), "calibration": calibration.model_dump(exclude_none=True)}))
        return
    table = plain_table()
    table.add_column(calibration.device, style="bold", no_wrap=True)
    table.add_column("measured", justify="right", no_wrap=True)
    table.add_column("", style="dim")
    figures = calibration.model_dump(exclude_none=True)
    rows = [(f"matmul, {shape}", rate, "TFLOP/s", "") for shape, rate in figures["shapes"].items()]
    labels = {
        "memory_gb_per_second": ("memory", "GB/s", "adding two large tensors"),
        "host_gb_per_second": ("host memory", "GB/s", ""),
        "pcie_gb_per_second": ("host to device and back", "GB/s", "the slower direction, pinned"),
        "launch_us": ("kernel launch", "us", ""),
    }
    rows += [(labels[name][0], figures[name], *labels[name][1:]) for name in labels if name in figures]
    if collectives := figures.get("collectives"):
        note = f"bus bandwidth, {collectives['devices']} ranks"
        rows += [(name.removesuffix("_gb_per_second").replace("_", "-"), rate, "GB/s", note)
                 for name, rate in collectives.items() if name.endswith("_gb_per_second")]  # fmt: skip
        rows.append(("one hop", collectives["latency_us"], "us", "latency"))
    if disk := figures.get("disk"):
        notes = {"read": "direct, 16 x 8 MiB", "write": "direct, 16 x 8 MiB", "both": "of each, at the same time"}
        rows += [(f"disk, {way}", disk[f"{way}_gb_per_second"], "GB/s", note) for way, note in notes.items()]
    for label, rate, unit, note in rows:
        table.add_row(label, f"{rate:,.0f} {unit}" if rate >= 100 else f"{rate:.3g} {unit}", note)
    open_console().print(table)
    typer.echo(f"\nwritten to {path}")
    if output:
        typer.echo(f"in a cluster file:  calibration: {output.resolve()}")
    else:
        typer.echo("next  trimaran plan --set cluster=auto")


@bench.command("comm")
def comm(
    collectives: Annotated[
        str, typer.Option(metavar="LIST", help=COLLECTIVES_HELP, autocompletion=complete_collectives)
    ] = "all",
    sizes: Annotated[str, typer.Option(metavar="LIST", help=SIZES_HELP)] = "",
    groups: Annotated[str, typer.Option(metavar="LIST", help=GROUPS_HELP, autocompletion=complete_comm_groups)] = "",
    backend: Annotated[
        str,
        typer.Option(
            metavar="gloo|nccl", help="[default: nccl between GPUs, else gloo]", autocompletion=lambda: ["gloo", "nccl"]
        ),
    ] = "",
    dtype: Annotated[
        str, typer.Option(metavar="fp32|bf16|fp16", autocompletion=lambda: ["fp32", "bf16", "fp16"])
    ] = "fp32",
    seconds: Annotated[
        float, typer.Option(min=0.5, max=3600.0, help="Rough duration, without the start of torch.")
    ] = DEFAULT_SECONDS,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Ranks on this machine. [default: its GPUs or cores]")
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Measure this many nodes: start it on each of them.")] = 1,
    node: Annotated[int, typer.Option(min=0, help="Index of this node, from 0.")] = 0,
    address: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where nodes meet: node 0, a free port.")] = "",
    recipe: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", autocompletion=complete_recipe, help="Take the axes of --groups from this recipe's plan."
        ),
    ] = None,
    settings: Settings = None,
    against: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Compare with an earlier result, or one of another node.")
    ] = None,
    show: Annotated[Path | None, typer.Option(metavar="FILE", help="Show this result, and measure nothing.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the result as JSON.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write one HTML page.")] = None,
    write_links: Annotated[
        bool, typer.Option("--calibrate", help="Let the planner use the measured links from now on.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Measure collectives between ranks by size, group and backend: bandwidth, latency, and slow ranks.

    It starts the ranks by itself, or is one of torchrun's. Exit codes: 0 measured; 2 a collective returned wrong
    values, or an option is wrong.

    \b
    trimaran bench comm
    trimaran bench comm --ranks 4 --groups world,2 --collectives all_reduce,all_gather --seconds 10
    trimaran bench comm --out before.json --html comm.html
    NCCL_ALGO=Ring trimaran bench comm --against before.json
    srun trimaran bench comm --nodes $SLURM_NNODES --node $SLURM_NODEID --address $HEAD:29400 --calibrate
    torchrun --nproc-per-node 8 -m trimaran bench comm
    """
    from trimaran.app.machine.comm_answer import calibrated, show_comm, tree_of
    from trimaran.app.machine.comm_request import CommOptions, measure_comm
    from trimaran.app.main import open_leaf
    from trimaran.app.show.clean_console import open_console
    from trimaran.machine import misspelt, read_comm_result, wrong_algorithms
    from trimaran.machine.calibration import find_calibration

    mesh = None
    if recipe is not None or settings:
        from trimaran.app.recipe.request import resolve

        mesh = resolve(recipe, settings or ()).plan.mesh
    options = CommOptions(collectives=collectives, sizes=sizes, groups=groups, backend=backend, dtype=dtype,
                          seconds=seconds, ranks=ranks, nodes=nodes, node=node, address=address, mesh=mesh)  # fmt: skip
    other = read_comm_result(against) if against else None
    for option, file in (("--out", out), ("--html", html)):
        if file is not None:
            refuse_unwritable(file, what="result", option=option)
    if show:
        result = read_comm_result(show)
    else:
        for problem in (*misspelt(os.environ), *wrong_algorithms(os.environ)):
            typer.echo(f"H007: {problem.what}; {problem.fix}", err=True)
        result = measure_comm(options, os.environ, open_console(stderr=True))
    if result is None:
        return EXIT_DONE  # another node or rank shows it
    tree = tree_of(result)
    if out:
        out.write_text(json.dumps(tree, indent=1) + "\n")
    path = None
    if write_links:  # add the links to this machine's calibration
        visible = "" if result.backend == "gloo" else os.environ.get("CUDA_VISIBLE_DEVICES")
        name = machine_name(detect(visible_devices=visible))
        folder = calibration_folder(os.environ) or needed_user_cache(os.environ)
        new = calibrated(result, find_calibration(folder, name))
        if new.collectives is None and new.network is None:
            raise UserError("C010.no-bandwidth-could", where="--calibrate")
        path = folder / f"{name}.json"
        refuse_unwritable(path)
        write_calibration(path, new)
        tree["calibration"] = str(path)
    if other is not None:
        tree["against"] = tree_of(other)
    if html:
        html.write_text(open_leaf("bench comm --html")(result, other), encoding="utf-8")
    if as_json:
        typer.echo(json.dumps(tree))
    else:
        show_comm(result, open_console(), against=other)
        typer.echo("")
        for each in filter(None, (out, html)):
            typer.echo(f"written to {each}")
        if path is not None:
            typer.echo(f"the planner uses these links from now on: {path}")
            typer.echo(f"in a cluster file:  calibration: {path}")
        else:
            typer.echo("next  trimaran bench comm --calibrate   (the planner then uses these links)")
    return EXIT_USER if result.wrong else EXIT_DONE


def run_measurement(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    console: "Console",
    where: str,
    request: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the answer of a process to `request`, see `machine/probe/calibrate.py`. Raises UserError if it fails."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from trimaran.core.child_process import ChildProcess

    measured, error = None, ""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with (
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar,
        ChildProcess(command, environment=environment) as process,
    ):
        task = bar.add_task("starting torch", total=1.0)
        with contextlib.suppress(BrokenPipeError, EOFError):
            process.send(request or {})
            while True:
                message = process.receive()
                measured, error = message.get("measured", measured), message.get("error", error)
                bar.update(task, description=message.get("doing"), completed=message.get("share"))
        if process.wait() or measured is None:
            why = error or process.last_stderr_line() or "its process was killed"
            raise UserError("C008.measurement-failed", where=where, why=why[:200])
    return measured


def refuse_unwritable(path: Path, *, what: str = "calibration", option: str = "--output") -> None:
    """Raise if the file cannot be written: before the measurement, not after. `option` names another one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(21, "Is a directory")
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise UserError(
            "C009.cannot-written", where=str(path), text=what, reason=error.strerror, option=option
        ) from None


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Write the file atomically: a planner that reads it meanwhile gets the old or the new one."""
    write_atomically(path, calibration.model_dump_json(indent=2, exclude_none=True) + "\n", mode=0o644)
