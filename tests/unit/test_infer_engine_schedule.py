"""The engine with a runner that only remembers prefixes: whatever comes together, each request gets its own tokens."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine_models import (
    GREEDY,
    VOCABULARY,
    LateRunner,
    PrefixRunner,
    answers_of,
    check_runner,
    expected_tokens,
    requests_of,
    tokens_of,
)
from trimaran.core import UserError
from trimaran.serve import BatchingEngine, EngineRequest, EngineSettings, RunnerTraits
from trimaran.train import PlacedImage

IMAGE = VOCABULARY - 1


def engine_of(runner: PrefixRunner, *, max_running: int = 4, max_step_tokens: int = 16, **rest: Any) -> BatchingEngine:
    chosen = EngineSettings(max_running=max_running, max_step_tokens=max_step_tokens, **rest)
    return BatchingEngine(check_runner(runner), chosen)


def assert_held(runner: PrefixRunner, *, max_running: int, max_step_tokens: int) -> None:
    """Assert that every step kept its limits, and that sequences with one new token came first."""
    for batch in runner.batches:
        lengths = batch.query_lengths
        assert 0 < batch.num_tokens <= max_step_tokens
        assert batch.num_sequences <= max_running
        assert (lengths[: batch.num_decodes] == 1).all()
        assert (lengths[batch.num_decodes :] > 1).all()
        assert len(np.unique(batch.slots)) == batch.num_tokens


TEXTS = st.lists(
    st.tuples(st.sampled_from([0, 0, 6, 13]), st.lists(st.integers(0, 3), min_size=1, max_size=9), st.integers(0, 12),
              st.integers(0, 8), st.integers(0, 12)),
    min_size=1, max_size=10,
)  # fmt: skip


@settings(max_examples=30, deadline=None, derandomize=True)
@given(texts=TEXTS, num_pages=st.integers(12, 24), page_size=st.integers(2, 4), max_running=st.integers(1, 4),
       budget=st.integers(5, 20), reuse=st.booleans(), late=st.booleans())  # fmt: skip
def test_every_request_ends_with_its_own_tokens_whatever_comes_together(
    texts: list[Any], num_pages: int, page_size: int, max_running: int, budget: int, reuse: bool, late: bool
) -> None:
    shared = tuple(number % 5 for number in range(13))
    prompts = [shared[:common] + tuple(own) for common, own, *_ in texts]
    requests = requests_of(prompts, [tokens for _, _, tokens, *_ in texts])
    # Some end earlier, at a stop id, which is seen one step late if steps overlap.
    stops = [frozenset(expected_tokens(each, 9)[8:]) if each.max_tokens > 9 else frozenset() for each in requests]
    requests = [replace(each, stop_ids=ids) for each, ids in zip(requests, stops, strict=True)]
    runner = (LateRunner if late else PrefixRunner)(num_pages, page_size)
    engine = engine_of(runner, max_running=max_running, max_step_tokens=budget, reuse_prefixes=reuse)
    aborted = {request.id: arrival + wait for request, (*_, arrival, wait) in zip(requests, texts, strict=True)
               if wait > 9}  # fmt: skip
    outputs: dict[str, list[int]] = {each.id: [] for each in requests}
    finishes: dict[str, str] = {}
    for step in range(2000):
        for request, (*_, arrival, _) in zip(requests, texts, strict=True):
            if arrival == step:
                engine.add(request)
            if aborted.get(request.id) == step:
                engine.abort(request.id)
        for output in engine.step():
            outputs[output.request] += [] if output.token is None else [output.token]
            finishes |= {output.request: output.finish} if output.finish else {}
        if step > 40 and not engine.has_work:
            break
    assert not engine.has_work
    assert engine.stats().used_pages == engine.stats().running == engine.stats().waiting == 0
    assert_held(runner, max_running=max_running, max_step_tokens=budget)
    for request in requests:
        found = outputs[request.id]
        assert found == expected_tokens(request, len(found))
        if request.id not in aborted:
            assert finishes[request.id] in ("length", "context", "stop")
            room = num_pages * page_size + 1 - len(request.prompt)
            whole = expected_tokens(request, request.max_tokens)
            stop = next((number for number, token in enumerate(whole, 1) if token in request.stop_ids), 99)
            assert len(found) == min(request.max_tokens, room, stop)


def test_a_long_prompt_is_computed_beside_the_tokens_of_others() -> None:
    runner = PrefixRunner(64, 4)
    engine = engine_of(runner, max_step_tokens=8)
    requests = requests_of([(1, 2), tuple(range(40))], [12, 2])
    outputs = answers_of(engine, requests, [0, 1])
    assert tokens_of(outputs) == {each.id: expected_tokens(each, each.max_tokens) for each in requests}
    mixed_steps = [batch for batch in runner.batches if 0 < batch.num_decodes < batch.num_sequences]
    assert [batch.num_tokens for batch in mixed_steps] == [8, 8, 8, 8, 8, 6]


def test_a_prefix_is_computed_once() -> None:
    runner = PrefixRunner(64, 4)
    engine = engine_of(runner, max_step_tokens=64)
    prompt = tuple(range(22))
    first, second = requests_of([prompt, (*prompt, 9)], [3, 3])
    answers_of(engine, [first])
    before = sum(batch.num_tokens for batch in runner.batches)
    assert tokens_of(answers_of(engine, [second]))["1"] == expected_tokens(second, 3)
    assert engine.stats().prefix_hit_tokens == 20
    assert sum(batch.num_tokens for batch in runner.batches) - before == 3 + 2
    other = replace(second, id="2", prompt=(8, *second.prompt[1:]))
    assert tokens_of(answers_of(engine, [other]))["2"] == expected_tokens(other, 3)
    assert engine.stats().prefix_hit_tokens == 20
    engine.flush_prefixes()
    answers_of(engine, [replace(second, id="3")])
    assert engine.stats().prefix_hit_tokens == 20


def test_the_youngest_is_preempted_and_goes_on_where_it_was() -> None:
    runner = PrefixRunner(12, 4)
    engine = engine_of(runner, reuse_prefixes=False)
    requests = requests_of([(number,) * 5 for number in range(4)], [25] * 4)
    outputs = answers_of(engine, requests)
    assert tokens_of(outputs) == {each.id: expected_tokens(each, 25) for each in requests}
    assert engine.stats().preemptions > 0
    ends = {name: len(row) for name, row in outputs.items()}
    assert set(ends.values()) == {25}


@pytest.mark.parametrize("kind", [PrefixRunner, LateRunner])
def test_flushed_prefixes_restart_what_runs(kind: type[PrefixRunner]) -> None:
    engine = engine_of(runner := kind(32, 4))
    (request,) = requests_of([tuple(range(9))], [8])
    engine.add(request)
    found = [output.token for _ in range(4) for output in engine.step()]
    engine.flush_prefixes()
    runner.memory[:] = -1
    while engine.has_work:
        found += [output.token for output in engine.step()]
    assert found == expected_tokens(request, 8)


def test_an_abort_frees_the_pages_now() -> None:
    engine = engine_of(PrefixRunner(32, 4), max_running=1)
    for request in requests_of([(1,) * 9, (2,) * 9], [8, 8]):
        engine.add(request)
    engine.step()
    assert (engine.stats().running, engine.stats().waiting) == (1, 1)
    assert engine.stats().used_pages == 3
    engine.abort("0")
    engine.abort("1")
    engine.abort("unknown")
    assert (engine.stats().running, engine.stats().waiting, engine.stats().used_pages) == (0, 0, 0)
    assert not engine.has_work
    assert engine.step() == []


def test_steps_in_flight_name_the_tokens_of_the_step_before_and_compute_none_twice() -> None:
    requests = requests_of([(1, 2, 3), (4,) * 9, (5,)], [9, 6, 1])
    plain, late = PrefixRunner(32, 4), LateRunner(32, 4)
    found = [tokens_of(answers_of(engine_of(each), requests, [0, 1, 3])) for each in (plain, late)]
    assert found[0] == found[1] == {each.id: expected_tokens(each, each.max_tokens) for each in requests}
    computed = [[batch.sequences.tolist() for batch in each.batches] for each in (plain, late)]
    assert computed[0] == computed[1]  # lengths are known before: the same steps, none for a token too many
    assert late.num_named == 8 + 5


def test_the_token_after_a_stop_id_is_dropped_and_its_page_is_free() -> None:
    (request,) = requests_of([(5, 6, 7)], [30])
    whole = expected_tokens(request, 30)
    runner = LateRunner(32, 4)
    engine = engine_of(runner)
    engine.add(replace(request, stop_ids=frozenset({whole[5]})))
    found = []
    while not found or not found[-1].finish:
        found += engine.step()
    assert [each.token for each in found] == whole[: whole.index(whole[5]) + 1]
    assert engine.stats().used_pages == engine.stats().running == 0
    assert engine.has_work  # the token after it is still computed
    assert engine.step() == []
    assert not engine.has_work
    assert engine.stats().generated_tokens == len(found)
    assert sum(batch.num_tokens for batch in runner.batches) == len(request.prompt) + len(found)


def test_a_request_that_needs_the_host_makes_steps_wait_and_later_ones_overlap_again() -> None:
    runner = LateRunner(64, 4)
    engine = engine_of(runner)
    requests = requests_of([(1, 2), (3, 4, 5)], [20, 4])
    requests[1] = replace(requests[1], logprobs=1)
    outputs = answers_of(engine, requests, [0, 5])
    assert tokens_of(outputs) == {each.id: expected_tokens(each, each.max_tokens) for each in requests}
    assert all(each.logprob is not None for each in outputs["1"])
    assert 10 < runner.num_named < 17  # all but the first, those beside the second request, and one after them


def test_an_aborted_request_in_flight_leaves_nothing_and_its_id_is_free() -> None:
    engine = engine_of(LateRunner(32, 4))
    first, second = requests_of([(1, 2, 3), (9, 8)], [9, 4])
    engine.add(first)
    engine.step()
    engine.step()
    engine.abort(first.id)
    assert engine.stats().used_pages == 0
    engine.add(again := replace(second, id=first.id))
    found = [output.token for _ in range(9) for output in engine.step()]
    assert found == expected_tokens(again, 4)
    assert not engine.has_work


def test_an_answer_that_an_earlier_engine_began_goes_on() -> None:
    (request,) = requests_of([(5, 6, 7)], [9])
    whole = expected_tokens(request, 9)
    rest = replace(request, generated=tuple(whole[:4]))
    assert tokens_of(answers_of(engine_of(PrefixRunner(32, 4)), [rest]))["0"] == whole[4:]
    complete = answers_of(engine_of(PrefixRunner(32, 4)), [replace(request, generated=tuple(whole))])["0"]
    assert [(each.token, each.finish) for each in complete] == [(None, "length")]


def test_a_text_ends_at_a_stop_id_or_where_the_positions_end() -> None:
    (request,) = requests_of([(5, 6, 7)], [30])
    whole = expected_tokens(request, 30)
    stopped = answers_of(engine_of(PrefixRunner(32, 4)), [replace(request, stop_ids=frozenset({whole[3]}))])["0"]
    assert [each.token for each in stopped] == whole[: whole.index(whole[3]) + 1]
    assert [each.finish for each in stopped][-1] == "stop"
    limited = answers_of(engine_of(PrefixRunner(32, 4, max_length=8)), [request])["0"]
    assert [each.token for each in limited] == whole[:6]  # the last one is not computed any more
    assert limited[-1].finish == "context"


def test_adapters_do_not_share_prefixes() -> None:
    runner = PrefixRunner(64, 4, traits=RunnerTraits(adapters=("red", "blue")))
    engine = engine_of(runner)
    prompt = tuple(range(9))
    names = [None, "red", "blue", "red"]
    requests = [replace(each, adapter=name) for each, name in zip(requests_of([prompt] * 4, [5] * 4), names,
                                                                   strict=True)]  # fmt: skip
    found = tokens_of(answers_of(engine, requests, [0, 2, 4, 6]))
    numbers = {None: 0, "red": 1, "blue": 2}
    assert found == {each.id: expected_tokens(each, 5, numbers[each.adapter]) for each in requests}
    assert engine.stats().prefix_hit_tokens == 8  # those of the second red one


def image_at(first: int, tokens: int, value: int = 0) -> PlacedImage:
    return PlacedImage(np.full((tokens, 3), value, dtype=np.uint8), np.array([[1, tokens]]), first, 1)


def test_an_image_is_never_split() -> None:
    runner = PrefixRunner(64, 4, traits=RunnerTraits(image_token=IMAGE))
    engine = engine_of(runner, max_running=2, max_step_tokens=10)
    prompt = (*range(6), *[IMAGE] * 8, 1, 2, *[IMAGE] * 7, 3)
    images = (image_at(6, 8), image_at(16, 7))
    requests = [EngineRequest(id=name, prompt=prompt, sampling=GREEDY, max_tokens=4, images=images) for name in "ab"]
    found = tokens_of(answers_of(engine, requests, [0, 1]))
    assert found == {each.id: expected_tokens(each, 4) for each in requests}
    for batch in runner.batches:
        new = 0 if batch.images is None else len(batch.images.patches)
        assert new == np.count_nonzero(batch.tokens == IMAGE)


def test_other_pixels_are_another_prefix_and_a_shared_one_ends_before_an_image() -> None:
    runner = PrefixRunner(64, 4, traits=RunnerTraits(image_token=IMAGE))
    engine = engine_of(runner, max_step_tokens=64)
    prompt = (1, 2, 3, 4, 5, *[IMAGE] * 6, 6)
    first, same, other = (
        EngineRequest(id=name, prompt=prompt, sampling=GREEDY, max_tokens=3, images=(image_at(5, 6, value),))
        for name, value in (("first", 0), ("same", 0), ("other", 9))
    )
    answers_of(engine, [first])
    answers_of(engine, [same])
    assert engine.stats().prefix_hit_tokens == 4  # a page more would end inside the image
    answers_of(engine, [other])
    assert engine.stats().prefix_hit_tokens == 8
    images = runner.batches[-3].images
    assert images is not None
    assert len(images.patches) == 6


def test_a_request_that_can_never_run_is_refused() -> None:
    runner = PrefixRunner(4, 4, traits=RunnerTraits(image_token=IMAGE, embeds=False))
    engine = engine_of(runner, max_running=2, max_step_tokens=10)
    (plain,) = requests_of([(1, 2)], [4])
    wrong: dict[str, list[dict[str, Any]]] = {
        "E002": [{"prompt": ()}, {"max_tokens": -1}, {"logprobs": -1}],
        "E003": [{"prompt": (1,) * 17}],
        "E004": [{"prompt": (1, VOCABULARY)}, {"prompt": (-1,)}],
        "E005": [{"adapter": "blue"}],
        "E006": [{"prompt": (IMAGE, 1)}, {"images": (image_at(0, 2),)},
                 {"prompt": (IMAGE,) * 9, "images": (image_at(0, 9),)}],
        "E007": [{"embed": True}],
        "E008": [{"grammar": "{}"}],
    }  # fmt: skip
    for code, changes in wrong.items():
        for change in changes:
            with pytest.raises(UserError) as caught:
                engine.add(replace(plain, **change))
            assert caught.value.code == code
    assert not engine.has_work
    with pytest.raises(UserError, match="E001"):
        EngineSettings(max_running=8, max_step_tokens=8)
