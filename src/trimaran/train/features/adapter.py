"""Adapters: LoRA and its kin, on a frozen base that may be packed in 4 bits."""

from pathlib import Path

from trimaran.core import ModelSection, Plan
from trimaran.models import refuse_adapter
from trimaran.nets import (
    Network,
    attach_adapter,
    initialise_adapter,
    is_on_meta,
    linears_to_pack,
    load_peft_adapter,
    pack_frozen_weights,
    refuse_inexpressible,
)
from trimaran.parallel import store_frozen_weights
from trimaran.train.rank_networks import Attachment


class Adapter(Attachment):
    """The adapter of a recipe's model; see `Attachment`."""

    needs_whole = True

    def __init__(self, model: ModelSection, *, seed: int) -> None:
        assert model.adapter is not None
        self._model, self._section, self._seed = model, model.adapter, seed
        self.packs = self._section.base == "4bit"

    def check(self, plan: Plan) -> None:
        refuse_adapter(self._model, plan)

    def attach(self, network: Network, whole: Network | None) -> None:
        refuse_inexpressible(whole or network, self._section)
        attach_adapter(network, self._section, whole)

    def pack(self, network: Network, plan: Plan) -> None:
        store_frozen_weights(network, plan)
        if self.packs:
            pack_frozen_weights(linears_to_pack(network, self._section))

    def fill(self, network: Network, whole: Network | None) -> None:
        if not is_on_meta(network.module):
            initialise_adapter(network.module, seed=self._seed)
        if self._section.path:
            load_peft_adapter(network, Path(self._section.path), self._section, whole)
