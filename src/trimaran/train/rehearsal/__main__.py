"""`python -m trimaran.train.rehearsal TASK ANSWER`: runs one rank of a plan alone, and writes what it needed.

TASK and ANSWER are JSON files, see `rank_task.py`. The process is the rank: if it runs out of memory or crashes, the
command that started it goes on.
"""

import faulthandler
import logging
import sys
from pathlib import Path

import torch

from trimaran.core import EXIT_DONE, UserError
from trimaran.planner import RankAnswer, RankTask
from trimaran.runs import says_out_of_memory
from trimaran.train.rehearsal.rehearsed_rank import rehearse_rank


def main() -> int:
    faulthandler.enable()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    task = RankTask.from_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
    Path(sys.argv[2]).write_text(answer_of(task).as_json(), encoding="utf-8")
    return EXIT_DONE


def answer_of(task: RankTask) -> RankAnswer:
    """Return how the rank ended. Errors that are neither the user's nor a lack of memory are raised."""
    on_gpu = torch.cuda.is_available() and not task.on_cpu
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    name = torch.cuda.get_device_name(device) if on_gpu else "cpu"
    try:
        measured = rehearse_rank(task.recipe, task.plan, task.rank, steps=task.steps, cache=task.cache, device=device)
    except UserError as error:
        return RankAnswer(status="refused", device=name, message=error.what, error=error.as_dict())
    except Exception as error:
        if not says_out_of_memory(f"{type(error).__name__}: {error}"):
            raise
        return RankAnswer(status="out of memory", device=name, message=str(error).splitlines()[0])
    return RankAnswer(status="measured", device=name, measured=measured)


if __name__ == "__main__":
    sys.exit(main())
