"""Reference networks, their initial weights and their Hugging Face format. `nets.hf` needs an extra."""

from trimaran.nets.attention_context import Context
from trimaran.nets.decoder import Decoder
from trimaran.nets.family import network_of
from trimaran.nets.hf_weights import hf_tensors, load_hf_weights
from trimaran.nets.initialise import initialise
from trimaran.nets.network import Network, decoder_network
from trimaran.nets.vlm_model import Vlm
from trimaran.nets.vlm_network import VlmNetwork

__all__ = [
    "Context",
    "Decoder",
    "Network",
    "Vlm",
    "VlmNetwork",
    "decoder_network",
    "hf_tensors",
    "initialise",
    "load_hf_weights",
    "network_of",
]
