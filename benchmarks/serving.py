"""Serving many requests at once: tokens a second and latencies of our engine, beside transformers on the same machine.

usage: python benchmarks/serving.py OUT.jsonl [--shape 1b] [--users 64] [--rate 20] [--requests 200]
                                    [--ways trimaran,static,continuous] [--loads burst,equal,poisson,users]
                                    [--quantise fp8] [--eager] [--no-overlap] [--rounds 2] [--limit SECONDS]
                                    [--longest-answer 256] [--again]
       python benchmarks/serving.py OUT.jsonl --shape cpu --users 16
       python benchmarks/serving.py --table OUT.jsonl [MORE.jsonl ...]

Weights are random, stop ids are ignored and tokens are greedy, so every request has exactly the tokens it asks for.
Loads: `burst` has `--users` requests at once with the lengths of a ShareGPT-like mix (log-normal prompts with a median
of 120 tokens and answers with a median of 160, both at most 1,024; a quarter of that on a CPU),
with no more tokens in an answer than `--longest-answer`, `equal`
as many with 256 and 256 tokens (64 on a CPU), `poisson` `--requests` requests of the mix that arrive at random at
`--rate` a second, `users` as many requests of the mix, of which each of `--users` users sends the next one when it has
an answer; a static batch has as many requests as users.

Ways: `trimaran` is our engine in this process (no HTTP), `one-by-one` is it with one request at a time, `static` is
`transformers.generate` on the whole padded batch, until the longest answer ends; `continuous` is transformers'
continuous batching, given up after `--limit` seconds. Only tokens that a request asked for count. Static batching has
no latencies: its tokens arrive together. A round before those that are measured compiles kernels and captures CUDA
graphs. `--again` measures each static batch twice: the second time every shape of its steps was computed before.
"""

import argparse
import gc
import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trimaran.models import PRESETS, ModelSpec, spec_from_hf, spec_to_hf
from trimaran.nets import Network, decoder_network, initialise
from trimaran.nets.paged_cache import PagedCache
from trimaran.serve.engine.batching_engine import BatchingEngine, EngineSettings
from trimaran.serve.engine.engine_request import EngineRequest
from trimaran.serve.engine.model_runner import ModelRunner, RunnerTraits
from trimaran.serve.trained_model import compute_in_bf16
from trimaran.train.generation.generate import Sampling

