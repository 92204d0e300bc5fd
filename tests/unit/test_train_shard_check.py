"""The shard check finds every kind of tensor that changes between updates, and takes no more time than it may."""

import pytest
import torch

from trimaran.parallel import SplitWeight, TensorShard
from trimaran.train import FIRST_STEPS, REVIEW_STEPS, SMALL_BYTES, ShardCheck

CPU = torch.device("cpu")


def shard_of(key: str, tensor: torch.Tensor | SplitWeight, *, changed_by_forward: bool = False) -> TensorShard:
    shape, start = tuple(tensor.shape), (0,) * tensor.ndim
    return TensorShard(key=key, tensor=tensor, shape=shape, start=start, changed_by_forward=changed_by_forward)


def state() -> dict[str, torch.Tensor]:
    large = torch.zeros(SMALL_BYTES // 4 + 1)
    odd = torch.zeros(SMALL_BYTES + 3, dtype=torch.bfloat16)
    return {"model/large": large, "model/odd": odd, "model/columns": torch.zeros(6, 4)[:, :3],
            "optimizer/step/large": torch.tensor(1.0), "optimizer/exp_avg/large": torch.zeros(7)}  # fmt: skip


@pytest.mark.parametrize("key", [*state(), "split"])
def test_one_flipped_bit_of_any_tensor_is_found_and_named(key: str) -> None:
    tensors = state()
    halves = SplitWeight(torch.zeros(5, dtype=torch.bfloat16), torch.zeros(5, dtype=torch.int16))
    shards = [*(shard_of(name, each) for name, each in tensors.items()), shard_of("split", halves)]
    check = ShardCheck(lambda: shards, device=CPU, max_fraction=1.0)
    for _ in range(2):
        check.record()
        changed = check.verify()
        assert changed is not None
        assert float(changed) == 0.0
    check.record()
    tensor = halves.lower if key == "split" else tensors[key]
    value = tensor[(-1,) * tensor.ndim]
    integers = {4: torch.int32, 2: torch.int16}[tensor.element_size()]
    value.view(integers).bitwise_xor_(torch.tensor(1, dtype=integers))
    changed = check.verify()
    assert changed is not None
    assert float(changed) == 1.0
    assert check.changed_keys() == [key]


def test_a_weight_that_the_model_itself_changes_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """A healthy run is never disturbed: such a weight changes in every step, also before the first check."""
    codebook, weight = torch.zeros(3), torch.zeros(3)
    shards = [shard_of("model/codebook", codebook), shard_of("model/weight", weight)]
    check = ShardCheck(lambda: shards, device=CPU, max_fraction=1.0)
    for _ in range(FIRST_STEPS + REVIEW_STEPS):
        check.record()
        codebook += 1
        changed = check.verify()
        assert changed is not None
        assert float(changed) == 0.0
    assert "model/codebook" in caplog.text
    assert caplog.text.count("not checked for flipped bits") == 1
    check.record()
    codebook += 1
    weight += 1
    assert check.verify() == 1.0
    assert check.changed_keys() == ["model/weight"]


def test_a_weight_that_has_moved_is_not_compared_and_is_checked_at_its_new_place() -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    check = ShardCheck(lambda: [shard_of("model/weight", weight.detach())], device=CPU, max_fraction=1.0)
    for _ in range(FIRST_STEPS + 3):
        check.record([weight])
        assert check.verify() == 0.0
    check.record([weight])
    old = weight.data
    weight.data = old.clone()
    old.fill_(torch.nan)
    assert check.verify() is None
    check.record([weight])
    with torch.no_grad():
        weight.add_(1)
    assert check.verify() == 1.0


def test_buffers_and_restored_states_may_change() -> None:
    running, weight = torch.zeros(3), torch.zeros(3)
    shards = [shard_of("model/running", running, changed_by_forward=True), shard_of("model/weight", weight)]
    check = ShardCheck(lambda: shards, device=CPU, max_fraction=1.0)
    check.record()
    running += 1
    changed = check.verify()
    assert changed is not None
    assert float(changed) == 0.0
    check.record()
    weight += 1
    check.forget()
    assert check.verify() is None
    assert ShardCheck(lambda: shards, device=CPU, max_fraction=0.0).verify() is None


def test_checks_that_take_too_long_check_a_part_of_the_tensors_in_turn() -> None:
    """Every check takes 1 ms and a step 20 ms: a part in ten keeps two checks within 1 % of the time."""
    clock = [0.0]

    def now() -> float:
        clock[0] += 0.0005
        return clock[0]

    tensors = [torch.zeros(100) for _ in range(50)]
    shards = [shard_of(f"model/{number}", each) for number, each in enumerate(tensors)]
    check = ShardCheck(lambda: shards, device=CPU, max_fraction=0.01, now=now)
    for _ in range(FIRST_STEPS + 2):
        check.record()
        check.verify()
        clock[0] += 0.02
    assert 4 <= check.num_parts <= 12
    found = []
    for number in range(REVIEW_STEPS):
        check.record()
        tensors[number % 50] += 1
        changed = check.verify()
        found.append(bool(changed))
        clock[0] += 0.02
    assert 0 < sum(found) < REVIEW_STEPS  # a part was looked at in each step, and not more
