"""What any network is, on paper: towers of layers, in the order of the forward. The planner's view of every model."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from trimaran.core import Bytes, Flops
from trimaran.models.spec import ExpertSpec, ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Keys and values through a narrow middle, as in DeepSeek's attention. `query_rank` 0: queries go straight."""

    query_rank: int
    kv_rank: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OutlineLayer:
    """One transformer block: attention, then a feed-forward or experts. Without heads it is a feed-forward alone.

    `head_dim` is that of queries and keys. `window` 0 means that attention sees everything that `causal` leaves.
    `extras` counts the parameters that belong to no product: norms, biases, gates. With `qk_norm` the heads of queries
    and keys are normed.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    gated: bool = True
    experts: ExpertSpec | None = None
    latent: Latent | None = None
    causal: bool = True
    window: int = 0
    qk_norm: bool = False
    extras: int = 0

    @property
    def value_dim(self) -> int:
        return self.latent.value_dim if self.latent else self.head_dim

    @property
    def attention_weights(self) -> int:
        """Weights of the products around attention."""
        query, output = self.heads * self.head_dim, self.heads * self.value_dim
        if (latent := self.latent) is None:
            return self.hidden * (query + 2 * self.kv_heads * self.head_dim + output)
        narrow = latent.query_rank
        queries = narrow * (self.hidden + query) if narrow else self.hidden * query
        widened = self.heads * (self.head_dim - latent.rope_dim + latent.value_dim)
        return queries + self.hidden * (latent.kv_rank + latent.rope_dim + output) + latent.kv_rank * widened

    @property
    def matrices(self) -> int:
        """Products of one feed-forward: a gate makes it three."""
        return 3 if self.gated else 2

    @property
    def expert_weights(self) -> int:
        """Weights of all routed experts: what expert parallelism spreads. 0 in a dense layer."""
        return self.matrices * self.hidden * self.experts.ffn * self.experts.num_experts if self.experts else 0

    @property
    def router_weights(self) -> int:
        return self.hidden * (self.experts.num_experts + self.experts.shared_gate) if self.experts else 0

    @property
    def dense_weights(self) -> int:
        """Weights of the products that every token passes and tensor parallelism splits; no router."""
        ffn = self.experts.shared_ffn if self.experts else self.ffn
        return self.attention_weights + self.matrices * self.hidden * ffn

    @property
    def active_ffn(self) -> int:
        """Features of the feed-forward that a token passes: of its experts and the shared one together."""
        return self.experts.top_k * self.experts.ffn + self.experts.shared_ffn if self.experts else self.ffn

    @property
    def active_weights(self) -> int:
        """Weights that a token is multiplied with."""
        routed = self.matrices * self.hidden * self.experts.ffn * self.experts.top_k if self.experts else 0
        return self.dense_weights + self.router_weights + routed

    @property
    def parameters(self) -> int:
        return self.dense_weights + self.expert_weights + self.router_weights + self.extras

    def seen(self, length: int) -> float:
        """Return how many keys a query meets on average in a sequence of `length`.

        Where it is causal, the first queries of a sequence do not fill the window yet; without a window, half remain.
        """
        reach = min(length, self.window) if self.window else length
        return reach * (1 - reach / (2 * length)) if self.causal else float(reach)

    def flops(self, positions: int, length: int) -> Flops:
        """Return the operations of a forward over `positions`, in sequences of `length`."""
        attention = self.heads * (self.head_dim + self.value_dim) * self.seen(length)
        return Flops(2.0 * positions * (self.active_weights + attention))


@dataclass(frozen=True, slots=True, kw_only=True)
class Opaque:
    """A block of which only totals are known: what one sample cost when it was traced, in its own precision.

    `saved_bytes` are kept for backward, `moved_bytes` pass between memory and the processor, `output_bytes` go on to
    the next block. No axis but the data's and the pipeline's can cut it.
    """

    name: str
    parameters: int
    sample_flops: Flops
    saved_bytes: Bytes
    moved_bytes: Bytes
    output_bytes: Bytes
    num_kernels: int = 1

    def flops(self, positions: int, length: int) -> Flops:
        """Return the operations of a forward over one sample; it was traced at its own size."""
        return self.sample_flops


@dataclass(frozen=True, slots=True, kw_only=True)
class Tower:
    """A stack of blocks: language, vision, a projector between them.

    `runs` are equal blocks with their number. `vocab` are the rows of an embedding, `outputs` the scores of a head at
    each position, 0 where there is none, and `bare_head` that these are its product alone: no bias, scale or cap comes
    before the loss. `extras` are parameters in no layer besides these two. A sample has `positions` here (0: the
    sequence length of the data), and attention stays in segments of them (0: all of them).
    """

    name: str
    runs: tuple[tuple[OutlineLayer | Opaque, int], ...]
    hidden: int
    vocab: int = 0
    outputs: int = 0
    bare_head: bool = True
    tied: bool = False
    extras: int = 0
    positions: int = 0
    segment: int = 0
    frozen: bool = False

    @property
    def layers(self) -> int:
        return sum(count for _, count in self.runs)

    @property
    def embedding_parameters(self) -> int:
        return self.vocab * self.hidden

    @property
    def head_parameters(self) -> int:
        return self.outputs * self.hidden

    @property
    def parameters(self) -> int:
        """All distinct weights; a tied head counts once."""
        head = 0 if self.tied else self.head_parameters
        return (
            sum(block.parameters * count for block, count in self.runs) + self.embedding_parameters + head + self.extras
        )

    def places(self, seq_len: int) -> tuple[int, int]:
        """Return the positions of one sample here, and how many of them attention sees together."""
        positions = self.positions or seq_len
        return positions, self.segment or positions


class Step(NamedTuple):
    """One block of a forward, and the tower that it stands in."""

    tower: Tower
    block: OutlineLayer | Opaque


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """A whole network. `max_seq_len` 0 means that nothing limits it."""

    name: str
    towers: tuple[Tower, ...]
    max_seq_len: int = 0

    @property
    def num_parameters(self) -> int:
        return sum(tower.parameters for tower in self.towers)

    @property
    def trained_parameters(self) -> int:
        return sum(tower.parameters for tower in self.towers if not tower.frozen)

    @property
    def main(self) -> Tower:
        """The tower that ends in the loss: the last."""
        return self.towers[-1]

    @property
    def layers(self) -> int:
        return sum(tower.layers for tower in self.towers)

    def steps(self) -> Iterator[Step]:
        """Yield every block in the order of the forward."""
        for tower in self.towers:
            for block, count in tower.runs:
                yield from [Step(tower, block)] * count

    def passes(self, tower: Tower) -> int:
        """Return how many times a forward's arithmetic a tower does in forward and backward.

        Gradients cost as much again: those of its weights where it is trained, those of what comes in where it or any
        tower before it is.
        """
        reached = self.towers[: self.towers.index(tower) + 1]
        return 1 + (not tower.frozen) + any(not each.frozen for each in reached)

    def training_flops(self, seq_len: int) -> Flops:
        """Return the operations of one sample's forward and backward; an embedding is a lookup and costs nothing."""
        total = 0.0
        for tower in self.towers:
            positions, length = tower.places(seq_len)
            forward = sum(count * block.flops(positions, length) for block, count in tower.runs)
            total += self.passes(tower) * (forward + 2.0 * positions * tower.head_parameters)
        return Flops(total)


def outline_of(spec: ModelSpec) -> Outline:
    """Return the outline of our decoder with the shape `spec`."""
    block = spec.block
    biases = (spec.heads + 2 * spec.kv_heads) * spec.head_dim * block.qkv_bias
    layer = OutlineLayer(
        hidden=spec.hidden,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        ffn=spec.ffn,
        experts=block.experts,
        qk_norm=block.qk_norm,
        extras=2 * spec.hidden + biases + 2 * spec.head_dim * block.qk_norm,
    )
    tower = Tower(
        name="language",
        runs=((layer, spec.layers),),
        hidden=spec.hidden,
        vocab=spec.vocab,
        outputs=spec.vocab,
        tied=spec.tied,
        extras=spec.hidden,
    )
    return Outline(name=spec.name, towers=(tower,), max_seq_len=spec.max_seq_len)
