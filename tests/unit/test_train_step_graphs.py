"""Which models and batches may be captured as CUDA graphs. What a capture computes is tested on a GPU."""

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from tests.hf_models import SMALL
from trimaran.data import StepBatch
from trimaran.models import PRESETS
from trimaran.nets import network_of
from trimaran.train import has_known_code, host_random_states, signature_of

TOKENS = torch.zeros(2, 4, 8, dtype=torch.int64)


class CountingModule(nn.Module):
    """A module of the user's own."""


def test_only_code_that_is_known_to_repeat_itself_is_captured() -> None:
    with torch.device("meta"):
        assert has_known_code(network_of(PRESETS["tiny"]).module)
        assert has_known_code(LlamaForCausalLM(LlamaConfig(**SMALL)))
    assert not has_known_code(nn.Sequential(nn.Linear(2, 2), CountingModule()))


def test_batches_of_one_shape_have_one_signature() -> None:
    same, other = ({"tokens": TOKENS, "labels": TOKENS[:, :, :length]} for length in (8, 7))
    assert signature_of(StepBatch(0, same, 3)) == signature_of(
        StepBatch(1, {name: each + 1 for name, each in same.items()}, 5)
    )
    assert signature_of(StepBatch(0, same, 3)) != signature_of(StepBatch(0, other, 3))


def test_a_batch_whose_layout_the_host_has_to_know_has_none() -> None:
    arrays = {"tokens": TOKENS, "documents": TOKENS}
    assert signature_of(StepBatch(0, arrays, 3).to(torch.device("cpu"))) == ()
    assert signature_of(StepBatch(0, {"patches": TOKENS}, 3, offsets={"patches": (0, 1, 2)})) == ()


def test_numbers_drawn_on_the_host_are_noticed() -> None:
    before = host_random_states()
    assert before == host_random_states()
    torch.rand(())
    assert before != host_random_states()
