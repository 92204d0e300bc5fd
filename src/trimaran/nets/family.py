"""Builds the network of a spec: one line for each family."""

from trimaran.core import ModelSection
from trimaran.models import ModelSpec, PerceptionSpec, Spec, VlmSpec, spec_of
from trimaran.models.plugin_family import is_plugin_family
from trimaran.nets.network import Network, decoder_network
from trimaran.nets.perception import perception_network
from trimaran.nets.plugin_network import plugin_network
from trimaran.nets.vlm_network import vlm_network


def network_of_section(section: ModelSection) -> Network:
    """Return the whole network of a section that is not of family hf, on the default device, uninitialised."""
    if is_plugin_family(section.family):
        return plugin_network(section)
    spec = spec_of(section)
    assert spec is not None, "our own networks always have a spec"
    return network_of(spec)


def network_of(spec: Spec, blocks: range | None = None) -> Network:
    """Return the network of this shape, or the stage with these blocks, on the default device, uninitialised."""
    match spec:
        case ModelSpec():
            return decoder_network(spec, blocks)
        case VlmSpec():
            return vlm_network(spec, blocks)
        case PerceptionSpec():
            return perception_network(spec, blocks)
