"""Builds the network of a spec: one line for each family."""

from trimaran.models import ModelSpec, PerceptionSpec, Spec, VlmSpec
from trimaran.nets.network import Network, decoder_network
from trimaran.nets.perception import perception_network
from trimaran.nets.vlm_network import vlm_network


def network_of(spec: Spec, blocks: range | None = None) -> Network:
    """Return the network of this shape, or the stage with these blocks, on the default device, uninitialised."""
    match spec:
        case ModelSpec():
            return decoder_network(spec, blocks)
        case VlmSpec():
            return vlm_network(spec, blocks)
        case PerceptionSpec():
            return perception_network(spec, blocks)
