"""Reference networks, their first weights and their Hugging Face form. `nets.hf`, which needs an extra, is apart."""

from trimaran.nets.context import Context
from trimaran.nets.decoder import Decoder
from trimaran.nets.hf_weights import hf_tensors, load_hf_weights
from trimaran.nets.initialise import initialise
from trimaran.nets.network import Network, decoder_network

__all__ = [
    "Context",
    "Decoder",
    "Network",
    "decoder_network",
    "hf_tensors",
    "initialise",
    "load_hf_weights",
]
