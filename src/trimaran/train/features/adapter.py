"""Adapters: LoRA and its kin, on a frozen base that may be packed in 4 bits."""

from pathlib import Path

from trimaran.core import ModelSection, Plan
from trimaran.models.adapter_rules import refuse_adapter
from trimaran.nets import Network
from trimaran.nets.adapters.attach import attach_adapter, linears_to_pack
from trimaran.nets.adapters.peft_format import load_peft_adapter, refuse_inexpressible
from trimaran.nets.initial_weights import initialise_adapter
from trimaran.nets.local_shards import is_on_meta
from trimaran.nets.nf4_linear import pack_frozen_weights
from trimaran.parallel.precision import store_frozen_weights
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
