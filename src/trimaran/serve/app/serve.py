"""`trimaran serve`: an OpenAI-compatible server for a trained model."""

import json
import logging
import os
import secrets
import shlex
import socket
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import typer

from trimaran.app import Json, TrainedModelName
from trimaran.checkpoint import newest_step
from trimaran.core import UserError, expand_user
from trimaran.runs import raise_soft_limits, refuse_unusable
from trimaran.serve.app.trained_weights import ADAPTER_CONFIG, find_weights
from trimaran.serve.settings import EngineConfig, EngineSettings, ServerSettings, TrainedWeights

PACKAGES = ("uvicorn", "starlette", "prometheus_client")
Step = Annotated[int | None, typer.Option(min=0, metavar="N", help="Use the checkpoint of this step.")]
TensorDegree = typer.Option(min=1, metavar="N", help="Processes that share each layer.")
PipelineDegree = typer.Option(min=1, metavar="N", help="Processes that have some of the layers each.")
Host = Annotated[str, typer.Option(metavar="ADDRESS", help="Where to listen; 0.0.0.0 is every network.")]
Port = Annotated[int, typer.Option(metavar="N", min=0, max=65535, help="0: a free one.")]
Token = Annotated[str | None, typer.Option(metavar="TEXT", help="What clients have to send. [default: a random one]")]
Adapters = Annotated[
    list[str] | None,
    typer.Option("--adapter", metavar="NAME=FOLDER", help="A PEFT folder, served as the model NAME. Repeatable."),
]
Follow = Annotated[bool, typer.Option("--follow", help="Load each new checkpoint of the run.")]
Engine = Annotated[Literal["own", "vllm"], typer.Option(help="Trimaran's engine, or vLLM.")]
Quantise = Annotated[Literal["fp8", "int8", "int4"] | None, typer.Option(help="Weights in fewer bits, on a GPU.")]


def serve(
    model: TrainedModelName,
    step: Step = None,
    tp: Annotated[int, TensorDegree] = 1,
    pp: Annotated[int, PipelineDegree] = 1,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    token: Token = None,
    name: Annotated[str | None, typer.Option(metavar="TEXT", help="The model's name. [default: its folder's]")] = None,
    adapter: Adapters = None,
    follow: Follow = False,
    engine: Engine = "own",
    quantise: Quantise = None,
    dtype: Annotated[
        Literal["auto", "fp32", "bf16"], typer.Option(help="auto: as trained on a GPU, fp32 on a CPU.")
    ] = "auto",
    max_queue: Annotated[int, typer.Option(min=0, metavar="N", help="Requests that may wait.")] = 1024,
    max_running: Annotated[int, typer.Option(min=1, metavar="N", help="Requests computed together.")] = 64,
    max_step_tokens: Annotated[int, typer.Option(min=2, metavar="N", help="Tokens computed together.")] = 1024,
    cache_gb: Annotated[
        float | None, typer.Option(min=0.0, metavar="GB", help="Size of the key-value cache. [default: what is free]")
    ] = None,
    max_body_mb: Annotated[int, typer.Option(min=1, metavar="MB", help="The largest request.")] = 32,
    max_client_connections: Annotated[
        int, typer.Option(min=1, metavar="N", help="Connections of one address, or of the proxy before the server.")
    ] = 1024,
    drain_seconds: Annotated[
        float, typer.Option(min=0.0, metavar="S", help="How long running requests may take after SIGTERM.")
    ] = 30.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="With vllm: print the command, start nothing.")] = False,
    as_json: Json = False,
) -> int:
    """Serve a trained model with OpenAI's API, to this machine and behind a token by default.

    Ctrl-C or SIGTERM lets running requests finish. /health, /ready and /metrics are for probes and Prometheus.

    \b
    trimaran serve runs/stdlib-tiny
    trimaran serve runs/my-chat --follow --port 8080
    trimaran serve ./Qwen2.5-0.5B --adapter law=./law-lora --adapter code=./code-lora
    trimaran serve ./Llama-3.1-8B --tp 2 --host 0.0.0.0 --token "$TOKEN"
    trimaran serve runs/my-chat --engine vllm --dry-run
    """
    weights = find_weights(model, step)
    _refuse_contradictions(weights, step, follow=follow, engine=engine, quantise=quantise, dry_run=dry_run)
    refuse_unusable(os.environ)
    folder = weights.run.path if weights.run is not None else weights.path
    adapters, has_token = _adapters(adapter or []), token is not None
    name, token = name or folder.absolute().name, token or secrets.token_urlsafe(24)
    if engine == "vllm":
        from trimaran.serve.app.vllm import VllmRequest, find_folder, plan_vllm, serve_with_vllm

        served, export = find_folder(weights)
        request = VllmRequest(
            folder=served, name=name, host=host, port=port, tp=tp, pp=pp, dtype=dtype, quantise=quantise,
            max_running=max_running, max_step_tokens=max_step_tokens,
            adapters={each: Path(path) for each, path in adapters.items()},
        )  # fmt: skip
        if not dry_run:
            return serve_with_vllm(request, export, token)
        facts = plan_vllm(request, export)
        if as_json:
            typer.echo(json.dumps({each: facts[each] for each in ("export", "command", "config")}))
            return 0
        if export:
            typer.echo(shlex.join(["trimaran", *export[3:]]))
        typer.echo(f"cat > vllm.yaml <<'END'\n{facts['config_text']}END")
        typer.echo(facts["shown"])
        return 0
    config = EngineConfig(
        weights=weights, dtype=dtype, tp=tp, pp=pp, quantise=quantise, adapters=adapters,
        sizes=EngineSettings(max_running=max_running, max_step_tokens=max_step_tokens,
                             cache_bytes=None if cache_gb is None else int(cache_gb * 1e9)),
    )  # fmt: skip
    newest = None  # the step after which checkpoints are new
    if follow and weights.run is not None:
        newest = weights.step if weights.step is not None else newest_step(weights.run.checkpoints) or -1
    settings = ServerSettings(
        name=name, token=token, host=host, max_queue=max_queue, max_body_bytes=max_body_mb << 20,
        max_client_connections=max_client_connections, drain_seconds=drain_seconds, follow_after=newest,
    )  # fmt: skip
    for package in PACKAGES:
        if find_spec(package) is None:
            raise UserError("U015.serving-needs-package", where="trimaran serve", package=package)

    return serve_model(config, settings, port, has_token=has_token, as_json=as_json)


