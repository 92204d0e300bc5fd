"""Host time that FSDP adds to a step: small models, whose device waits for the host, on one device and as one of eight.

    python benchmarks/fsdp_host_time.py

Prints measured and predicted milliseconds of each step; what FSDP adds, divided by its units, is `HostOverhead.unit`.
"""

import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).absolute().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import torch  # noqa: E402
from benchmarks.rehearsals import as_settings  # noqa: E402

from trimaran.app.plan.rehearse_answer import read_rehearse_request  # noqa: E402
from trimaran.data import cache_folder  # noqa: E402
from trimaran.planner.measure.rehearsal import predicted_rank  # noqa: E402
from trimaran.train.rehearsal.rehearsed_rank import rehearse_rank  # noqa: E402

ONE_GPU = {"precision": "bf16", "micro_batch": 1, "recompute": "none", "offload": "none", "cuda_graphs": False}
FSDP = {"mesh": {"dp_shard": 8}, "sharding": "parameters"}
SMALL_SCENES = {"height": 64, "width": 128, "cells": 32}
SMALL_DECODER = {"hidden": 256, "ffn": 1024, "heads": 4, "kv_heads": 4, "head_dim": 64, "vocab": 4096}
STEPS = 10


def perception(fusion_layers: int) -> dict[str, Any]:
    shape = SMALL_SCENES | {"fusion_layers": fusion_layers}
    model = {"model.family": "perception", "model.preset": "base", "model.shape": shape}
    return model | {"data.source": "scenes", "data.workers": 4, "plan": ONE_GPU | {"loss": "logits"}}


def decoder(layers: int, *, compiled: bool) -> dict[str, Any]:
    model = {"model.preset": "llama-3.2-1b", "model.shape": SMALL_DECODER | {"layers": layers}, "data.seq_len": 128}
    return model | {"data.workers": 0, "plan": ONE_GPU | {"loss": "fused", "compile": compiled}}


MODELS = {
    "perception, 6 fusion layers": perception(6),
    "perception, 12 fusion layers": perception(12),
    "decoder, 4 layers": decoder(4, compiled=False),
    "decoder, 12 layers": decoder(12, compiled=False),
    "decoder, 12 layers, compiled": decoder(12, compiled=True),
}


def step_seconds(fields: dict[str, Any]) -> tuple[float, float]:
    """Return the measured and the predicted seconds of a step of the first rank."""
    request = read_rehearse_request(None, {}, as_settings(fields), ranks="first", steps=STEPS, layers=0)
    cost = predicted_rank(request.job, request.device_cluster, request.plan, request.pp_rank_of(0))
    device = torch.device("cuda", 0)
    measured = rehearse_rank(
        request.recipe, request.plan, 0, steps=STEPS, cache=cache_folder(os.environ), device=device
    )
    return measured.step_seconds, cost.seconds


def main() -> None:
    print("| model | one device ms | predicted | one of 8 with FSDP ms | predicted |\n|---|---|---|---|---|")
    for name, fields in MODELS.items():
        alone = step_seconds(fields | {"cluster": "1xH200", "train.global_batch": 1})
        sharded = step_seconds(fields | {"cluster": "8xH200", "train.global_batch": 8, "plan": fields["plan"] | FSDP})
        print(f"| {name} |", " | ".join(f"{1e3 * each:.1f}" for each in (*alone, *sharded)), "|", flush=True)


if __name__ == "__main__":
    main()
