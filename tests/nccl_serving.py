"""`python -m tests.nccl_serving FOLDER GROUP`: serving ranks of one GPU over NCCL answer as one rank does.

Prints the answers of each split as a line of JSON. A process of its own, because it forks ranks that use the GPU. It
imports no transformers, and lets a forked process save the models: torchao, which transformers imports if it is there,
asks for the GPU's capability on import, and a process forked after that cannot use CUDA.
"""

import json
import os
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tests.ranks import run_ranks
from tests.serving_models import DENSE, PROMPTS, SPECS, TOKENS, save_spec
from tests.serving_ranks import SETTINGS, answers, on_ranks, outputs_of, requests_for, served
from trimaran.launch import SHARE_GPUS, shared_gpu_environment
from trimaran.serve import BatchingEngine, RankedRunner, ServedModel

# As in tests/dist/test_serving_adapters.py: slices for two ranks are multiples of 128 inputs.
WIDE = replace(DENSE, layers=2, hidden=256, heads=4, kv_heads=2, head_dim=64, ffn=512, tied=False)


@dataclass(frozen=True, slots=True)
class Case:
    """A model over some ranks. `kind` are quantised weights, in a network that computes in bf16; or these, "bf16"."""

    model: str
    tp: int = 1
    pp: int = 1
    kind: Any = None


SPLITS = [(1, 1), (2, 1), (1, 2), (2, 2)]
GROUPS = {
    "splits": [*(Case("dense", *each) for each in SPLITS), Case("experts"), Case("experts", 2), Case("hf"),
               Case("hf", 2)],
    "adapters": [Case("adapters", *each) for each in SPLITS[:3]],
    "quantised": [Case("wide", tp, kind=kind) for kind in ("bf16", "int8", "int4", "fp8") for tp in (1, 2)],
}  # fmt: skip


def save_models(folder: Path, group: str) -> None:
    """Save the models of a group of cases. Imports transformers."""
    from tests.dist.test_serving_adapters import SPEC, save_adapters  # noqa: PLC0415
    from tests.engine_models import save_model  # noqa: PLC0415
    from trimaran.core import ModelSection  # noqa: PLC0415

    names = {case.model for case in GROUPS[group]}
    for name, spec in (("dense", SPECS["tied-odd-vocabulary"]), ("experts", SPECS["experts"]), ("wide", WIDE)):
        if name in names:
            save_spec(spec, folder / name)
    if "hf" in names:
        save_model("llama", folder / "hf")
    if "adapters" in names:
        base = save_spec(SPEC, folder / "base")
        save_adapters(ModelSection(path=str(base)), base, folder / "adapters")


def model_of(case: Case, folder: Path) -> ServedModel:
    if case.model == "adapters":
        adapters = {each.name: each for each in sorted((folder / "adapters").iterdir())}
        return served(folder / "base", num_pages=64, adapters=adapters)
    if case.kind is not None:
        quantise = None if case.kind == "bf16" else case.kind
        return served(folder / case.model, dtype=torch.bfloat16, quantise=quantise, num_pages=64)
    return served(folder / case.model, "hf" if case.model == "hf" else "decoder")


def answers_on_gpu(case: Case, folder: Path) -> Any:
    """Return what rank 0 finds; 0 on other ranks."""
    os.environ.update(shared_gpu_environment({SHARE_GPUS: "1"}, int(os.environ["RANK"])))
    use = likelihoods if case.kind is not None else tokens_of_all
    return on_ranks(model_of(case, folder), case.tp, case.pp, use, device="cuda:0")


def tokens_of_all(runner: RankedRunner) -> dict[str, Any]:
    prompts = [[each % 96 for each in prompt] for prompt in PROMPTS]  # of the smallest vocabulary
    requests = requests_for(prompts, TOKENS)
    chosen = (None, *runner.traits.adapters)
    requests = [replace(each, adapter=chosen[number % len(chosen)]) for number, each in enumerate(requests)]
    tokens, stats = answers(runner, requests)
    return {"tokens": tokens, "preemptions": stats.preemptions}


def likelihoods(runner: RankedRunner) -> dict[str, Any]:
    """Return log-probabilities: of all tokens of some texts, and of the likeliest first and second tokens after them.

    The names of second ones have the first token: they can be compared if it is the same.
    """
    texts = [[(7 * number + seed) % 97 for number in range(40)] for seed in (1, 5, 11, 13, 17)]
    engine = BatchingEngine(runner, SETTINGS)
    found: dict[str, Any] = {}
    for request in requests_for(texts, 1, prompt_logprobs=True, logprobs=0):
        engine.add(request)
    for output in outputs_of(engine):
        assert output.finish != "error", output.error
        found[f"text {output.request}"] = output.prompt_logprobs[1:]
    first: dict[str, int | None] = {}
    for request in requests_for(texts, 2, logprobs=5):
        engine.add(request)
    for output in outputs_of(engine):
        assert output.finish != "error", output.error
        after = f" and {first[output.request]}" if output.request in first else ""
        found[f"after {output.request}{after}"] = sorted((logprob for _, logprob in output.top), reverse=True)
        first[output.request] = output.token
    return {"likelihoods": found}


def main() -> None:
    folder, group = Path(sys.argv[1]), sys.argv[2]
    run_ranks(1, save_models, folder, group)
    assert "transformers" not in sys.modules, "see above"
    for case in GROUPS[group]:
        found = run_ranks(case.tp * case.pp, answers_on_gpu, case, folder, timeout=200.0)[0]
        print(json.dumps(asdict(case) | found), flush=True)


if __name__ == "__main__":
    from tests import nccl_serving  # ranks import functions and cases by their names

    nccl_serving.main()
