"""Published measurements of others, as lines of `trimaran predict` with the measured figures."""

import csv
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "published"
ZERO = {0: "none", 1: "optimizer", 2: "gradients", 3: "parameters"}
GPUS = {"H100-80GB": "H100", "a100_40gb": "A100-40GB", "a100_80gb": "A100-80GB"}
QWEN3_30B_A3B = {
    "layers": 48, "hidden": 2048, "heads": 32, "kv_heads": 4, "head_dim": 128, "ffn": 6144, "vocab": 151936,
    "seq_len": 4096, "experts": 128, "top_k": 8, "expert_ffn": 768, "gated": True, "tied": False,
}  # fmt: skip


GROK1 = {
    "layers": 64, "hidden": 6144, "heads": 48, "kv_heads": 8, "head_dim": 128, "ffn": 32768, "vocab": 131072,
    "seq_len": 8192, "experts": 8, "top_k": 2, "expert_ffn": 32768, "gated": True, "tied": True,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One published run: the request, and what was measured. None: not published."""

    line: dict[str, Any]
    model: str
    gpus: int
    peak_gib: float | None
    tokens_per_second_per_gpu: float | None
    step_seconds: float | None
    failed: bool
    row: dict[str, str]


def nanotron() -> Iterator[Run]:
    """Yield the runs of the Ultra-Scale Playbook: Llama shapes on nodes of 8 H100; memory is rank 0's."""
    for row in _rows("nanotron_ultrascale"):
        yield _run(row, _model(row, gated=True, tied="tied embeddings" in row["notes"]), "nanotron")


def llm_foundry() -> Iterator[Run]:
    """Yield MosaicML's MPT table: FSDP on nodes of 8 A100, GPT blocks, tied head."""
    for row in _rows("llmfoundry_mpt"):
        yield _run(row, _model(row, gated=False, tied=True), "llm-foundry")


def megatron_7b() -> Iterator[Run]:
    """Yield the golden values of Megatron-LM's two 7B tests; memory is the last rank's."""
    for row in _rows("megatron_golden_values"):
        if row["model"].startswith("gpt/gpt3_7b"):
            row = row | {"vocab": "131072", "ffn": row["ffn"] or str(4 * int(row["hidden"]))}
            run = _run(row, _model(row, gated=False, tied=False), "megatron")
            run.line["plan"]["sequence_parallel"] = "sequence-parallel=True" in row["notes"]
            yield run


def korthikanti() -> Iterator[Run]:
    """Yield Tables 3 and 5 of arXiv 2205.05198: fp16 on A100, before flash attention and distributed optimizers."""
    for row in _rows("korthikanti22"):
        if row["global_batch"]:
            run = _run(row, _model(row, gated=False, tied=True), "megatron")
            run.line["plan"]["sequence_parallel"] = "no sequence parallel" not in row["notes"]
            yield run


def nvidia_405b() -> Iterator[Run]:
    """Yield the runs of Llama 3.1 405B and Grok-1, by which constants of Megatron were set."""
    return (run for run in nvidia() if not run.model.startswith("Nemotron"))


def nvidia_nemotron() -> Iterator[Run]:
    """Yield the runs of Nemotron-4, by which nothing was set."""
    return (run for run in nvidia() if run.model.startswith("Nemotron"))


def nvidia() -> Iterator[Run]:
    """Yield NVIDIA's recipes for DGX Cloud: Llama 3.1 405B, Nemotron-4 (squared ReLU, no gate) and Grok-1.

    They reduce gradients in bf16. The other models of its table have layers of several kinds, which a line cannot
    describe.
    """
    for row in _rows("nvidia_dgxc_2505"):
        is_grok = row["model"] == "Grok1-314B"
        if is_grok or row["hidden"]:
            model = GROK1 if is_grok else _model(row, gated=row["model"].startswith("llama"), tied=False)
            run = _run(row | {"act_ckpt": "none"}, model, "megatron")
            run.line["plan"]["gradient_dtype"] = "bf16"
            yield run


def torchtitan() -> Iterator[Run]:
    """Yield torchtitan's A100 table of 2024: compiled, except that nothing says so for single rows."""
    for row in _rows("torchtitan_a100"):
        row = row | {
            "act_ckpt": {"selective-layer": "2", "selective-op": "selective"}.get(row["act_ckpt"], row["act_ckpt"])
        }
        run = _run(row, _model(row, gated=True, tied=False), "torchtitan")
        run.line["plan"]["compile"] = True
        yield run


def internevo() -> Iterator[Run]:
    """Yield InternEvo's table: InternLM on nodes of 8 A100, ZeRO-1 inside groups that the notes name."""
    for row in _rows("internevo"):
        run = _run(row, _model(row, gated=True, tied=False), "megatron")
        group = re.match(r"zero1(?: group size |=)(\d+)", row["notes"])
        mesh = run.line["plan"]["mesh"]
        if group and (data := mesh.get("dp_shard", 1)) % int(group[1]) == 0:
            mesh |= {"dp_replicate": data // int(group[1]), "dp_shard": int(group[1])}
        yield run


def megatron_sc21() -> Iterator[Run]:
    """Yield Table 2 of arXiv 2104.04473, fp16 on A100, no flash attention; seconds by its own formula."""
    for row in _rows("megatron_sc21"):
        if not row["micro_batch"]:
            continue
        model = _model(row, gated=False, tied=True)
        stack = "deepspeed" if row["zero_stage"].startswith("3") else "megatron"
        layers, hidden, vocab, length = (model[key] for key in ("layers", "hidden", "vocab", "seq_len"))
        one = 96 * length * layers * hidden**2 * (1 + length / (6 * hidden) + vocab / (16 * layers * hidden))
        batch, gpus = int(row["global_batch"]), int(row["n_gpus"])
        seconds = batch * one / (gpus * float(row["tflops_per_gpu"]) * 1e12)
        yield _run(row | {"step_time_s": str(seconds)}, model, stack)


def bigscience() -> Iterator[Run]:
    """Yield the A100 runs that prepared BLOOM: Megatron-DeepSpeed before flash attention; memory is nvidia-smi's."""
    for row in _rows("bigscience"):
        if row["gpu"] == "A100-80GB" and all(row[key] for key in ("layers", "heads", "micro_batch", "global_batch")):
            yield _run(row, _model(row, gated=False, tied=True), "megatron")


def bridge() -> Iterator[Run]:
    """Yield Megatron-Bridge's runs of Llama-3 70B, and of Qwen3-30B-A3B over 16 GPUs."""
    for row in _rows("bridge_skills_memory"):
        if row["model"] == "Qwen3-30B-A3B":
            defaults = {"act_ckpt": "none", "gpu": "H100-80GB", "zero_stage": "1"}  # its recipes shard the optimizer
            run = _run(row | defaults, QWEN3_30B_A3B, "megatron")
            run.line["plan"]["gradient_dtype"] = "bf16"
            run.line["plan"]["mesh"]["ep"] = int(float(row["ep"]))
            yield run
        elif row["layers"] and "mlp" not in row["act_ckpt"]:
            gib = str(float(row["peak_mem_gib"]) * 1e9 / 2**30)
            row = row | {"act_ckpt": "selective", "peak_mem_gib": gib, "zero_stage": "1"}
            run = _run(row, _model(row, gated=True, tied=False), "megatron")
            run.line["plan"] |= {"precision": "fp8", "gradient_dtype": "bf16"}
            yield run


SOURCES: dict[str, Callable[[], Iterator[Run]]] = {
    "nanotron": nanotron,
    "llm-foundry": llm_foundry,
    "Megatron 7B": megatron_7b,
    "Korthikanti": korthikanti,
    "NVIDIA 405B, Grok-1": nvidia_405b,
    "NVIDIA Nemotron-4": nvidia_nemotron,
    "torchtitan": torchtitan,
    "InternEvo": internevo,
    "Megatron SC21": megatron_sc21,
    "BigScience": bigscience,
    "Megatron-Bridge": bridge,
}


def _model(row: dict[str, str], *, gated: bool, tied: bool) -> dict[str, Any]:
    sizes = {
        name: int(float(row[name])) for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq_len")
    }
    return {**sizes, "gated": gated, "tied": tied}


def _run(row: dict[str, str], model: dict[str, Any], stack: str) -> Run:
    tp, pp, cp, ep, rounds = (int(float(row[axis] or 1)) for axis in ("tp", "pp", "cp", "ep", "vp"))
    gpus, stage = int(float(row["n_gpus"] or 8)), row["zero_stage"]
    sharding = ZERO[int(float(stage or 0))]
    data = max(1, gpus // (tp * pp * cp))
    recompute = row["act_ckpt"]
    plan: dict[str, Any] = {
        "mesh": {"dp_shard" if sharding != "none" else "dp_replicate": data, "tp": tp, "pp": pp, "cp": cp},
        "micro_batch": int(float(row["micro_batch"])),
        "global_batch": int(float(row["global_batch"])),
        "precision": row["dtype"] if row["dtype"] in ("fp16", "fp8") else "bf16",
        "recompute": int(recompute) if recompute.isdigit() else recompute,
    }
    plan |= {"sharding": sharding} if stage else {}
    plan["mesh"] |= {"ep": ep} if ep > 1 else {}
    if rounds > 1 and (stages := _stages(model["layers"], pp * rounds)):
        plan["pipeline"] = {"schedule": "interleaved", "stages": stages}
    cluster = {"gpu": GPUS.get(row["gpu"], row["gpu"]), "gpus": gpus}
    cluster |= {} if row["gpu"] == "GB200" else {"gpus_per_node": min(8, gpus)}
    seconds, tokens = _number(row["step_time_s"]), _number(row["tokens_per_s_per_gpu"])
    if seconds and not tokens:
        tokens = plan["global_batch"] * model["seq_len"] / (seconds * gpus)
    return Run(
        line={"id": row["model"], "model": model, "cluster": cluster, "plan": plan, "stack": stack},
        model=row["model"],
        gpus=gpus,
        peak_gib=_number(row["peak_mem_gib"]),
        tokens_per_second_per_gpu=tokens,
        step_seconds=seconds,
        failed=row["status"] not in ("ok", ""),
        row=row,
    )


def _stages(layers: int, stages: int) -> list[int]:
    """Return the layers of each stage: equal ones, or one fewer at both ends, which hold embedding and head."""
    if layers % stages == 0:
        return [layers // stages] * stages
    size = (layers + 2) // stages
    return [size - 1, *[size] * (stages - 2), size - 1] if (layers + 2) % stages == 0 else []


def _number(text: str) -> float | None:
    return float(text) if text else None


def _rows(name: str) -> list[dict[str, str]]:
    with (FOLDER / f"{name}.csv").open(newline="") as file:
        return [row for row in csv.DictReader(file) if "SRC-INCONSISTENT" not in row["notes"]]