MAX_LENGTH = 4096
DEEPSEEK_V2_LITE = {  # of its config.json; 15.7 billion parameters
    "model_type": "deepseek_v2", "hidden_size": 2048, "num_hidden_layers": 27, "num_attention_heads": 16,
    "num_key_value_heads": 16, "intermediate_size": 10944, "vocab_size": 102400, "kv_lora_rank": 512,
    "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64,
    "n_shared_experts": 2, "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "first_k_dense_replace": 1,
    "moe_layer_freq": 1, "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
SPECS: dict[str, ModelSpec] = {
    "1b": PRESETS["llama-3.2-1b"],
    "8b": PRESETS["llama-3.1-8b"],
    "dsv2-lite": spec_from_hf(DEEPSEEK_V2_LITE, where="here"),
    "cpu": replace(PRESETS["tiny"], max_seq_len=512),
}


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of a load: when it arrives, in seconds, its prompt, and how many tokens it wants.

    One that `waits` arrives when a user has no other request.
    """

    arrival: float
    prompt: tuple[int, ...]
    tokens: int
    waits: bool = False


@dataclass(slots=True)
class Served:
    """When each token of a request came, in seconds after the start of the load."""

    arrival: float
    times: list[float]


def mixed(count: int, *, vocabulary: int, seed: int, rate: float = 0.0, longest: int = 1024) -> list[Asked]:
    """Return requests with a ShareGPT-like mix of lengths, all at once or with Poisson arrivals of `rate` a second."""
    generator = np.random.default_rng(seed)
    scale = longest / 1024
    prompts = np.exp(generator.normal(np.log(120 * scale), 1.1, count)).clip(4, longest).astype(int)
    answers = np.exp(generator.normal(np.log(160 * scale), 0.9, count)).clip(4, longest).astype(int)
    arrivals = generator.exponential(1 / rate, count).cumsum() if rate else np.zeros(count)
    return [
        Asked(float(arrival), tuple(generator.integers(0, vocabulary, prompt).tolist()), int(answer))
        for arrival, prompt, answer in zip(arrivals, prompts, answers, strict=True)
    ]


def equal(count: int, length: int, *, vocabulary: int, seed: int) -> list[Asked]:
    """Return requests that all have prompts and answers of `length` tokens."""
    generator = np.random.default_rng(seed)
    return [Asked(0.0, tuple(generator.integers(0, vocabulary, length).tolist()), length) for _ in range(count)]


def serve(engine: BatchingEngine, load: Sequence[Asked], *, users: int) -> list[Served]:
    """Return when the tokens of each request came."""
    served = [Served(asked.arrival, []) for asked in load]
    start, added, finished = time.perf_counter(), 0, 0
    while finished < len(load):
        now = time.perf_counter() - start
        while added < len(load) and load[added].arrival <= now and (not load[added].waits or added - finished < users):
            asked = load[added]
            served[added].arrival = now if asked.waits else asked.arrival
            engine.add(EngineRequest(id=str(added), prompt=asked.prompt, sampling=Sampling(temperature=0.0),
                                     max_tokens=asked.tokens))  # fmt: skip
            added += 1
        if not engine.has_work:
            time.sleep(max(0.0, min(0.01, load[added].arrival - now)))
            continue
        outputs = engine.step()
        now = time.perf_counter() - start
        for output in outputs:
            assert not output.error, output.error
            served[int(output.request)].times.append(now)
            finished += output.finish is not None
    return served


def our_engine(spec: ModelSpec, device: torch.device, options: argparse.Namespace) -> BatchingEngine:
    """Return our engine over a network with random weights: bf16 on a GPU, fp32 on a CPU."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        network = network_on_gpu(spec, device)
        prepare(network, device, options)
    else:
        network = decoder_network(spec)
        initialise(network.module, seed=0, spec=spec)
    page_size = 16
    tokens = options.cache_tokens if on_gpu else 16384
    cache = PagedCache(tokens // page_size, page_size)
    settings = EngineSettings(max_running=max(options.users, 256) if on_gpu else options.users)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    traits = RunnerTraits(overlaps=on_gpu and not options.no_overlap)
    if not on_gpu or options.eager:
        return BatchingEngine(ModelRunner(network, device, dtype, cache, traits), settings)
    from trimaran.serve.engine.decode_graphs import GraphRunner  # noqa: PLC0415

    runner = GraphRunner(network, device, dtype, cache, traits)
    gc.collect()
    gc.freeze()  # as the engine's process does
    start = time.perf_counter()
    count = runner.capture(settings.max_running, settings.max_step_tokens)
    print(f"{count} graphs captured in {time.perf_counter() - start:.1f} s", flush=True)
    return BatchingEngine(runner, settings)


@torch.no_grad()
def network_on_gpu(spec: ModelSpec, device: torch.device) -> Network:
    """Return a network in bf16 whose weights are drawn on the GPU, so that a large one is there in seconds."""
    with torch.device("meta"):
        network = decoder_network(spec)
    compute_in_bf16(network.module)
    network.module.to_empty(device=device)
    torch.manual_seed(0)
    for parameter in network.module.parameters():
        if parameter.ndim == 1:
            parameter.fill_(1.0)
        else:
            parameter.normal_(std=0.02)
    return network


def prepare(network: Any, device: torch.device, options: argparse.Namespace) -> None:
    from trimaran.serve.serving_layers import join_projections, quantise  # noqa: PLC0415

    if options.quantise:
        quantise(network, options.quantise, device)
    else:
        join_projections(network)


def hf_model(spec: ModelSpec, device: torch.device) -> Any:
    """Return transformers' model of the same shape with random weights, in bf16 on a GPU."""
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415

    fields = spec_to_hf(spec)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    config.eos_token_id = config.bos_token_id = None
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    model.generation_config.eos_token_id = None
    return model


@torch.inference_mode()
def static_batch(model: Any, load: Sequence[Asked]) -> float:
    """Return the seconds that `transformers.generate` takes for the whole load as one padded batch."""
    width = max(len(asked.prompt) for asked in load)
    ids = torch.zeros(len(load), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, asked in enumerate(load):
        ids[row, width - len(asked.prompt) :] = torch.tensor(asked.prompt)
        mask[row, width - len(asked.prompt) :] = 1
    longest = max(asked.tokens for asked in load)
    start = time.perf_counter()
    out = model.generate(ids.to(model.device), attention_mask=mask.to(model.device), do_sample=False, pad_token_id=0,
                         max_new_tokens=longest, min_new_tokens=longest)  # fmt: skip
    assert out.cpu().shape[1] == width + longest
    return time.perf_counter() - start


def continuous_batch(model: Any, load: Sequence[Asked], *, limit: float) -> list[Served]:
    """Return when the tokens of each request came, with transformers' continuous batching and its own settings."""
    from transformers import GenerationConfig  # noqa: PLC0415

    config = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=1024)
    served = [Served(asked.arrival, []) for asked in load]
    with model.continuous_batching_context_manager(generation_config=config, timeout=5) as manager:
        print("attention:", model.config._attn_implementation, flush=True)
        for tokens in (4, None):  # the first round only warms up
            start, added, finished = time.perf_counter(), 0, 0
            while finished < len(load):
                now = time.perf_counter() - start
                if now > limit:
                    raise TimeoutError(f"{finished} of {len(load)} requests were answered in {limit} s")
                while added < len(load) and load[added].arrival <= now:
                    manager.add_request(list(load[added].prompt), request_id=f"{tokens}-{added}",
                                        max_new_tokens=tokens or load[added].tokens, record_timestamps=True
                                        )  # fmt: skip
                    added += 1
                result = manager.get_result(timeout=0.002 if added < len(load) else 1)
                if result is None:
                    assert manager.is_running(), "transformers' thread has ended"
                    continue
                assert result.error is None, result.error
                number = int(result.request_id.rpartition("-")[2])
                served[number].times = [each - start for each in result.timestamps]
                finished += result.is_finished()
            print(f"{finished} requests in {time.perf_counter() - start:.1f} s", flush=True)
    return served


def figures(load: Sequence[Asked], served: Sequence[Served]) -> dict[str, float]:
    """Return tokens a second, and latencies in milliseconds: to the first token, and between tokens."""
    for asked, each in zip(load, served, strict=True):
        assert len(each.times) == asked.tokens, (asked.tokens, len(each.times))
    first = np.array([each.times[0] - each.arrival for each in served]) * 1e3
    between = np.concatenate([np.diff(each.times) for each in served if len(each.times) > 1]) * 1e3
    seconds = max(each.times[-1] for each in served)
    return {
        "seconds": seconds,
        "tokens_per_second": sum(asked.tokens for asked in load) / seconds,
        "first_token_p50_ms": float(np.percentile(first, 50)),
        "first_token_p99_ms": float(np.percentile(first, 99)),
        "between_tokens_p50_ms": float(np.percentile(between, 50)),
        "between_tokens_p99_ms": float(np.percentile(between, 99)),
    }


def static_figures(load: Sequence[Asked], seconds: float) -> dict[str, float]:
    return {"seconds": seconds, "tokens_per_second": sum(asked.tokens for asked in load) / seconds}


def loads_of(options: argparse.Namespace, vocabulary: int, seed: int) -> dict[str, list[Asked]]:
    longest = 1024 if options.shape != "cpu" else 256
    made = {
        "burst": lambda: mixed(options.users, vocabulary=vocabulary, seed=seed, longest=longest),
        "equal": lambda: equal(options.users, longest // 4, vocabulary=vocabulary, seed=seed),
        "poisson": lambda: mixed(options.requests, vocabulary=vocabulary, seed=seed, rate=options.rate),
        "users": lambda: [replace(each, waits=True)
                          for each in mixed(options.requests, vocabulary=vocabulary, seed=seed, longest=longest)],
    }  # fmt: skip
    loads = {name: made[name]() for name in options.loads.split(",")}
    if (most := options.longest_answer) is None:
        return loads
    return {f"{name}, answers up to {most}": [replace(each, tokens=min(each.tokens, most)) for each in load]
            for name, load in loads.items()}  # fmt: skip


Measure = Callable[[Sequence[Asked]], dict[str, float]]


def measure_of(way: str, spec: ModelSpec, device: torch.device, options: argparse.Namespace) -> Measure:
    """Return what measures a load in this way, with its model in memory."""
    if way in ("trimaran", "one-by-one"):
        engine = our_engine(spec, device, options)

        def ours(load: Sequence[Asked]) -> dict[str, float]:
            engine.flush_prefixes()  # rounds have the same prompts
            if way == "one-by-one":
                load = [replace(each, waits=True) for each in load]
            return figures(load, serve(engine, load, users=1 if way == "one-by-one" else options.users))

        return ours
    model = hf_model(spec, device)
    if way == "static":

        def static(load: Sequence[Asked]) -> dict[str, float]:
            batches = [load[start : start + options.users] for start in range(0, len(load), options.users)]
            return static_figures(load, sum(static_batch(model, each) for each in batches))

        return static
    return lambda load: figures(load, continuous_batch(model, load, limit=options.limit))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path, nargs="*")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--shape", choices=SPECS, default="1b")
    parser.add_argument("--users", type=int, default=64)
    parser.add_argument("--rate", type=float, default=20.0)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--ways", default="")
    parser.add_argument("--loads", default="")
    parser.add_argument("--quantise", default="")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--no-overlap", action="store_true")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--longest-answer", type=int)
    parser.add_argument("--limit", type=float, default=120.0)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--cache-tokens", type=int, default=262144)
    options = parser.parse_args()
    if options.table:
        print(table([json.loads(line) for path in options.out for line in path.read_text().splitlines()]))
        return
    on_cpu = options.shape == "cpu"
    options.loads = options.loads or ("burst,equal" if on_cpu else "burst,equal,poisson")
    for way in (options.ways or ("one-by-one,trimaran" if on_cpu else "trimaran,static")).split(","):
        run(way, options, torch.device("cpu" if on_cpu else "cuda"))


def run(way: str, options: argparse.Namespace, device: torch.device) -> None:
    """Measure all loads in one way, and append a line for each round."""
    spec = replace(SPECS[options.shape], max_seq_len=min(MAX_LENGTH, SPECS[options.shape].max_seq_len))
    measure = measure_of(way, spec, device, options)
    if way in ("trimaran", "one-by-one"):
        name = options.quantise or ("eager" if options.eager else "") or ("no overlap" if options.no_overlap else "")
        label = f"{way} {name}".strip()
        for load in loads_of(options, spec.vocab, seed=7).values():  # compiles what no graph has
            measure([replace(each, tokens=min(each.tokens, 8), arrival=0.0) for each in load])
    else:
        label = f"transformers {way}"
        if way == "static":
            measure([replace(each, tokens=8) for each in mixed(options.users, vocabulary=spec.vocab, seed=7)])
    for number in range(options.rounds):
        for load_name, load in loads_of(options, spec.vocab, seed=number).items():
            if way == "static" and load_name.startswith("poisson"):
                continue
            for again in (False, True)[: 1 + (options.again and way == "static")]:
                started = time.process_time()
                found = measure(load)
                found["cpu_seconds"] = time.process_time() - started  # on a busy machine the fairer figure
                line = {"shape": options.shape, "way": label + ", again" * again, "load": load_name, "round": number,
                        "users": len(load), "rate": options.rate if load_name.startswith("poisson") else None, **found,
                        **machine(device)}  # fmt: skip
                print(json.dumps({key: value for key, value in line.items() if key not in machine(device)}), flush=True)
                with options.out[0].open("a") as file:
                    file.write(json.dumps(line) + "\n")
    del measure
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def machine(device: torch.device) -> dict[str, str]:
    import transformers  # noqa: PLC0415

    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine()
    return {"date": datetime.now(UTC).date().isoformat(), "device": name, "torch": torch.__version__,
            "transformers": transformers.__version__}  # fmt: skip


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table: the median over the rounds of each way and load."""
    keys = ("tokens_per_second", "first_token_p50_ms", "first_token_p99_ms", "between_tokens_p50_ms",
            "between_tokens_p99_ms")  # fmt: skip
    rows = ["| shape | load | way | tokens/s | first token p50, p99 (ms) | between tokens p50, p99 (ms) |",
            "|---|---|---|--:|--:|--:|"]  # fmt: skip
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for line in lines:
        groups.setdefault((line["shape"], line["load"], line["way"]), []).append(line)
    for (shape, load, way), found in sorted(groups.items()):
        medians = {key: float(np.median([each[key] for each in found])) for key in keys if key in found[0]}
        first, between = (
            f"{medians[f'{kind}_p50_ms']:,.1f}, {medians[f'{kind}_p99_ms']:,.1f}" if f"{kind}_p50_ms" in medians else ""
            for kind in ("first_token", "between_tokens")
        )
        rows.append(f"| {shape} | {load} | {way} | {medians['tokens_per_second']:,.0f} | {first} | {between} |")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).absolute().parents[1]))
    main()
