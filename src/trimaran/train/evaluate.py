"""The loss on held-out sequences, the same number under every plan."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from trimaran.core import Recipe
from trimaran.data.feed import BatchFeed
from trimaran.data.loader import Loader
from trimaran.run import Journal
from trimaran.train.agreement import Poll
from trimaran.train.loss.objective import Objective
from trimaran.train.process.stop_request import StopRequest
from trimaran.train.process.supervisor_link import SupervisorLink
from trimaran.train.steppers.stepper import Stepper


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """Measures the mean loss over a fixed set of held-out samples; there may be none."""

    recipe: Recipe
    feed: BatchFeed | None
    stepper: Stepper
    objective: Objective
    journal: Journal
    device: torch.device
    counts_samples: bool
    stop: StopRequest
    link: SupervisorLink

    @torch.no_grad()
    def run(self, *, step: int) -> bool:
        """File the held-out loss as an event, and return whether to stop: then all ranks left early, without a result.

        Every batch asks whether any rank wishes to stop, so that nobody waits for the end of a long evaluation.
        """
        batches = self.recipe.train.evaluate.batches
        if not batches or self.feed is None:
            return False
        scores = self.objective.scores
        sums, stop = torch.zeros(2 + 2 * len(scores), dtype=torch.float64, device=self.device), False
        self.stepper.set_training(False)
        with Loader(self.feed, steps=batches) as loader:
            for host_batch in loader:
                self.link.enter("evaluation", step)
                poll = Poll(bool(self.stop)) if batches > 1 else None
                batch = host_batch.to(self.device)
                sums[1:] += self.stepper.evaluate(batch)
                sums[0] += batch.num_valid * self.counts_samples
                if stop := poll is not None and poll.wait():
                    break
        self.stepper.set_training(True)
        if stop:
            return True
        dist.all_reduce(sums)
        tokens, total, *found = sums.tolist()
        of = zip(scores, found[::2], found[1::2], strict=True)
        right = {name: hits / count for name, hits, count in of if count}
        told = {"accuracy": right} if right else {}
        self.journal.event("evaluation", step=step, loss=total / max(1, tokens), tokens=round(tokens), **told)
        return False
