"""How the head meets the loss (`Plan.loss`), and how many rows of logits exist at a time."""

from trimaran.core import Plan
from trimaran.cost.job import Job

# What the logits of one piece may take, the fewest rows that still fill a device, and what makes up whole tiles.
PIECE_BYTES, FEWEST_ROWS, TILE_ROWS = 2**28, 1024, 128
# The gradient of the head's weight while its pieces are added up.
SUM_BYTES = 4


def loss_of(job: Job, plan: Plan) -> str:
    """Return how the loss is computed. Other systems have their own profile, and what is cut keeps its logits.

    So does a network that does more for them than the product of its head, whatever the plan says.
    """
    ours = job.stack.name == "trimaran" and plan.engine == "torch"
    whole = plan.mesh.tp == plan.mesh.pp == 1 and job.outline.main.bare_head
    return plan.loss if ours and whole else "logits"


def piece_rows(rows: int, outputs: int, width: int) -> int:
    """Return how many rows of logits a chunked loss has at a time, of so many outputs and bytes each."""
    fitting = PIECE_BYTES // (width * max(1, outputs))
    return max(1, min(rows, max(FEWEST_ROWS, fitting - fitting % TILE_ROWS)))