def _refuse_contradictions(
    weights: TrainedWeights, step: int | None, *, follow: bool, engine: str, quantise: str | None, dry_run: bool
) -> None:
    if dry_run and engine != "vllm":
        raise UserError("U014.dry-run-shows", where="--dry-run")
    if not follow:
        return
    reasons = {
        "there is no run to follow": weights.run is None,
        "--step serves one checkpoint, and --follow each new one": step is not None,
        "vLLM does not load other weights while it runs": engine == "vllm",
        "quantised weights are not replaced while they are served": quantise is not None,
    }
    for what, applies in reasons.items():
        if applies:
            raise UserError("U014", what, where="--follow", fix="leave --follow out, or what contradicts it")


def _adapters(values: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for value in values:
        name, separator, folder = value.partition("=")
        path = expand_user(folder)
        if not separator or not name or not folder:
            raise UserError("U014.not-name-folder", where="--adapter", value=value)
        if name in found:
            raise UserError("U014.two-adapters-called", where="--adapter", name=name)
        if not (path / ADAPTER_CONFIG).is_file():
            raise UserError(
                "U014.not-peft-folder", where=f"--adapter {name}", folder=folder, adapter_config=ADAPTER_CONFIG
            )
        found[name] = str(path.absolute())
    return found


def serve_model(config: EngineConfig, settings: ServerSettings, port: int, *, has_token: bool, as_json: bool) -> int:
    """Serve until a signal and return the exit code. A token that the user chose is not printed. Imports torch."""
    from trimaran.data import cache_folder
    from trimaran.serve.server.run_server import serve as serve_until_signal

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    raise_soft_limits()  # a connection is a file
    listening = listen(settings.host, port)
    host = settings.host
    shown = "127.0.0.1" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{listening.getsockname()[1]}"

    def on_start(weights: str) -> None:
        facts = {"url": url, "model": settings.name, "adapters": [*config.adapters], "weights": weights}
        if as_json:
            typer.echo(json.dumps(facts | {"token": settings.token}))
            return
        names = ", ".join([settings.name, *config.adapters])
        typer.echo(f"{names} ({weights}) answers at {url}/v1")
        if not has_token:
            typer.echo(f"token: {settings.token}")

    with listening:
        return serve_until_signal(replace(config, cache=str(cache_folder(os.environ))), settings, listening, on_start)


def listen(host: str, port: int, fix: str = "name another port, or 0 for a free one") -> socket.socket:
    """Return a listening socket; port 0 is any free one. Raises UserError if the address cannot be used."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UserError("W001.not-address-machine", where="--host", host=host, reason=error.strerror) from None
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(address)
        listening.listen(1024)
    except OSError as error:
        listening.close()
        raise UserError("W001.port-cannot-used", where="--port", fix=fix, port=port, reason=error.strerror) from None
    return listening
