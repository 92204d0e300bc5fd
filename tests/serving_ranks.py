"""A serving engine over forked ranks: rank 0 runs the engine, the others its steps."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from trimaran.core import ModelSection, UserError
from trimaran.serve import (
    BatchingEngine,
    EngineRequest,
    EngineSettings,
    EngineStats,
    RankedRunner,
    RankPlace,
    Runner,
    ServedModel,
    TokenOutput,
    open_ranked_runner,
    serve_rank,
)
from trimaran.train import Sampling

PAGE_SIZE = 4
SETTINGS = EngineSettings(max_running=4, max_step_tokens=16)
GREEDY = Sampling(temperature=0.0)


def place_of(tp: int, pp: int, device: str = "cpu") -> RankPlace:
    """Return this forked rank's place, by the environment that `run_ranks` sets."""
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    return RankPlace(rank=int(os.environ["RANK"]), tp=tp, pp=pp, address=address, device=torch.device(device))


def accept_adapters() -> None:
    """Check nothing: a function that can be sent to ranks."""


def served(folder: Path, family: Any = "decoder", **fields: Any) -> ServedModel:
    """Return a model to serve, in pages of 4."""
    given: dict[str, Any] = {"page_size": PAGE_SIZE, "num_pages": 16, "dtype": torch.float32}
    given |= {"section": ModelSection(family=family, path=str(folder)), "check_adapters": accept_adapters}
    return ServedModel(folder=folder, **given | fields)


def on_ranks(model: ServedModel, tp: int, pp: int, use: Callable[..., Any], *args: Any, device: str = "cpu") -> Any:
    """Return what `use(runner, *args)` returns on rank 0; 0 on the others, which end when it is done."""
    place = place_of(tp, pp, device)
    if place.rank:
        return serve_rank(place, model)
    runner = open_ranked_runner(place, model)
    try:
        return use(runner, *args)
    finally:
        runner.close()


def requests_for(prompts: Sequence[Sequence[int]], tokens: int, **fields: Any) -> list[EngineRequest]:
    fields.setdefault("sampling", GREEDY)
    return [
        EngineRequest(id=str(number), prompt=tuple(prompt), max_tokens=tokens, **fields)
        for number, prompt in enumerate(prompts)
    ]


def answers(
    runner: Runner, requests: Sequence[EngineRequest], settings: EngineSettings = SETTINGS
) -> tuple[dict[str, list[int]], EngineStats]:
    """Return the tokens of each request, all submitted at once, and what the engine did."""
    engine = BatchingEngine(runner, settings)
    for request in requests:
        engine.add(request)
    tokens: dict[str, list[int]] = {request.id: [] for request in requests}
    for output in outputs_of(engine):
        assert output.finish != "error", output.error
        if output.token is not None:
            tokens[output.request].append(output.token)
    return tokens, engine.stats()


def outputs_of(engine: BatchingEngine) -> list[TokenOutput]:
    """Return everything that the engine's requests get."""
    outputs: list[TokenOutput] = []
    while engine.has_work:
        outputs += engine.step()
    return outputs


def reload_and_answer(
    runner: RankedRunner, places: Sequence[tuple[Path, int | None]], requests: Sequence[EngineRequest]
) -> list[Any]:
    """Return the answers at first, and after the weights of each place are loaded; or the code of the refusal."""
    found: list[Any] = [answers(runner, requests)[0]]
    for folder, step in places:
        try:
            runner.load(folder, step)
        except UserError as error:
            found.append(error.code)
        else:
            found.append(answers(runner, requests)[0])
    return [*found, answers(runner, requests)[0]]
