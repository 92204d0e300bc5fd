"""Serves with vLLM: its command and configuration, the export that it reads, and its process."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from trimaran.core import UserError
from trimaran.models import read_json
from trimaran.serve.settings import TrainedWeights

# Options of `vllm serve` that are used here, by the type of their value, as its documentation lists them (vLLM 0.14).
OPTIONS: dict[str, type] = {
    "host": str,
    "port": int,
    "served-model-name": str,
    "tensor-parallel-size": int,
    "pipeline-parallel-size": int,
    "dtype": str,
    "max-model-len": int,
    "max-num-seqs": int,
    "max-num-batched-tokens": int,
    "quantization": str,
    "enable-lora": bool,
    "lora-modules": list,
    "max-loras": int,
    "max-lora-rank": int,
}
DTYPES = {"auto": "auto", "fp32": "float32", "bf16": "bfloat16"}
QUANTISATIONS = {"fp8": "fp8"}
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # the values that --max-lora-rank takes
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
API_KEY = "VLLM_API_KEY"  # on the command line every user of the machine could read the token
MAX_CONFIG_BYTES = 10_000_000
CONFIG = "vllm.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmRequest:
    folder: Path
    name: str
    host: str
    port: int
    tp: int = 1
    pp: int = 1
    dtype: str = "auto"
    quantise: str | None = None
    max_running: int | None = None
    max_step_tokens: int | None = None
    adapters: Mapping[str, Path] = field(default_factory=dict)


def vllm_options(request: VllmRequest) -> dict[str, Any]:
    """Return the options of `vllm serve`, as its configuration file has them. Raises UserError if vLLM cannot do it."""
    if request.quantise is not None and request.quantise not in QUANTISATIONS:
        raise UserError("U013.vllm-not-quantise", where="--quantise", quantise=request.quantise)
    options: dict[str, Any] = {
        "host": request.host,
        "port": request.port,
        "served-model-name": request.name,
        "tensor-parallel-size": request.tp,
        "pipeline-parallel-size": request.pp,
        "dtype": DTYPES[request.dtype],
    }
    if request.quantise is not None:
        options["quantization"] = QUANTISATIONS[request.quantise]
    if request.max_running is not None:
        options["max-num-seqs"] = request.max_running
    if request.max_step_tokens is not None:
        options["max-num-batched-tokens"] = request.max_step_tokens
    if request.adapters:
        ranks = []
        for name, folder in request.adapters.items():
            config = read_json(folder / "adapter_config.json", limit_bytes=MAX_CONFIG_BYTES)
            if config.get("peft_type") != "LORA" or config.get("use_dora"):
                raise UserError("U013.adapter-not-plain", where=f"--adapter {name}={folder}", name=name)
            ranks.append(int(config.get("r", 8)))
        rank = next((each for each in LORA_RANKS if each >= max(ranks)), None)
        if rank is None:
            raise UserError("U013.adapter-rank-vllm", where="--adapter", most=max(ranks), lora_ranks=LORA_RANKS[-1])
        modules = [json.dumps({"name": name, "path": str(folder)}) for name, folder in request.adapters.items()]
        options |= {
            "enable-lora": True,
            "lora-modules": modules,
            "max-loras": len(request.adapters),
            "max-lora-rank": rank,
        }
    for name, value in options.items():
        assert name in OPTIONS, f"vllm serve has no --{name}"
        assert type(value) is OPTIONS[name], f"--{name} takes {OPTIONS[name].__name__}, not {value!r}"
    return options


def check_folder(folder: Path) -> None:
    config = read_json(folder / "config.json", limit_bytes=MAX_CONFIG_BYTES)
    if not config.get("architectures"):
        raise UserError("U013.config-json-names", where=str(folder / "config.json"))
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise UserError("U013.model-no-tokenizer", where=str(folder))


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
    options = vllm_options(request)
    command = ["vllm", "serve", str(request.folder), "--config", CONFIG]
    # As a person types it; the token is in the environment.
    shown = f"{API_KEY}=TOKEN {shlex.join(command)}"
    return {"export": export, "command": command, "shown": shown, "config": options,
            "config_text": yaml.safe_dump(options, sort_keys=False)}  # fmt: skip


def serve_with_vllm(request: VllmRequest, export: list[str], token: str) -> int:
    """Export if it is needed, start vLLM and return its exit code. SIGTERM and Ctrl-C reach it: it drains itself."""
    options = vllm_options(request)
    program = shutil.which("vllm")
    if program is None:
        raise UserError("U013.vllm-not-installed", where="--engine vllm")
    if export:
        done = subprocess.run(export, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            try:  # `trimaran export --json` prints its mistake
                mistake = json.loads(done.stdout.splitlines()[-1])["error"]
                raise UserError(mistake["code"], mistake["what"], where=mistake["where"], fix=mistake["fix"])
            except (ValueError, KeyError, IndexError):
                raise UserError("U013.weights-could", where="trimaran export") from None
    check_folder(request.folder)
    with tempfile.TemporaryDirectory(prefix="trimaran-vllm-") as folder:
        config = Path(folder) / CONFIG
        config.write_text(yaml.safe_dump(options, sort_keys=False), encoding="utf-8")
        command = [program, "serve", str(request.folder), "--config", str(config)]
        process = subprocess.Popen(command, env={**os.environ, API_KEY: token})
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda received, _: process.send_signal(received))
        return process.wait()
