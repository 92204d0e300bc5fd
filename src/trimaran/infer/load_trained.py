"""A trained network, read back from disk to be used."""

from pathlib import Path

import torch

from trimaran.core import ModelSection
from trimaran.models import spec_of
from trimaran.nets import Network, network_of


def load_trained(section: ModelSection, folder: Path) -> Network:
    """Return the network whose weights a run left in `folder`, whole, on this machine's first device."""
    if section.family == "hf":
        network = _hf_whole(section, folder)
    else:
        spec = spec_of(ModelSection(family=section.family, path=str(folder)))
        assert spec is not None, "our own networks always have a spec"
        network = network_of(spec)
        network.load(folder)
    network.module.to("cuda" if torch.cuda.is_available() else "cpu")
    return network


def _hf_whole(section: ModelSection, folder: Path) -> Network:
    from trimaran.nets.hf import load_hf_model  # noqa: PLC0415
    from trimaran.nets.hf_vlm import network_of_hf  # noqa: PLC0415

    module = load_hf_model(folder, trust_remote_code=section.trust_remote_code, seed=0)
    return network_of_hf(module, spec_of(section))
