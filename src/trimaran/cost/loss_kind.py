"""How head and loss are computed (`Plan.loss`), and how many rows of logits exist at a time."""

from trimaran.core import Plan
from trimaran.cost.job import Job

# Limits of one chunk of a chunked loss. Fewer than MIN_CHUNK_ROWS do not fill a device; whole tiles have TILE_ROWS
# rows.
MAX_CHUNK_BYTES, MIN_CHUNK_ROWS, TILE_ROWS = 2**28, 1024, 128
# The gradient of the head's weight is accumulated over the chunks in fp32.
FP32_BYTES = 4


def loss_of(job: Job, plan: Plan) -> str:
    """Return how the loss is computed: as the plan says where our trainer can fuse it, else from full logits.

    Tensor and pipeline parallelism need the logits, and so does a model whose logits are more than one matmul.
    Other stacks' losses are part of their profiles.
    """
    is_ours = job.stack.name == "trimaran" and not plan.engine_traits.needs_logits
    can_fuse = plan.mesh.tp == plan.mesh.pp == 1 and job.outline.main.bare_head
    return plan.loss if is_ours and can_fuse else "logits"


def chunk_rows(rows: int, outputs: int, element_bytes: int) -> int:
    """Return how many rows of logits a chunked loss computes at a time."""
    fitting = MAX_CHUNK_BYTES // (element_bytes * max(1, outputs))
    return max(1, min(rows, max(MIN_CHUNK_ROWS, fitting - fitting % TILE_ROWS)))
