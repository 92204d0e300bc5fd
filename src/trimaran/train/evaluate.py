"""The loss on held-out sequences, the same number under every plan."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from trimaran.core import Recipe
from trimaran.data.loader import Loader, Share
from trimaran.data.quarantine import Screen
from trimaran.data.sequences import Sequences
from trimaran.telemetry import Journal
from trimaran.train.agreement import Poll
from trimaran.train.stepper import Stepper
from trimaran.train.stop import StopWish
from trimaran.train.ties import Ties


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
    stop: StopWish
    screen: Screen
    ties: Ties

    @torch.no_grad()
    def run(self, *, step: int) -> bool:
        """File the held-out loss as an event, and return whether to stop: then all ranks left early, without a result.

        Every batch asks whether any rank wishes to stop, so that nobody waits for the end of a long evaluation.
        """
        batches = self.recipe.train.evaluate.batches
        if not batches or not len(self.sequences):
            return False
        seed = self.recipe.train.seed
        sums, stop = torch.zeros(2, dtype=torch.float64, device=self.device), False
        self.stepper.set_training(False)
        with Loader(self.sequences, seed=seed, share=self.share, steps=batches, screen=self.screen) as loader:
            for host_batch in loader:
                self.ties.enter("evaluation", step)
                poll = Poll(bool(self.stop)) if batches > 1 else None
                batch = host_batch.to(self.device)
                sums[0] += self.stepper.evaluate(batch)
                sums[1] += batch.num_valid * self.counts_samples
                if stop := poll is not None and poll.wait():
                    break
        self.stepper.set_training(True)
        if stop:
            return True
        dist.all_reduce(sums)
        total, tokens = sums.tolist()
        self.journal.event("evaluation", step=step, loss=total / max(1, tokens), tokens=round(tokens))
        return False
