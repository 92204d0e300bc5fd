"""The planner's view of any network: towers of layers in forward order, with their shapes."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from trimaran.core import Bytes, Flops
from trimaran.models.spec import ExpertSpec, ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Multi-head latent attention, as in DeepSeek: low-rank keys and values. `query_rank` 0: full-rank queries."""

    query_rank: int
    kv_rank: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OutlineLayer:
    """One transformer block: attention, then a feed-forward or experts. Without heads it is only a feed-forward.

    `head_dim` is that of queries and keys. `window` 0 is no window. `extras` counts the parameters outside matmuls:
    norms, biases, gates. `qk_norm` normalises the heads of queries and keys.
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
        """Weights of the matmuls around attention."""
        query, output = self.heads * self.head_dim, self.heads * self.value_dim
        if (latent := self.latent) is None:
            return self.hidden * (query + 2 * self.kv_heads * self.head_dim + output)
        narrow = latent.query_rank
        queries = narrow * (self.hidden + query) if narrow else self.hidden * query
        widened = self.heads * (self.head_dim - latent.rope_dim + latent.value_dim)
        return queries + self.hidden * (latent.kv_rank + latent.rope_dim + output) + latent.kv_rank * widened

    @property
    def matrices(self) -> int:
        """Matmuls of one feed-forward: three with a gate."""
        return 3 if self.gated else 2

    @property
    def expert_weights(self) -> int:
        """Weights of all routed experts, which expert parallelism distributes. 0 in a dense layer."""
        return self.matrices * self.hidden * self.experts.ffn * self.experts.num_experts if self.experts else 0

    @property
    def router_weights(self) -> int:
        return self.hidden * (self.experts.num_experts + self.experts.shared_gate) if self.experts else 0

    @property
    def dense_weights(self) -> int:
        """Weights of the matmuls that every token passes and tensor parallelism splits, without the router."""
        ffn = self.experts.shared_ffn if self.experts else self.ffn
        return self.attention_weights + self.matrices * self.hidden * ffn

    @property
    def active_ffn(self) -> int:
        """Feed-forward width that a token passes: its routed experts and the shared one together."""
        return self.experts.top_k * self.experts.ffn + self.experts.shared_ffn if self.experts else self.ffn

    @property
    def active_weights(self) -> int:
        """Weights that a token is multiplied with."""
        routed = self.matrices * self.hidden * self.experts.ffn * self.experts.top_k if self.experts else 0
        return self.dense_weights + self.router_weights + routed

    @property
    def parameters(self) -> int:
        return self.dense_weights + self.expert_weights + self.router_weights + self.extras

    def mean_attended_keys(self, length: int) -> float:
        """Return how many keys a query attends to on average in a sequence of `length`.

        With a causal mask the first queries do not fill the window; without a window the mean is half the length.
        """
        reach = min(length, self.window) if self.window else length
        return reach * (1 - reach / (2 * length)) if self.causal else float(reach)

    def flops(self, positions: int, length: int) -> Flops:
        """Return the FLOPs of a forward over `positions`, in sequences of `length`."""
        attention = self.heads * (self.head_dim + self.value_dim) * self.mean_attended_keys(length)
        return Flops(2.0 * positions * (self.active_weights + attention))


@dataclass(frozen=True, slots=True, kw_only=True)
class Opaque:
    """A block of which only totals are known: the traced cost of one sample, in the block's own precision.

    `saved_bytes` are saved for backward, `moved_bytes` are read and written, `output_bytes` pass to the next block.
    Only data and pipeline parallelism can split it.
    """

    name: str
    parameters: int
    sample_flops: Flops
    saved_bytes: Bytes
    moved_bytes: Bytes
    output_bytes: Bytes
    num_kernels: int = 1

    def flops(self, positions: int, length: int) -> Flops:
        """Return the FLOPs of a forward over one sample, as traced."""
        return self.sample_flops


@dataclass(frozen=True, slots=True, kw_only=True)
class Tower:
    """A stack of blocks: language, vision, a projector between them.

    `runs` are equal blocks with their number. `vocab` are the rows of an embedding, `outputs` the logits of a head at
    each position (0: no head); `bare_head` says that no bias, scale or cap follows the head's matmul. `extras` are
    other parameters outside the layers. A sample has `positions` here (0: the sequence length of the data), and
    attention stays within segments of them (0: all of them).
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

    def sample_positions(self, seq_len: int) -> tuple[int, int]:
        """Return the positions of one sample here, and how many of them attend to each other."""
        positions = self.positions or seq_len
        return positions, self.segment or positions


class Step(NamedTuple):
    """One block of a forward, and its tower."""

    tower: Tower
    block: OutlineLayer | Opaque


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """A complete network. `max_seq_len` 0 is no limit."""

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
        """Return the FLOPs of forward and backward of a tower, in units of its forward.

        Gradients of weights cost one unit if the tower is trained; gradients of its input one unit if it or any earlier
        tower is trained.
        """
        reached = self.towers[: self.towers.index(tower) + 1]
        return 1 + (not tower.frozen) + any(not each.frozen for each in reached)

    def training_flops(self, seq_len: int) -> Flops:
        """Return the FLOPs of one sample's forward and backward; an embedding is a lookup and costs nothing."""
        total = 0.0
        for tower in self.towers:
            positions, length = tower.sample_positions(seq_len)
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
