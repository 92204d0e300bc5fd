"""The planner's view of any network: towers of layers in forward order, with their shapes."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from itertools import groupby
from typing import Literal, NamedTuple

from trimaran.core import Bytes, Flops, RowCost
from trimaran.models.spec import ExpertSpec, ModelSpec, norm_names, rows_per_rank


class LinearShape(NamedTuple):
    """A linear layer: its module name, its width, and which side tensor parallelism splits."""

    name: str
    inputs: int
    outputs: int
    tp_splits: Literal["outputs", "inputs", "nothing"]

    def on_rank(self, tp: int) -> tuple[int, int]:
        """Return inputs and outputs on one tensor-parallel rank."""
        inputs = self.inputs // tp if self.tp_splits == "inputs" else self.inputs
        return inputs, self.outputs // tp if self.tp_splits == "outputs" else self.outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerAdapter:
    """Low-rank matrices beside the frozen linear layers `targets` of one layer."""

    rank: int
    targets: tuple[str, ...]
    has_magnitude: bool = False  # DoRA also trains one factor for each output
    has_dropout: bool = False  # each adapter drops elements of its input, so that linear layers no longer share it
    is_4bit: bool = False  # the frozen linear layers are stored as 4-bit NormalFloat (NF4)

    def parameters(self, linear: LinearShape, tp: int = 1) -> int:
        """Return the trained parameters beside a linear layer: those that one tensor-parallel rank holds."""
        inputs, outputs = linear.on_rank(tp)
        return self.rank * (inputs + outputs) + outputs * self.has_magnitude


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Multi-head latent attention, as in DeepSeek: low-rank keys and values. `query_rank` 0: full-rank queries.

    `narrow_cache`: what is cached of a token are the `cache_width` features that the keys and values of all heads are
    made from, as in our own decoder. Otherwise these themselves are cached.
    """

    query_rank: int
    kv_rank: int
    rope_dim: int
    value_dim: int
    narrow_cache: bool = False

    @property
    def cache_width(self) -> int:
        return self.kv_rank + self.rope_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerOperators:
    """The operators of a layer that is not one of our decoder, on a GPU and outside compiled code.

    `launches` are the kernels of its forward and backward. `norm_bytes` are saved per hidden feature by both norms in
    16-bit precision, and `residual_bytes` moved, 0 for those of a decoder layer; `activation_bytes` are moved per
    feature between the two matmuls of its feed-forward. A `rotary` layer rotates its queries and keys. The scores of a
    `biased` one have a bias of their own; otherwise attention stays inside the images of a batch. Eager attention
    `keeps_scores`, a value for each pair of positions and head.
    """

    launches: int
    norm_bytes: int = 0
    residual_bytes: int = 0
    activation_bytes: int = 4
    rotary: bool = False
    biased: bool = False
    keeps_scores: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OutlineLayer:
    """One transformer block: attention, then a feed-forward or experts. Without heads it is only a feed-forward.

    `head_dim` is that of queries and keys. `window` 0 is no window. `extras` counts the parameters outside matmuls:
    norms, biases, gates. `qk_norm` normalises the heads of queries and keys. Parameters and weights are those of the
    layer itself, without its `adapter`. `operators` None are those of a decoder layer. A layer that predicts a later
    token (multi-token prediction) `is_later`: it joins the stream and the embedding, and uses the head once more.
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
    adapter: LayerAdapter | None = None
    operators: LayerOperators | None = None
    is_later: bool = False

    def __repr__(self) -> str:
        """Return the fields, without those of special layers that are not set: the history finds jobs by this text."""
        special = ("adapter", "operators", "is_later")
        shown = [each.name for each in fields(self) if each.name not in special or getattr(self, each.name)]
        return f"OutlineLayer({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

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
    def joining_weights(self) -> int:
        """Weights that join stream and embedding, whole on every tensor-parallel rank."""
        return 2 * self.hidden * self.hidden * self.is_later

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
        return self.dense_weights + self.router_weights + self.joining_weights + routed

    @property
    def parameters(self) -> int:
        return self.dense_weights + self.expert_weights + self.router_weights + self.joining_weights + self.extras

    @property
    def adapted_linears(self) -> tuple[LinearShape, ...]:
        """The linear layers that have an adapter."""
        return _adapted_linears(self) if self.adapter else ()

    def adapter_parameters(self, tp: int = 1) -> int:
        """Return the parameters of the layer's adapters that one tensor-parallel rank holds."""
        return sum(self.adapter.parameters(each, tp) for each in self.adapted_linears) if self.adapter else 0

    def mean_attended_keys(self, length: int) -> float:
        """Return how many keys a query attends to on average in a sequence of `length`.

        With a causal mask the first queries do not fill the window; without a window the mean is half the length.
        """
        reach = min(length, self.window) if self.window else length
        return reach * (1 - reach / (2 * length)) if self.causal else float(reach)

    def flops(self, positions: int, length: int) -> Flops:
        """Return the FLOPs of a forward over `positions`, in sequences of `length`."""
        weights = self.active_weights + self.adapter_parameters()
        return Flops(2.0 * positions * weights + self.attention_flops(positions, length))

    def attention_flops(self, positions: int, length: int) -> Flops:
        """Return the FLOPs of attention's own forward, which has no weights."""
        attended = self.heads * (self.head_dim + self.value_dim) * self.mean_attended_keys(length)
        return Flops(2.0 * positions * attended)


