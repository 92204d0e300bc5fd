"""A real Prometheus server for tests, and the queries of the dashboard and the alerts."""

import json
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

OPS = Path(__file__).parents[1] / "ops"
DASHBOARD = OPS / "grafana" / "dashboards" / "trimaran.json"
ALERTS = OPS / "prometheus" / "alerts.yaml"
STEP_SECONDS = 0.2  # between two scrapes


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def panels() -> list[tuple[str, str]]:
    """Return (title, query) of each panel of the dashboard."""
    tree = json.loads(DASHBOARD.read_text())
    return [(panel["title"], each["expr"]) for panel in tree["panels"] for each in panel.get("targets", ())]


def filled_in(query: str, *, runs: str) -> str:
    """Return a query of the dashboard with Grafana's variables filled in."""
    return query.replace("$__rate_interval", "1m").replace("$run", runs)


def alerts() -> dict[str, dict[str, Any]]:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    return {rule["alert"]: rule for rule in group["rules"]}


class Server:
    """A Prometheus server that scrapes some pages, and answers queries."""

    def __init__(self, port: int) -> None:
        self._address = f"http://127.0.0.1:{port}"

    def query(self, query: str) -> list[dict[str, Any]]:
        url = f"{self._address}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        with urllib.request.urlopen(url, timeout=5) as answer:
            result = json.load(answer)
        assert result["status"] == "success", result
        return result["data"]["result"]

    def wait_for(self, query: str, *, answers: int, seconds: float = 30.0) -> None:
        """Wait until `query` has this many results."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            try:
                if len(self.query(query)) >= answers:
                    return
            except OSError:
                pass  # the server is starting
            time.sleep(0.05)
        raise AssertionError(f"no answer to {query}")


@contextmanager
def prometheus(folder: Path, targets: list[str]) -> Iterator[Server]:
    folder.mkdir()
    port, config = free_port(), folder / "prometheus.yaml"
    scrape = {"job_name": "trimaran", "static_configs": [{"targets": targets}]}
    config.write_text(
        json.dumps({"global": {"scrape_interval": f"{int(STEP_SECONDS * 1000)}ms"}, "scrape_configs": [scrape]})
    )
    flags = [f"--config.file={config}", f"--storage.tsdb.path={folder}", f"--web.listen-address=127.0.0.1:{port}"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(["prometheus", *flags, "--log.level=warn"], stdout=log, stderr=log)
    try:
        yield Server(port)
    finally:
        process.kill()
        process.wait()
