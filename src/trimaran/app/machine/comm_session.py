"""`trimaran bench comm`: measures or reads a result, shows it, and writes it for people, for tools and the planner."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from trimaran.app.leaves import open_leaf
from trimaran.app.machine.calibration_file import refuse_unwritable, write_calibration
from trimaran.app.machine.comm_links import calibrated, find_outliers
from trimaran.app.machine.comm_request import CommOptions, measure_comm
from trimaran.app.machine.comm_view import show_comm
from trimaran.app.show.clean_console import open_console
from trimaran.core import EXIT_DONE, EXIT_USER, UserError
from trimaran.core.regular_files import needed_user_cache
from trimaran.machine import calibration_folder, detect, machine_name
from trimaran.machine.calibration import find_calibration
from trimaran.machine.checks.software import misspelt, wrong_algorithms
from trimaran.machine.comm_result import CommCurve, CommResult, read_comm_result

Tree = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommFiles:
    """What is read and written."""

    against: Path | None = None
    show: Path | None = None
    out: Path | None = None
    html: Path | None = None
    calibrate: bool = False

    def refuse_unwritable(self) -> None:
        for option, file in (("--out", self.out), ("--html", self.html)):
            if file is not None:
                refuse_unwritable(file, what="result", option=option)


def run_comm(options: CommOptions, files: CommFiles, *, as_json: bool) -> int:
    """Measure, show and write; return 2 if a collective returned wrong values."""
    against = read_comm_result(files.against) if files.against else None
    files.refuse_unwritable()
    if files.show:
        result: CommResult | None = read_comm_result(files.show)
    else:
        for problem in (*misspelt(os.environ), *wrong_algorithms(os.environ)):
            typer.echo(f"H007: {problem.what}; {problem.fix}", err=True)
        result = measure_comm(options, os.environ, open_console(stderr=True))
    if result is None:
        return EXIT_DONE  # another node or rank shows it
    if files.out:
        files.out.write_text(json.dumps(tree_of(result), indent=1) + "\n")
    path = _calibrate(result) if files.calibrate else None
    tree = tree_of(result)
    if path is not None:
        tree["calibration"] = str(path)
    if against is not None:
        tree["against"] = tree_of(against)
    if files.html:
        files.html.write_text(open_leaf("bench comm --html")(result, against), encoding="utf-8")
    if as_json:
        typer.echo(json.dumps(tree))
    else:
        show_comm(result, open_console(), against=against)
        _say_what_next(files, path)
    return EXIT_USER if result.wrong else EXIT_DONE


def _say_what_next(files: CommFiles, calibration: Path | None) -> None:
    typer.echo("")
    for each in filter(None, (files.out, files.html)):
        typer.echo(f"written to {each}")
    if calibration is not None:
        typer.echo(f"the planner uses these links from now on: {calibration}")
        typer.echo(f"in a cluster file:  calibration: {calibration}")
    else:
        typer.echo("next  trimaran bench comm --calibrate   (the planner then uses these links)")


def tree_of(result: CommResult) -> Tree:
    """Return the result with what follows from it: bandwidths, fits and outliers."""
    tree = result.model_dump(mode="json")
    tree["curves"] = [{**row, **_derived(curve)} for row, curve in zip(tree["curves"], result.curves, strict=True)]
    tree["outliers"] = [{"ranks": each.ranks, "factor": each.factor, "is_pair": each.is_pair,
                         "text": each.text(result.hosts)} for each in find_outliers(result.pairs)]  # fmt: skip
    return tree


def _derived(curve: CommCurve) -> Tree:
    fit = curve.fit()
    points = [
        {
            **point.model_dump(mode="json"),
            "algorithm_gb_per_second": curve.algorithm_bandwidth(point) / 1e9,
            "bus_gb_per_second": curve.bus_bandwidth(point) / 1e9,
        }
        for point in curve.points
    ]
    fitted = fit and {
        "alpha_us": fit.alpha_seconds * 1e6,
        "alpha_error_us": _finite(fit.alpha_error_seconds * 1e6),
        "bus_gb_per_second": fit.bytes_per_second / 1e9,
        "bandwidth_error": _finite(fit.bandwidth_error),
        "residual": fit.residual,
        "hop_us": fit.alpha_seconds * 1e6 / curve.num_hops,
        "outlier_bytes": [round(size / curve.bus_factor) for size in fit.outliers],
    }
    return {"points": points, "fit": fitted}


def _finite(value: float) -> float | None:
    return value if value < float("inf") else None


def _calibrate(result: CommResult) -> Path:
    """Add the measured links to this machine's calibration, and return its file."""
    visible = "" if result.backend == "gloo" else os.environ.get("CUDA_VISIBLE_DEVICES")
    name = machine_name(detect(visible_devices=visible))
    folder = calibration_folder(os.environ) or needed_user_cache(os.environ)
    new = calibrated(result, find_calibration(folder, name))
    if new.collectives is None and new.network is None:
        raise UserError("C010", "no bandwidth could be fitted, so the planner gets no link", where="--calibrate",
                        fix="measure at least three sizes, with more --seconds")  # fmt: skip
    path = folder / f"{name}.json"
    refuse_unwritable(path)
    write_calibration(path, new)
    return path