@lru_cache(maxsize=1024)
def linears_of(layer: OutlineLayer) -> tuple[LinearShape, ...]:
    """Return the linear layers of a layer, named as in Llama and DeepSeek, in the order of the forward.

    Routed experts are stacked matrices and not among them, and neither are a router and the gate of a shared expert.
    """
    hidden, query = layer.hidden, layer.heads * layer.head_dim
    linears: list[LinearShape] = []
    if (latent := layer.latent) is not None:
        widened = layer.heads * (layer.head_dim - latent.rope_dim + latent.value_dim)
        if latent.query_rank:
            linears.append(LinearShape("q_a_proj", hidden, latent.query_rank, "nothing"))
        name = "q_b_proj" if latent.query_rank else "q_proj"
        linears.append(LinearShape(name, latent.query_rank or hidden, query, "outputs"))
        linears.append(LinearShape("kv_a_proj_with_mqa", hidden, latent.kv_rank + latent.rope_dim, "nothing"))
        linears.append(LinearShape("kv_b_proj", latent.kv_rank, widened, "outputs"))
    elif layer.heads:
        keys = layer.kv_heads * layer.head_dim
        linears.append(LinearShape("q_proj", hidden, query, "outputs"))
        linears += [LinearShape(name, hidden, keys, "outputs") for name in ("k_proj", "v_proj")]
    if layer.heads:
        linears.append(LinearShape("o_proj", layer.heads * layer.value_dim, hidden, "inputs"))
    if ffn := layer.experts.shared_ffn if layer.experts else layer.ffn:
        names = ("gate_proj", "up_proj") if layer.gated else ("up_proj",)
        linears += [LinearShape(name, hidden, ffn, "outputs") for name in names]
        linears.append(LinearShape("down_proj", ffn, hidden, "inputs"))
    return tuple(linears)


@lru_cache(maxsize=1024)
def _adapted_linears(layer: OutlineLayer) -> tuple[LinearShape, ...]:
    assert layer.adapter is not None
    return tuple(each for each in linears_of(layer) if each.name in layer.adapter.targets)


@dataclass(frozen=True, slots=True, kw_only=True)
class Opaque:
    """A block of which only totals are known: the traced cost of one sample, in the block's own precision.

    `saved_bytes` are saved for backward, `moved_bytes` are read and written, `output_bytes` pass to the next block.
    Norms over large groups read `norm_row_bytes` one after another, whatever the number of samples.
    Only data and pipeline parallelism can split it.
    """

    name: str
    parameters: int
    sample_flops: Flops
    saved_bytes: Bytes
    moved_bytes: Bytes
    output_bytes: Bytes
    num_kernels: int = 1
    norm_row_bytes: int = 0

    def flops(self, positions: int, length: int) -> Flops:
        """Return the FLOPs of a forward over one sample, as traced."""
        return self.sample_flops


