"""All steps of a run in bounded memory: the latest one by one, the earlier ones as sums of neighbouring steps."""

from collections.abc import Iterator, Sequence

from trimaran.runs import MAX_NOT_FINITE, SCALARS, Extent, StepBlock, StepLine, block_of, join_extents, not_finite

MAX_STEPS = 2048  # that stay single at least; up to twice as many
MAX_BLOCKS = 2048  # or up to twice as many


class StepHistory:
    """The steps of a run: the latest 2,048 to 4,096 are single, in `steps`; earlier ones are joined in `blocks`."""

    def __init__(self, *, max_steps: int = MAX_STEPS, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_steps, self._max_blocks = max_steps, max_blocks
        self.first: StepLine | None = None
        self.steps: list[StepLine] = []
        self.blocks: list[StepBlock] = []
        self._num_in_blocks = 0
        self._extents: dict[str, list[Extent]] = {}  # of the present steps, as a frame asks for them several times
        self._whole: dict[str, Extent | None] = {}

    def add(self, step: StepLine) -> None:
        """Add a step. It replaces steps that were withdrawn and are repeated."""
        if (self.steps and self.steps[-1].step >= step.step) or (self.blocks and self.blocks[-1].last >= step.step):
            self._clear()
        while self.steps and self.steps[-1].step >= step.step:
            self.steps.pop()
        while self.blocks and self.blocks[-1].last >= step.step:
            # The reader notices the replay at its next poll, and everything is read again.
            self._num_in_blocks -= self.blocks.pop().count
        if not self.steps and not self.blocks:
            self.first = step
        self.steps.append(step)
        for name, found in self._extents.items():
            found += _single_extents(name, [step])
        self._whole.clear()
        if len(self.steps) > 2 * self._max_steps:
            self._fold(keep=self._max_steps)

    def add_block(self, block: StepBlock) -> None:
        """Add a block of the index. Steps come before it and after it."""
        self._clear()
        if self.steps:
            self._fold(keep=0)
        self.blocks.append(block)
        self._num_in_blocks += block.count
        self._limit_blocks()

    @property
    def count(self) -> int:
        return self._num_in_blocks + len(self.steps)

    @property
    def not_finite(self) -> list[int]:
        """The first steps whose loss or gradient norm was NaN or Inf, at most `MAX_NOT_FINITE`."""
        found = [step for block in self.blocks for step in block.not_finite]
        return [*found, *(step.step for step in self.steps if not_finite(step))][:MAX_NOT_FINITE]

    def extents(self, name: str) -> list[Extent]:
        """Return the extents of one of `SCALARS` in order: one for each block and each step with finite values."""
        if name not in self._extents:
            found = [block.scalars[name] for block in self.blocks if name in block.scalars]
            self._extents[name] = [*found, *_single_extents(name, self.steps)]
        return self._extents[name]

    def extent(self, name: str) -> Extent | None:
        """Return the extent of one of `SCALARS` over the whole run; None if no value is finite."""
        if name not in self._whole:
            extents = self.extents(name)
            self._whole[name] = join_extents(extents) if extents else None
        return self._whole[name]

    def _clear(self) -> None:
        self._extents, self._whole = {}, {}

    def _fold(self, *, keep: int) -> None:
        """Put all steps but the last `keep` into blocks."""
        self._clear()
        size, end = self._block_steps, len(self.steps) - keep
        for begin in range(0, end, size):
            self.blocks.append(block_of(self.steps[begin : min(begin + size, end)]))
            self._num_in_blocks += self.blocks[-1].count
        del self.steps[:end]
        self._limit_blocks()

    def _limit_blocks(self) -> None:
        """Join neighbouring blocks once there are too many."""
        if len(self.blocks) < 2 * self._max_blocks:
            return
        size, joined = self._block_steps, self.blocks[:1]
        for block in self.blocks[1:]:
            if joined[-1].count + block.count <= size:
                joined[-1] = joined[-1].join(block)
            else:
                joined.append(block)
        self.blocks = joined

    @property
    def _block_steps(self) -> int:
        """How many steps a block may have: a power of two."""
        size = 1
        while size * self._max_blocks < self.count:
            size *= 2
        return size


def _single_extents(name: str, steps: Sequence[StepLine]) -> Iterator[Extent]:
    value_of = SCALARS[name]
    for step in steps:
        value = value_of(step)
        if value - value == 0:  # neither NaN nor Inf
            point = (step.step, value)
            yield Extent(1, value, point, point, point, point)
