"""A network family: causal convolutions over tokens, cheap for short contexts. `model.shape` has its sizes."""

import torch.nn.functional as F
from torch import Tensor, nn

from trimaran.core import ModelSection
from trimaran.models.plugin_family import FamilyModule


class ConvBlock(nn.Module):
    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.conv = nn.Conv1d(hidden, hidden, width)
        self.mix = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        past = F.pad(self.norm(x).transpose(1, 2), (self.conv.kernel_size[0] - 1, 0))  # a token sees no later one
        return x + self.mix(F.gelu(self.conv(past).transpose(1, 2)))


class CausalConv(nn.Module):
    def __init__(self, vocabulary: int, hidden: int, layers: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.ModuleList(ConvBlock(hidden, width) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class CausalConvFamily:
    contract = 1

    def build(self, model: ModelSection) -> FamilyModule:
        sizes = {"vocabulary": 257, "hidden": 64, "layers": 2, "width": 4} | model.shape
        module = CausalConv(**sizes)
        return FamilyModule(
            module=module, blocks=tuple(module.blocks), vocabulary=sizes["vocabulary"], max_seq_len=1 << 20
        )
