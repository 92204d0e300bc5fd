"""`trimaran bench`: measures how fast this machine is."""

import json
import os
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import IO, Annotated, Any

import typer

from trimaran.app.request.options import Json
from trimaran.core import UserError
from trimaran.core.user_folders import needed_user_cache
from trimaran.hardware import Calibration, Cluster, calibration_folder, detect, machine_name, num_cores
from trimaran.run.compile_cache import refuse_unusable

bench = typer.Typer(help="Measure how fast this machine is.", rich_markup_mode=None)

DEFAULT_SECONDS = 20.0
MAX_SECONDS = 600.0


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
    as_json: Json = False,
) -> None:
    """Measure matmuls, memory and collectives here. The planner then uses them for `cluster: auto` and `2xcpu`.

    \b
    trimaran bench calibrate
    trimaran bench calibrate --output our-node.json   # for `calibration:` in a cluster file
    """
    from trimaran.app.views.clean_console import open_console

    cluster = detect(visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"))
    path = output or (calibration_folder(os.environ) or needed_user_cache(os.environ)) / f"{machine_name(cluster)}.json"
    _refuse_unwritable(path)
    refuse_unusable(os.environ)
    measured = _measure(cluster, seconds, open_console(stderr=True))
    name = cluster.device.name if cluster.device.kind == "cuda" else f"cpu, {num_cores()} cores"
    calibration = Calibration.model_validate({"device": name, "date": f"{date.today():%Y-%m-%d}", **measured})
    _write(path, calibration)
    for old in path.parent.glob(f"{machine_name(cluster)}-*x*-torch-*.json") if output is None else ():
        old.unlink(missing_ok=True)  # rates of CPU ranks, which the next run measures again
    if as_json:
        typer.echo(json.dumps({"path": str(path), "calibration": calibration.model_dump(exclude_none=True)}))
        return
    _show(calibration, open_console())
    typer.echo(f"\nwritten to {path}")
    if output:
        typer.echo(f"in a cluster file:  calibration: {output.resolve()}")
    else:
        typer.echo("next  trimaran plan --set cluster=auto")


def _measure(cluster: Cluster, seconds: float, console: Any) -> dict[str, Any]:
    """Run the measuring process with a progress bar, and return its measurements."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    # Two gloo ranks are useful even on one core; GPU collectives need several GPUs.
    ranks = max(2, cluster.world_size) if cluster.device.kind == "cpu" else cluster.world_size
    options = {"kind": cluster.device.kind, "cores": num_cores(), "ranks": ranks, "seconds": seconds}
    command = [sys.executable, "-m", "trimaran.probe.calibrate"]
    command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    environment = {"GLOO_SOCKET_IFNAME": "lo", **os.environ}
    measured: dict[str, Any] | None = None
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with (
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar,
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment) as process,
    ):
        task = bar.add_task("starting torch", total=1.0)
        try:
            for line in process.stdout or ():
                message = json.loads(line)
                measured = message.get("measured", measured)
                bar.update(task, description=message.get("doing"), completed=message.get("share"))
        except BaseException:  # mostly Ctrl-C
            process.terminate()
            raise
        if process.wait() or measured is None:
            raise _failure(errors)
    return measured


def _failure(errors: IO[str]) -> UserError:
    errors.seek(0)
    lines = [line.strip() for line in errors.read().splitlines() if line.strip()]
    return UserError("C008", f"the measurement failed: {lines[-1][:200] if lines else 'its process was killed'}",
                     where="trimaran bench calibrate",
                     fix="try again when nothing else runs here; CUDA_VISIBLE_DEVICES= measures the CPU")  # fmt: skip


def _refuse_unwritable(path: Path) -> None:
    """Raise if the file cannot be written: before the measurement, not after."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(21, "Is a directory")
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UserError("C009", f"the calibration cannot be written: {error.strerror}", where=str(path),
                        fix="name another file with --output") from None  # fmt: skip


def _write(path: Path, calibration: Calibration) -> None:
    """Write the file atomically: a planner that reads it meanwhile gets the old or the new one."""
    text = calibration.model_dump_json(indent=2, exclude_none=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as file:
        file.write(text + "\n")
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


def _show(calibration: Calibration, console: Any) -> None:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column(calibration.device, style="bold", no_wrap=True)
    table.add_column("measured", justify="right", no_wrap=True)
    table.add_column("", style="dim")
    for name, rate, unit, note in _rows(calibration):
        table.add_row(name, f"{rate:,.0f} {unit}" if rate >= 100 else f"{rate:.3g} {unit}", note)
    console.print(table)


def _rows(calibration: Calibration) -> list[tuple[str, float, str, str]]:
    measured = calibration.model_dump(exclude_none=True)
    rows = [(f"matmul, {shape}", rate, "TFLOP/s", "") for shape, rate in measured["shapes"].items()]
    labels = {
        "memory_gb_per_second": ("memory", "GB/s", "adding two large tensors"),
        "host_gb_per_second": ("host memory", "GB/s", ""),
        "pcie_gb_per_second": ("host to device and back", "GB/s", "the slower direction, pinned"),
        "launch_us": ("kernel launch", "us", ""),
    }
    rows += [(labels[name][0], measured[name], *labels[name][1:]) for name in labels if name in measured]
    if collectives := measured.get("collectives"):
        note = f"bus bandwidth, {collectives['devices']} ranks"
        rows += [(name.removesuffix("_gb_per_second").replace("_", "-"), rate, "GB/s", note)
                 for name, rate in collectives.items() if name.endswith("_gb_per_second")]  # fmt: skip
        rows.append(("one hop", collectives["latency_us"], "us", "latency"))
    return rows
