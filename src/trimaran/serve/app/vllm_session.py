"""Serves with vLLM: exports the weights, writes its configuration, starts it and waits for it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from trimaran.core import UserError
from trimaran.serve.app.vllm_command import (
    API_KEY,
    VllmRequest,
    check_folder,
    config_text,
    shown_command,
    vllm_command,
    vllm_options,
)
from trimaran.serve.weights_location import TrainedWeights

CONFIG = "vllm.yaml"


def find_folder(weights: TrainedWeights) -> tuple[Path, list[str]]:
    """Return the Hugging Face folder that vLLM gets, and the command that writes it; none if it is there already."""
    if weights.step is None or weights.run is None:
        return weights.path, []
    run, merged = weights.run, weights.run.read_recipe().model.adapter is not None
    folder = run.path / "exports" / f"step-{weights.step:08d}-{'merged' if merged else 'hf'}"
    if (folder / "config.json").is_file():
        return folder, []
    export = [sys.executable, "-m", "trimaran", "export", str(run.path), "--step", str(weights.step), "--json"]
    return folder, [*export, "--out", str(folder), *(["--merge"] if merged else [])]


def plan_vllm(request: VllmRequest, export: list[str]) -> dict[str, Any]:
    """Return what would be run, as facts: the export, the command of vLLM and its configuration."""
    options = vllm_options(request)
    command = vllm_command(request.folder, Path(CONFIG))
    return {"export": export, "command": command, "shown": shown_command(command), "config": options,
            "config_text": config_text(options)}  # fmt: skip


def serve_with_vllm(request: VllmRequest, export: list[str], token: str) -> int:
    """Export if it is needed, start vLLM and return its exit code. SIGTERM and Ctrl-C reach it: it drains itself."""
    options = vllm_options(request)
    program = shutil.which("vllm")
    if program is None:
        raise UserError("U013", "vLLM is not installed", where="--engine vllm",
                        fix="pip install vllm on a machine with a GPU, use --engine own, or see the command with "
                        "--dry-run")  # fmt: skip
    if export:
        done = subprocess.run(export, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise _export_failed(done.stdout)
    check_folder(request.folder)
    with tempfile.TemporaryDirectory(prefix="trimaran-vllm-") as folder:
        config = Path(folder) / CONFIG
        config.write_text(config_text(options), encoding="utf-8")
        command = [program, *vllm_command(request.folder, config)[1:]]
        process = subprocess.Popen(command, env={**os.environ, API_KEY: token})
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda received, _: process.send_signal(received))
        return process.wait()


def _export_failed(answer: str) -> UserError:
    """Return the mistake that `trimaran export --json` printed."""
    try:
        error = json.loads(answer.splitlines()[-1])["error"]
        return UserError(error["code"], error["what"], where=error["where"], fix=error["fix"])
    except (ValueError, KeyError, IndexError):
        return UserError("U013", "the weights could not be exported for vLLM", where="trimaran export",
                         fix="its error is above, on standard error")  # fmt: skip
