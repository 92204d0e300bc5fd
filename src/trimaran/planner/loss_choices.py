"""How the head may meet the loss in the plans of a question: fused, or in pieces where memory is short."""

from typing import NamedTuple

from trimaran.cost.job import WIDTH
from trimaran.cost.loss_kind import piece_rows
from trimaran.models.perception_spec import PerceptionSpec
from trimaran.planner.question import Question

WHOLE, PIECES = "fused", "chunked"


class LossChoices(NamedTuple):
    """What a question leaves open: what a person `pinned`, or whether there is a head that the loss can be fused with.

    `rows` are those of the logits of one sample, `outputs` their columns.
    """

    pinned: str
    can_fuse: bool
    rows: int
    outputs: int

    @property
    def pins_fusion(self) -> bool:
        """Whether a person asked for a loss that neither slices nor stages can have."""
        return self.pinned in (WHOLE, PIECES)

    def on(self, tp: int, pp: int, wish: str = "") -> str:
        """Return how the loss is computed on such a mesh: as was pinned, or as wished, or fused where that can be.

        Slices have no whole row of logits, and a stage hands them on.
        """
        if self.pinned:
            return self.pinned
        return (wish or WHOLE) if self.can_fuse and tp == pp == 1 else "logits"

    def come_in_pieces(self, micro_batch: int, *, tp: int, pp: int, cp: int) -> bool:
        """Return whether pieces are open, and the logits of a micro-batch more than one of them."""
        if self.pinned or not self.can_fuse or tp * pp > 1:
            return False
        rows = micro_batch * self.rows // cp
        return piece_rows(rows, self.outputs, WIDTH["bf16"]) < rows


def losses_of(question: Question) -> LossChoices:
    """Return the ways that the question leaves open.

    Only our trainer fuses head and loss, only for language, and only where nothing comes between the two.
    """
    pins, outline = question.pins, question.outline
    ours = question.stack.name == "trimaran" and pins.engine == "torch"
    main = outline.main if outline else None
    speaks = main is not None and main.outputs > 0 and main.bare_head and not isinstance(question.spec, PerceptionSpec)
    return LossChoices(
        pinned=pins.loss if "loss" in pins.model_fields_set else "",
        can_fuse=ours and speaks,
        rows=main.places(question.recipe.data.seq_len)[0] if main else 0,
        outputs=main.outputs if main else 0,
    )