class TrainedParts(NamedTuple):
    """What a frozen tower trains outside its layers: its embedding or its head in full, or an adapter of its head."""

    embedding: bool = False
    head: bool = False
    head_rank: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tower:
    """A stack of blocks: language, vision, a projector between them.

    `runs` are equal blocks with their number. `vocab` are the rows of an embedding, `outputs` the logits of a head at
    each position (0: no head); `bare_head` says that no bias, scale or cap follows the head's matmul. `extras` are
    other parameters outside the layers. A sample has `positions` here (0: the sequence length of the data), and
    attention stays within segments of them (0: all of them).

    The weights of a `frozen` tower are not trained. In a model with adapters they are stored in the compute precision,
    and `trained` says what is trained beside the adapters of its layers; otherwise they are stored in fp32.
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
    trained: TrainedParts | None = None

    @property
    def compact(self) -> bool:
        """Whether frozen weights are stored in the compute precision."""
        return self.trained is not None

    @property
    def trains_embedding(self) -> bool:
        """Whether a frozen tower's embedding is trained after all; a tied one also with its head."""
        parts = self.trained
        return parts is not None and (parts.embedding or (self.tied and parts.head))

    @property
    def trains_head(self) -> bool:
        """Whether a frozen tower's head is trained after all; a tied one also with its embedding."""
        parts = self.trained
        return parts is not None and (parts.head or (self.tied and parts.embedding))

    @property
    def head_rank(self) -> int:
        """The rank of an adapter of the head; 0 for none."""
        return self.trained.head_rank if self.trained else 0

    @property
    def layers(self) -> int:
        return sum(count for _, count in self.runs)

    @property
    def prediction_layers(self) -> int:
        """The layers that predict later tokens."""
        return sum(count for block, count in self.runs if isinstance(block, OutlineLayer) and block.is_later)

    @property
    def adapter(self) -> LayerAdapter | None:
        """The adapter of the first layer that has one."""
        for block, _ in self.runs:  # a search asks often
            if isinstance(block, OutlineLayer) and block.adapter:
                return block.adapter
        return None

    @property
    def is_head_trained(self) -> bool:
        return not self.frozen or self.trains_head

    @property
    def is_trained(self) -> bool:
        """Whether backward reaches the tower: its weights, some of them, or adapters are trained."""
        in_full = not self.frozen or self.trains_embedding or self.trains_head
        return in_full or self.head_rank > 0 or self.adapter is not None

    @property
    def adapter_parameters(self) -> int:
        """All parameters of the adapters of its layers and of its head."""
        layers = ((block, count) for block, count in self.runs if isinstance(block, OutlineLayer))
        return self.head_rank * (self.hidden + self.outputs) + sum(
            block.adapter_parameters() * count for block, count in layers
        )

    @property
    def trained_parameters(self) -> int:
        if not self.frozen:
            return self.parameters
        embedding, head = self.embedding_parameters * self.trains_embedding, self.head_parameters * self.trains_head
        return embedding + head * (not self.tied) + self.adapter_parameters

    @property
    def embedding_parameters(self) -> int:
        return self.vocab * self.hidden

    @property
    def head_parameters(self) -> int:
        return self.outputs * self.hidden

    def embedding_rows(self, tp: int) -> int:
        """Return how many rows of the embedding the first of `tp` ranks holds; no rank holds more."""
        return rows_per_rank(self.vocab, tp)

    def head_rows(self, tp: int) -> int:
        """Return how many rows of the head the first of `tp` ranks holds; no rank holds more."""
        return rows_per_rank(self.outputs, tp)

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
    """A complete network. `max_seq_len` 0 is no limit. `code` says whose code computes a model folder, if known."""

    name: str
    towers: tuple[Tower, ...]
    max_seq_len: int = 0
    code: str = field(default="", compare=False)

    def __hash__(self) -> int:
        """Return the hash of a few fields: a search looks up thousands of results by outline, and has few outlines."""
        return hash((self.name, self.max_seq_len))

    @property
    def num_parameters(self) -> int:
        return sum(tower.parameters for tower in self.towers)

    @property
    def trained_parameters(self) -> int:
        return sum(tower.trained_parameters for tower in self.towers)

    @property
    def saved_parameters(self) -> int:
        """Parameters in a checkpoint: all of them, or with an adapter only the trained ones."""
        return self.trained_parameters if any(tower.compact for tower in self.towers) else self.num_parameters

    @property
    def adapter(self) -> LayerAdapter | None:
        """The adapter of the first tower that has one."""
        return next((tower.adapter for tower in self.towers if tower.adapter), None)

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
        """Return the FLOPs of forward and backward of a tower's weights, in units of its forward.

        Gradients of weights cost one unit if they are trained; gradients of its input one unit if anything in it or in
        an earlier tower is trained.
        """
        return 1 + (not tower.frozen) + self.has_backward(tower)

    def has_backward(self, tower: Tower) -> bool:
        """Return whether backward reaches the tower. All its layers count, also those before its first adapter."""
        return any(each.is_trained for each in self.towers[: self.towers.index(tower) + 1])

    def block_flops(self, tower: Tower, block: OutlineLayer | Opaque, seq_len: int) -> Flops:
        """Return the FLOPs of one sample's forward and backward through a block. An adapter is always trained."""
        positions, length = tower.sample_positions(seq_len)
        total = self.passes(tower) * float(block.flops(positions, length))
        if isinstance(block, OutlineLayer) and tower.frozen and self.has_backward(tower):
            total += block.attention_flops(positions, length) + 2.0 * positions * block.adapter_parameters()
        return Flops(total)

    def head_flops(self, seq_len: int) -> Flops:
        """Return a sample's forward and backward FLOPs through the main head, which prediction layers use too."""
        main = self.main
        passes = (1 + main.is_head_trained + self.has_backward(main)) * (1 + main.prediction_layers)
        return Flops(2.0 * passes * main.sample_positions(seq_len)[0] * main.head_parameters)

    def training_flops(self, seq_len: int) -> Flops:
        """Return the FLOPs of one sample's forward and backward; an embedding is a lookup and costs nothing."""
        blocks = sum(
            count * self.block_flops(tower, block, seq_len) for tower in self.towers for block, count in tower.runs
        )
        return Flops(blocks + self.head_flops(seq_len))


