"""How the plans of a question may compute the loss: fused, or chunked where memory is short."""

from typing import NamedTuple

from trimaran.core.plugins import KINDS
from trimaran.cost.job import ELEMENT_BYTES, chunk_rows
from trimaran.planner.question import Question

FUSED, CHUNKED = "fused", "chunked"


class LossChoices(NamedTuple):
    """What a question leaves open about the loss.

    pinned: the user's choice; empty if there is none.
    can_fuse: whether the head can be fused with the loss.
    rows, outputs: rows of one sample's logits, and their columns.
    """

    pinned: str
    can_fuse: bool
    rows: int
    outputs: int

    @property
    def pins_fusion(self) -> bool:
        """Whether the user pinned a loss that neither tp nor pp allows."""
        return self.pinned in (FUSED, CHUNKED)

    def on(self, tp: int, pp: int, wanted: str = "") -> str:
        """Return how the loss is computed on such a mesh: as pinned, else as wished, else fused if possible.

        A tensor-parallel rank has no complete row of logits, and a pipeline stage must return them.
        """
        if self.pinned:
            return self.pinned
        return (wanted or FUSED) if self.can_fuse and tp == pp == 1 else "logits"

    def can_chunk(self, micro_batch: int, *, tp: int, pp: int, cp: int) -> bool:
        """Return whether a chunked loss is possible, and the logits of a micro-batch exceed one chunk."""
        if self.pinned or not self.can_fuse or tp * pp > 1:
            return False
        rows = micro_batch * self.rows // cp
        return chunk_rows(rows, self.outputs, ELEMENT_BYTES["bf16"]) < rows


def losses_of(question: Question) -> LossChoices:
    """Return the choices that the question leaves open.

    Only our trainer fuses head and loss, only for language models, and only if nothing comes between the two.
    """
    pins, outline = question.pins, question.outline
    ours = question.stack.name == "trimaran" and not pins.engine_traits.needs_logits
    main = outline.main if outline else None
    has_logits = main is not None and main.outputs > 0 and main.bare_head
    is_plugin = question.recipe.objective.name not in KINDS["objective"].reserved  # which takes logits
    return LossChoices(
        pinned=pins.loss if "loss" in pins.model_fields_set else "",
        can_fuse=ours and has_logits and not is_plugin,
        rows=main.sample_positions(question.recipe.data.seq_len)[0] if main else 0,
        outputs=main.outputs if main else 0,
    )
