"""MLflow's own tracking server, with a database, in a thread of the test."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from werkzeug.serving import make_server


def mlflow_app(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the application that `mlflow server` runs, with its database in `folder`."""
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("_MLFLOW_SERVER_FILE_STORE", f"sqlite:///{folder / 'mlflow.db'}")
    monkeypatch.setenv("_MLFLOW_SERVER_ARTIFACT_ROOT", str(folder / "artifacts"))
    pytest.importorskip("mlflow")
    for package in ("flask", "flask_cors", "sqlalchemy", "alembic"):
        pytest.importorskip(package)
    return pytest.importorskip("mlflow.server").app


@contextmanager
def serve_mlflow(app: Any, port: int = 0) -> Iterator[str]:
    """Serve the application on this machine; yields its address."""
    server = make_server("127.0.0.1", port, app, threaded=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