def outline_of(spec: ModelSpec) -> Outline:
    """Return the outline of our decoder with the shape `spec`."""
    runs: list[tuple[OutlineLayer, int]] = [(_layer_of(spec, 0), spec.layers)]
    if not spec.is_uniform:
        layers = (_layer_of(spec, number) for number in range(spec.layers))
        runs = [(layer, len(list(run))) for layer, run in groupby(layers)]
    if spec.prediction_layers:  # one more norm for each input, and one before the head
        layer = _layer_of(spec, spec.layers)
        layer = replace(layer, is_later=True, extras=layer.extras + 3 * spec.hidden)
        runs.append((layer, spec.prediction_layers))
    tower = Tower(
        name="language",
        runs=tuple(runs),
        hidden=spec.hidden,
        vocab=spec.vocab,
        outputs=spec.vocab,
        bare_head=spec.block.ends.bare_head,
        tied=spec.tied,
        extras=spec.hidden,
    )
    return Outline(name=spec.name, towers=(tower,), max_seq_len=spec.max_seq_len)


def _layer_of(spec: ModelSpec, number: int) -> OutlineLayer:
    block, layer = spec.block, spec.layer(number)
    latent = block.attention.latent
    extras = len(norm_names(block.norm)) * spec.hidden + (layer.experts.biases(spec.hidden) if layer.experts else 0)
    narrow = None
    if latent is None:
        extras += (spec.heads + 2 * spec.kv_heads) * spec.head_dim * block.qkv_bias
    else:
        ranks = {each: getattr(latent, each) for each in ("query_rank", "kv_rank", "rope_dim", "value_dim")}
        narrow = Latent(**ranks, narrow_cache=True)
    return OutlineLayer(
        hidden=spec.hidden,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        ffn=layer.ffn,
        experts=layer.experts,
        window=layer.window or layer.chunk or 0,  # the mean of a chunk is less, by up to a half
        qk_norm=block.qk_norm,
        latent=narrow,
        extras=extras + spec.attention_extras,
    )


def row_cost(outline: Outline) -> RowCost:
    """Return forward and backward FLOPs of a sample's parts, in language tokens. Patches pay for the projector."""
    main = outline.main
    token, token_pair = _arithmetic(main, outline)
    token += 2.0 * main.head_parameters * (1 + main.is_head_trained + outline.has_backward(main))
    patch = patch_pair = 0.0
    before = [tower for tower in outline.towers if tower is not main]
    for tower in before:
        linear, pair = _arithmetic(tower, outline)
        # A tower with fewer positions than the first one has merged them.
        position_ratio = tower.positions / before[0].positions if before[0].positions else 1.0
        patch, patch_pair = patch + linear * position_ratio, patch_pair + pair
    return RowCost(token_pair=token_pair / token, patch=patch / token, patch_pair=patch_pair / token)


def _arithmetic(tower: Tower, outline: Outline) -> tuple[float, float]:
    """Return the FLOPs of one position of a tower, and those for each position that it attends to."""
    linear = pair = 0.0
    passes, has_backward = outline.passes(tower), outline.has_backward(tower)
    for block, count in tower.runs:
        if isinstance(block, OutlineLayer):
            linear += 2.0 * (passes * block.active_weights + 3 * block.adapter_parameters()) * count
            causal_fraction = 0.5 if block.causal else 1.0
            # A window bounds the number of keys: its cost is linear in the number of positions.
            pair_flops = (6.0 if has_backward else 2.0) * block.heads * (block.head_dim + block.value_dim) * count
            if block.window:
                linear += pair_flops * block.window
            else:
                pair += pair_flops * causal_fraction
        elif tower.positions:
            linear += passes * block.sample_flops * count / tower.positions
    return linear, pair
