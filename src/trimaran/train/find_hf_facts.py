"""Finds what our trainer can do with a Hugging Face model, and prints it as JSON: a command for the planner.

The planner imports no torch. It starts this once for each model and keeps the answer, see `models/hf_facts.py`.
"""

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

from trimaran.core import ModelSection, UserError
from trimaran.models import HfFacts
from trimaran.nets import Context, HfNetwork, WeightsNeededError, count_experts, pipeline_layers
from trimaran.nets.hf.hf_attention import longest_packed_row, mixes_documents, mixing_reason
from trimaran.nets.hf.hf_sharding import hf_tensor_plan
from trimaran.parallel.fp8_linear import fp8_layers
from trimaran.train.foreign_networks import open_hf_network


def find_hf_facts(section: ModelSection) -> HfFacts:
    """Return the facts of a model built on the meta device. Raises WeightsNeededError if it needs weights for that."""
    try:
        network, _ = open_hf_network(section, seed=0, without_weights=True)
    except UserError as error:
        return HfFacts(untrainable=error)
    assert isinstance(network, HfNetwork), "the section names a Hugging Face model"
    sizes, without_tp = _tried(lambda: hf_tensor_plan(network.module, degree=2)[1])
    has_fp8_layers = bool(fp8_layers(network))
    layers, without_pp = _tried(lambda: pipeline_layers(network))
    num_experts, without_ep = _tried(lambda: count_experts(network.module))
    mixing = mixing_reason(network.module)
    without_cp = _tried(lambda: network.use_context(Context()))[1]
    return HfFacts(
        without_tp=without_tp,
        without_cp=without_cp,
        without_pp=without_pp,
        without_ep=without_ep,
        without_documents=mixes_documents(mixing, network.architecture) if mixing else None,
        longest_packed_row=longest_packed_row(network.module),
        num_layers=layers.count if layers else 0,
        num_experts=num_experts or 0,
        tp_sizes=sizes or {},
        max_seq_len=0 if network.max_seq_len == sys.maxsize else network.max_seq_len,
        has_fp8_layers=has_fp8_layers,
    )


def _tried(find: Callable[[], Any]) -> tuple[Any, UserError | None]:
    try:
        return find(), None
    except UserError as error:
        return None, error


def main() -> None:
    """Print the facts of the model that the arguments name, or why they are not known, on the last line."""
    parser = argparse.ArgumentParser(prog="trimaran.train.find_hf_facts", description=__doc__)
    parser.add_argument("path")
    parser.add_argument("--trust-remote-code", action="store_true")
    named = parser.parse_args()
    try:
        section = ModelSection(family="hf", path=named.path, trust_remote_code=named.trust_remote_code)
        answer = {"facts": find_hf_facts(section).as_dict()}
    except WeightsNeededError as error:
        answer = {"unknown": str(error)}
    sys.stdout.write(f"\n{json.dumps(answer)}\n")


if __name__ == "__main__":
    main()
