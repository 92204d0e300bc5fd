"""The planner's predictions for published runs and for our own trainer on one H200."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.accuracy.errors import Case
from benchmarks.accuracy.former import FORMER
from benchmarks.accuracy.published import Run

from trimaran.core import ModelSection, Plan
from trimaran.cost import STACKS, STATE_BYTES, Job, predict
from trimaran.machine import parse_cluster
from trimaran.models import outline_of, spec_of
from trimaran.planner.predict_bulk import predict_line

H200 = Path(__file__).parents[1] / "h200.jsonl"
HELD_OUT = Path(__file__).parents[1] / "h200_held_out.jsonl"
SMALL = Path(__file__).parents[1] / "h200_small.jsonl"
# Our accuracy bounds cover decoders of 1B, 3B and 8B with AdamW in fp32 and no offload.
PROMISED = {"offload": "none", "states": "fp32", "precision": "bf16"}


def ask(runs: Iterable[Run]) -> list[Case]:
    """Return the answer of `trimaran predict` to each run's line."""
    return [_case(run, predict_line(run.line)) for run in runs]


def _case(run: Run, answer: dict[str, Any]) -> Case:
    return Case(
        run=run,
        peak_bytes=answer["peak_bytes"],
        tokens_per_second_per_gpu=answer["tokens_per_second_per_gpu"],
        fits=answer["fits"],
    )


def question_of(config: dict[str, Any]) -> tuple[Job, Plan]:
    """Return job and plan of a row of h200.jsonl: with today's profile, or that of the time of the measurement."""
    spec = spec_of(ModelSection(preset=config["preset"], shape=config["shape"]))
    fields = ("micro_batch", "grad_accum", "precision", "recompute", "offload", "compile", "loss", "sharding")
    plan = Plan(**{field: config[field] for field in fields if field in config}, cuda_graphs=has_graphs(config))
    stack = FORMER if config.get("older") else STACKS["trimaran"]
    states = STATE_BYTES[config["states"]]
    return Job(outline=outline_of(spec), seq_len=config["seq_len"], stack=stack, state_bytes=states), plan


def has_graphs(config: dict[str, Any]) -> bool:
    """Return whether steps were captured as CUDA graphs. Rows without the field are from before the trainer could."""
    return config.get("cuda_graphs", False)


def own_cases(file: Path = H200) -> Iterator[Case]:
    """Yield the measurements of `benchmarks/planner.py` with their predictions."""
    cluster = parse_cluster("1xH200")
    for text in file.read_text().splitlines():
        config = json.loads(text)
        if "step_seconds" not in config:
            continue  # failed runs are in the table of `benchmarks/memory.py`
        job, plan = question_of(config)
        spec = spec_of(ModelSection(preset=config["preset"], shape=config["shape"]))
        found = predict(job, cluster, plan)
        model = {
            "layers": spec.layers, "hidden": spec.hidden, "heads": spec.heads, "kv_heads": spec.kv_heads,
            "head_dim": spec.head_dim, "ffn": spec.ffn, "vocab": spec.vocab, "seq_len": config["seq_len"],
            "gated": True, "tied": spec.tied,
        }  # fmt: skip
        if experts := spec.block.experts:
            model |= {"experts": experts.num_experts, "top_k": experts.top_k, "expert_ffn": experts.ffn}
        line = {"model": model, "cluster": {"gpu": "H200", "gpus": 1}, "plan": plan.model_dump(exclude_unset=True)}
        run = Run(
            line=line | {"stack": "trimaran"},
            model=config["preset"],
            gpus=1,
            peak_gib=config["peak_bytes"] / 2**30 if "peak_bytes" in config else None,
            tokens_per_second_per_gpu=config["tokens_per_second"],
            step_seconds=config["step_seconds"],
            failed=False,
            row=config,
        )
        yield Case(
            run=run,
            peak_bytes=found.peak_bytes,
            tokens_per_second_per_gpu=found.tokens_per_second,
            fits=found.fits,
        )


def promised(case: Case) -> bool:
    """Return whether our accuracy bounds cover the run."""
    row: dict[str, Any] = dict(case.run.row)
    models = ("llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b")
    return case.run.model in models and PROMISED.items() <= row.items()


def today(case: Case) -> bool:
    """Return whether the run was measured with the current trainer, after its loss was fused."""
    return not case.run.row.get("older")


def clean(case: Case) -> bool:
    """Return whether the times of a nanotron run are reliable: no pipeline, tp inside a node, up to 128 GPUs."""
    mesh = case.run.line["plan"]["mesh"]
    return mesh["pp"] == 1 and mesh["tp"] <= 8 and case.run.gpus <= 128
