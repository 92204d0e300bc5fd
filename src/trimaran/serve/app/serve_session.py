"""Serves a model with Trimaran's engine: opens the port, prints the address and the token, waits. Imports torch."""

import json
import logging
import os
import socket
from dataclasses import replace

import typer

from trimaran.core import UserError
from trimaran.data.text.prepare_text import cache_folder
from trimaran.runs.process_control import raise_soft_limits
from trimaran.serve.engine.engine_config import EngineConfig
from trimaran.serve.server.run_server import serve
from trimaran.serve.server.server_settings import ServerSettings


def serve_model(config: EngineConfig, settings: ServerSettings, port: int, *, has_token: bool, as_json: bool) -> int:
    """Serve until a signal and return the exit code. A token that the user chose is not printed."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    raise_soft_limits()  # a connection is a file
    listening = listen(settings.host, port)
    url = f"http://{_shown_host(settings.host)}:{listening.getsockname()[1]}"

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
        return serve(replace(config, cache=str(cache_folder(os.environ))), settings, listening, on_start)


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 is any free one. Raises UserError if the address cannot be used."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UserError("W001", f"{host} is not an address of this machine: {error.strerror}", where="--host",
                        fix="use 127.0.0.1 for this machine, 0.0.0.0 for every network") from None  # fmt: skip
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(address)
        listening.listen(1024)
    except OSError as error:
        listening.close()
        raise UserError("W001", f"port {port} cannot be used: {error.strerror}", where="--port",
                        fix="name another port, or 0 for a free one") from None  # fmt: skip
    return listening


def _shown_host(host: str) -> str:
    """Return the host of the address to use on this machine."""
    return "127.0.0.1" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
