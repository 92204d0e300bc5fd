"""The loss of layers that predict later tokens (multi-token prediction), and its sums for the metrics."""

from collections.abc import Sequence

import torch
from torch import Tensor

from trimaran.nets import Decoder, Network
from trimaran.parallel import RankMesh
from trimaran.train.loss.cross_entropy import summed_loss
from trimaran.train.loss.head_loss import LossHead


def compute_later_loss(network: Network, head: LossHead | None) -> None:
    """Let the decoder compute the loss of later tokens as that of the next one: from logits, or in the fused `head`."""
    decoder = network.module
    if not isinstance(decoder, Decoder) or not decoder.prediction_layers:
        return

    def from_logits(hidden: Tensor, labels: Tensor) -> Tensor:
        assert decoder.lm_head is not None, "prediction layers are in the last stage, with the head"
        return summed_loss(decoder.ended(decoder.lm_head(hidden)), labels)

    def in_head(hidden: Tensor, labels: Tensor) -> Tensor:
        assert decoder.lm_head is not None
        assert head is not None
        with head.computing_losses(labels):
            return decoder.lm_head(hidden)[0]

    decoder.compute_later_loss_with(from_logits if head is None else in_head)


def later_loss_names(networks: Sequence[Network]) -> tuple[str, ...]:
    """Return the names of these losses in the metrics: one for each prediction layer of the model."""
    module = networks[0].module if networks else None
    layers = module.spec.prediction_layers if isinstance(module, Decoder) else 0
    return tuple(f"mtp-{number}" for number in range(1, layers + 1))


def later_loss_sums(networks: Sequence[Network], ranks: RankMesh) -> Tensor:
    """Return [number of prediction layers, 2]: the summed loss and the count of this rank's labels since the last call.

    The ranks of a tp group have the same loss, so only the first returns it. So does only the last pipeline stage.
    """
    table = torch.zeros(len(later_loss_names(networks)), 2, dtype=torch.float64, device=ranks.device)
    for network in networks:
        decoder = network.module
        if isinstance(decoder, Decoder) and decoder.prediction_layers:
            taken = decoder.take_later_sums()
            if ranks.rank("tp") == 0:
                table += taken.to(ranks.device)
    return table
