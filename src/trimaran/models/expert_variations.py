"""Small, named variations of mixtures of experts and of latent attention, beyond Qwen's. The defaults are Qwen's."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSpec:
    """How a router scores and chooses experts.

    `scoring` turns a token's logits into the weights of experts. With `groups` above 1 a token first chooses the
    `top_groups` groups whose best `group_top` experts have the largest sum, and then experts of those. `scale`
    multiplies the weights. `bias`: the logits have a learned bias. `correction`: a bias that is added to the scores
    when experts are chosen, but not to their weights; no gradient changes it. After each optimizer step it grows by
    `correction_rate` for experts with less than the mean load, and shrinks for those with more (DeepSeek-V3).
    `weights_input`: weights multiply what an expert is given and not what it returns (Llama-4).
    """

    scoring: Literal["softmax", "sigmoid"] = "softmax"
    groups: int = 1
    top_groups: int = 1
    group_top: int = 1
    scale: float = 1.0
    bias: bool = False
    correction: bool = False
    correction_rate: float = 0.0
    weights_input: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertUnit:
    """How the feed-forward of an expert differs from SwiGLU.

    `bias`: its three projections have biases. `limit` above 0 clamps the gate from above and the other projection on
    both sides; the gate is then multiplied by the sigmoid of `alpha` times itself, and the other projection is
    increased by one (GPT-OSS).
    """

    bias: bool = False
    limit: float = 0.0
    alpha: float = 1.702


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """Multi-head latent attention (DeepSeek): keys and values of all heads are made from one vector of `kv_rank`.

    `nope_dim` and `rope_dim` are the features of a query and a key without and with rotary positions; the latter are
    the same for all heads' keys. `value_dim` is the width of a head's value. `query_rank` 0 is a query without a latent
    vector. `norm_eps` is that of the norms of the latent vectors, which is fixed in these models.
    """

    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    query_rank: int = 0
    bias: bool = False
    norm_eps: float = 1e-6

    @property
    def head_dim(self) -> int:
        """The width of a head's query and key."""
        return self.nope_dim + self.rope_dim

    def parameters(self, hidden: int, heads: int) -> int:
        """Return the weights of one layer's attention."""
        rank, width = self.query_rank, heads * self.head_dim
        query = rank * (hidden + width) if rank else hidden * width
        narrow = hidden * (self.kv_rank + self.rope_dim) + self.kv_rank * heads * (self.nope_dim + self.value_dim)
        return query + narrow + heads * self.value_dim * hidden + self.extras(hidden)

    def extras(self, hidden: int) -> int:
        """Return the weights of one layer's attention outside matmuls: norms and biases."""
        biases = self.query_rank + self.kv_rank + self.rope_dim + hidden
        return self.query_rank + self.kv_rank + biases * self.bias


PLAIN_ROUTER, PLAIN_UNIT = RouterSpec(), ExpertUnit()
