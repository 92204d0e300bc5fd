"""Builds the network of a spec. The code of a family is imported for its specs."""

from trimaran.core import ModelSection
from trimaran.models import ModelSpec, PerceptionSpec, Spec, VlmSpec, spec_of
from trimaran.nets.network import Network, decoder_network


def network_of_section(section: ModelSection) -> Network:
    """Return the whole network of a section that is not of family hf, on the default device, uninitialised."""
    if section.kind.is_plugin:
        from trimaran.nets.plugin_network import plugin_network  # noqa: PLC0415

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
            from trimaran.nets.vlm_network import vlm_network  # noqa: PLC0415

            return vlm_network(spec, blocks)
        case PerceptionSpec():
            from trimaran.nets.perception import perception_network  # noqa: PLC0415

            return perception_network(spec, blocks)
