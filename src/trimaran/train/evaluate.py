"""The loss on held-out sequences, the same number under every plan."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from trimaran.core import Recipe
from trimaran.data.loader import Loader, Share
from trimaran.data.sequences import Sequences
from trimaran.telemetry import Journal
from trimaran.train.stepper import Stepper


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """Measures the mean loss over a fixed set of held-out sequences."""

    recipe: Recipe
    sequences: Sequences
    share: Share
    stepper: Stepper
    journal: Journal
    device: torch.device
    counts_samples: bool

    @torch.no_grad()
    def run(self, *, step: int) -> float | None:
        """Return the held-out loss and file it as an event; None when nothing was held out."""
        batches = self.recipe.train.evaluate.batches
        if not batches or not len(self.sequences):
            return None
        self.stepper.set_training(False)
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        with Loader(self.sequences, seed=self.recipe.train.seed, share=self.share, steps=batches) as loader:
            for host_batch in loader:
                batch = host_batch.to(self.device)
                sums[0] += self.stepper.evaluate(batch)
                sums[1] += batch.num_valid * self.counts_samples
        dist.all_reduce(sums)
        self.stepper.set_training(True)
        total, tokens = sums.tolist()
        loss = total / max(1, tokens)
        self.journal.event("evaluation", step=step, loss=loss, tokens=round(tokens))
        return loss
