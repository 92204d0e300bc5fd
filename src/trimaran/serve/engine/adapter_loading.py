"""Adds the adapter of a PEFT folder, or of a run, to those that requests may choose from."""

from pathlib import Path

from trimaran.core import AdapterSection
from trimaran.nets import Network
from trimaran.nets.adapters.adapter_bank import AdapterBank
from trimaran.nets.adapters.attach import attach_adapter
from trimaran.serve.adapted_network import FillAdapter, described_adapter, fill_from_peft


def load_peft_folder(network: Network, bank: AdapterBank, name: str, folder: Path) -> None:
    """Add the adapter in a PEFT folder to the bank, under this name. One of the same name is replaced.

    After a replacement the engine must forget its prefixes: see `BatchingEngine.flush_prefixes`.
    """
    load_adapter(network, bank, name, described_adapter(network, folder), fill_from_peft(folder))


def load_adapter(network: Network, bank: AdapterBank, name: str, section: AdapterSection, fill: FillAdapter) -> None:
    """Add an adapter to the bank; `fill` gives it its values. A failure leaves network and bank as they were."""
    try:
        attach_adapter(network, section.model_copy(update={"base": "auto"}))
        fill(network, section)
        network.module.eval()
        bank.take(name)
    finally:
        bank.discard()
