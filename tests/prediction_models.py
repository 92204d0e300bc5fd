"""Tiny folders with multi-token prediction, and a plain PyTorch implementation of its loss on transformers' layers."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.mixture_models import MIXTURES

IGNORED = -100
MODULES = ("enorm", "hnorm", "eh_proj", "shared_head.norm")


class PlainPrediction(nn.Module):
    """A model of transformers whose last layers are those of multi-token prediction, written as in the report.

    transformers itself has no such layers: it builds the decoder with more layers, and the joining is here.
    """

    def __init__(self, model: PreTrainedModel, ahead: int) -> None:
        super().__init__()
        hidden, eps = model.config.hidden_size, model.config.rms_norm_eps
        self.model, self.ahead = model, ahead
        self.joins = nn.ModuleList()
        for _ in range(ahead):
            norms = {name: nn.RMSNorm(hidden, eps=eps) for name in ("enorm", "hnorm", "norm")}
            self.joins.append(nn.ModuleDict(norms | {"eh_proj": nn.Linear(2 * hidden, hidden, bias=False)}))

    def sums(self, tokens: Tensor, labels: Tensor) -> list[Tensor]:
        """Return the summed loss of the next tokens of one document [T], and that of each later one."""
        inner, length = self.model.model, len(tokens)
        hidden = inner.embed_tokens(tokens[None])
        for layer in inner.layers[: len(inner.layers) - self.ahead]:
            hidden = self._layer(layer, hidden)
        hidden = inner.norm(hidden)
        sums = [self._loss(hidden, labels)]
        for places, join in enumerate(self.joins, 1):
            if length <= places:
                break
            embedded = inner.embed_tokens(tokens[None, places:])
            parts = dict(join.named_children())
            joined = torch.cat([parts["enorm"](embedded), parts["hnorm"](hidden[:, : length - places])], dim=-1)
            hidden = parts["norm"](self._layer(inner.layers[places - 1 - self.ahead], parts["eh_proj"](joined)))
            sums.append(self._loss(hidden, labels[places:]))
        return sums

    def _layer(self, layer: nn.Module, hidden: Tensor) -> Tensor:
        length = hidden.shape[1]
        positions = torch.arange(length)[None]
        mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
        rotation = self.model.model.rotary_emb(hidden, positions)
        return layer(hidden, attention_mask=mask, position_ids=positions, position_embeddings=rotation)

    def _loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        logits = self.model.lm_head(hidden)[0]
        return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")


def save_predicting(name: str, folder: Path, ahead: int = 1) -> PlainPrediction:
    """Save one of MIXTURES with `ahead` layers that predict later tokens, as DeepSeek does, and return it."""
    fields = dict(MIXTURES[name])
    layers = fields["num_hidden_layers"]
    config = AutoConfig.for_model(fields.pop("model_type"), **fields | {"num_hidden_layers": layers + ahead})
    torch.manual_seed(0)
    plain = PlainPrediction(AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval(), ahead)
    with torch.no_grad():
        for key, each in [*plain.named_parameters(), *plain.named_buffers()]:
            if "inv_freq" not in key:
                each.normal_(float(each.ndim == 1 and "norm" in key), 0.2 if each.ndim == 1 else 0.1)
    write_predicting(plain, folder)
    written = json.loads((folder / "config.json").read_text())
    changes = {"num_hidden_layers": layers, "num_nextn_predict_layers": ahead}
    changes |= {key: written[key][:layers] for key in ("layer_types", "mlp_layer_types") if key in written}
    (folder / "config.json").write_text(json.dumps(written | changes))
    return plain


def write_predicting(plain: PlainPrediction, folder: Path) -> dict[str, Tensor]:
    """Write all weights under DeepSeek's names, with the copies of embedding and head, and return them."""
    plain.model.save_pretrained(folder)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    first = plain.model.config.num_hidden_layers - plain.ahead
    for number, join in enumerate(plain.joins, first):
        layer = f"model.layers.{number}"
        for name in MODULES:
            tensors[f"{layer}.{name}.weight"] = join.get_parameter(f"{name.rpartition('.')[2]}.weight").detach().clone()
        tensors[f"{layer}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{layer}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    return tensors
