"""Builds the network of a section or a spec. The code of a family is imported for its networks."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from trimaran.core import ModelSection
from trimaran.models import ModelSpec, PerceptionSpec, Spec, VlmSpec, spec_of
from trimaran.nets.local_shards import to_empty
from trimaran.nets.network import Network, decoder_network


def open_network(section: ModelSection, *, seed: int = 0) -> tuple[Network, Callable[[torch.device], None]]:
    """Return the whole network of a section without weights, and a function that gives it memory on a device.

    The weights of a Hugging Face model are then as on disk, or random ones from `seed`; those of others are undefined.
    """
    if section.kind.is_hf:
        from trimaran.nets.hf.hf_build import open_hf_model  # noqa: PLC0415  transformers takes seconds to import
        from trimaran.nets.hf.hf_vlm import network_of_hf  # noqa: PLC0415

        assert section.path is not None, "a section without a path has no spec to plan with"
        module, fill = open_hf_model(Path(section.path), trust_remote_code=section.trust_remote_code, seed=seed)
        return network_of_hf(module, spec_of(section)), partial(fill, module)
    with torch.device("meta"):
        if section.kind.is_plugin:
            from trimaran.nets.plugin_network import plugin_network  # noqa: PLC0415

            network = plugin_network(section)
        else:
            spec = spec_of(section)
            assert spec is not None, "our own networks always have a spec"
            network = network_of(spec)
    return network, partial(to_empty, network.module)


def network_of(spec: Spec, blocks: range | None = None) -> Network:
    """Return the network of this shape, or the stage with these blocks, on the default device, uninitialised."""
    match spec:
        case ModelSpec():
            return decoder_network(spec, blocks)
        case VlmSpec():
            from trimaran.nets.vlm.vlm_network import vlm_network  # noqa: PLC0415

            return vlm_network(spec, blocks)
        case PerceptionSpec():
            from trimaran.nets.perception import perception_network  # noqa: PLC0415

            return perception_network(spec, blocks)
