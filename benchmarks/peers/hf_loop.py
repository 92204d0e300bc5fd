"""A plain loop around transformers' own model: bf16 parameters, fp32 masters in fused AdamW, its grouped experts.

`experts` in the options names another implementation of transformers' experts than its default, the grouped matmul.
"""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from benchmarks.peers.hf_trainer import build
from benchmarks.peers.plain_loop import MasterWeights, batches_on
from benchmarks.peers.timer import Timer
from benchmarks.peers.work import Work
from torch.nn import functional as F


def ready(work: Work) -> Callable[[Timer], dict[str, Any]]:
    return lambda timer: _train(work, timer)


def _train(work: Work, timer: Timer) -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build(work).to(torch.float32 if work.precision == "fp32" else torch.bfloat16).train()
    if experts := work.options.get("experts"):
        model.set_experts_implementation(experts)
    if work.compile:
        model.compile()
    optimizer, batches, losses = MasterWeights(list(model.parameters())), batches_on(work, device), []
    for _ in range(work.all_steps):
        rows = next(batches)
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())
        loss.backward()
        optimizer.update()
        losses.append(loss.detach())
        timer.step()
    version = f"transformers {transformers.__version__}, experts {model.config._experts_implementation}"
    return {"first_loss": losses[0].item(), "last_loss": losses[-1].item(), "version": version}
