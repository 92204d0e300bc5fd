"""`python -m tests.nccl_serving FOLDER`: serving ranks of one GPU over NCCL, and one process, answer the same requests.

Prints the tokens of each split as a line of JSON. A process of its own, because it forks ranks that use the GPU.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from tests.dist.test_serving_ranks import PROMPTS, SPECS, TOKENS, save_spec
from tests.engine_models import save_model
from tests.ranks import run_ranks
from tests.serving_ranks import answers, on_ranks, requests_for, served
from trimaran.infer.ranks.serving_rank import ServedModel
from trimaran.launch.shared_gpu import SHARE_GPUS, shared_gpu_environment

SPLITS = {"dense": [(2, 1), (1, 2), (2, 2)], "experts": [(2, 1)], "hf": [(2, 1)]}


def models(folder: Path) -> dict[str, ServedModel]:
    return {
        "dense": served(save_spec(SPECS["tied-odd-vocabulary"], folder / "dense")),
        "experts": served(save_spec(SPECS["experts"], folder / "experts")),
        "hf": served(save_model("llama", folder / "hf"), "hf"),
    }


def answers_on_gpu(model: ServedModel, tp: int, pp: int) -> Any:
    """Return the tokens of each request, and the number of preemptions, on rank 0."""
    os.environ.update(shared_gpu_environment({SHARE_GPUS: "1"}, int(os.environ["RANK"])))
    prompts = [[each % 96 for each in prompt] for prompt in PROMPTS]  # of the smallest vocabulary
    found = on_ranks(model, tp, pp, answers, requests_for(prompts, TOKENS), device="cuda:0")
    return found if isinstance(found, int) else (found[0], found[1].preemptions)


def main() -> None:
    for name, model in models(Path(sys.argv[1])).items():
        for tp, pp in [(1, 1), *SPLITS[name]]:
            tokens, preemptions = run_ranks(tp * pp, partial(answers_on_gpu, model, tp, pp), timeout=200.0)[0]
            line = {"model": name, "tp": tp, "pp": pp, "tokens": tokens, "preemptions": preemptions}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
