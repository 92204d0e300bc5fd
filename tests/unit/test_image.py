"""Dockerfile and compose.yaml: they install the wheel of `make wheel`, for a user who is not root, without secrets.

No Docker is needed, and no image is built: the files are parsed.
"""

import fnmatch
import json
import re
import tomllib
from pathlib import Path

import yaml

import trimaran
from tests import wheel
from trimaran.launch import KubernetesSite

ROOT = Path(__file__).parents[2]


def instructions() -> list[tuple[str, str]]:
    """Return the instructions of the Dockerfile and their arguments; continued lines are joined."""
    text = re.sub(r"\\\n\s*", "", (ROOT / "Dockerfile").read_text())
    found = [line.partition(" ") for line in text.splitlines() if line and not line.startswith("#")]
    return [(name, arguments) for name, _, arguments in found]


def last_stage() -> list[tuple[str, str]]:
    all_ = instructions()
    return all_[max(at for at, (name, _) in enumerate(all_) if name == "FROM") :]


def test_the_image_installs_the_wheel_as_make_wheel_does() -> None:
    builds = [text for name, text in instructions() if name == "RUN"]
    assert "python -m build --wheel --outdir /wheels ." in builds[0]
    assert re.search(r"pip install .*--constraint /tmp/constraints.txt /wheels/\*\.whl", builds[1])
    ours = Path(wheel.__file__).read_text()
    assert '"-m", "build"' in ours
    assert '"--constraint", ROOT / "constraints.txt", wheel' in ours
    copied = {text for name, text in last_stage() if name in ("COPY", "ADD")}
    assert copied == {"constraints.txt /tmp/constraints.txt"}  # the wheel is only mounted: no source, no repository


def test_the_build_has_every_file_that_the_wheel_is_made_of() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = {"pyproject.toml", "src", project["project"]["readme"], *project["project"]["license-files"]}
    needed |= {each.split("/")[0] for files in project["tool"]["setuptools"]["data-files"].values() for each in files}
    build = instructions()[: instructions().index(last_stage()[0])]
    copied = {each.rstrip("/") for name, text in build if name == "COPY" for each in text.split()[:-1]}
    assert needed <= copied
    assert all((ROOT / each).exists() for each in copied)
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert all(any(fnmatch.fnmatch(each, one) for one in allowed) for each in {*copied, "constraints.txt"})


def test_the_image_has_the_version_of_the_package() -> None:
    labels = dict(re.findall(r'([\w.]+)="([^"]*)"', next(text for name, text in last_stage() if name == "LABEL")))
    assert labels["org.opencontainers.image.version"] == trimaran.__version__
    assert f"trimaran:{trimaran.__version__} ." in (ROOT / "Dockerfile").read_text()


def test_the_image_runs_as_the_user_of_the_pods_and_gets_signals() -> None:
    stage = dict(last_stage())
    user = KubernetesSite().user
    assert stage["USER"] == f"{user}:{user}"
    assert json.loads(stage["ENTRYPOINT"]) == ["trimaran"]
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert "trimaran" in scripts
    assert stage["WORKDIR"] == KubernetesSite().runs


def test_no_secret_is_in_the_files() -> None:
    names = [text for name, text in instructions() if name in ("ENV", "ARG")]
    assert not [text for text in names if re.search("TOKEN|KEY|SECRET|PASSWORD", text)]
    (service,) = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"].values()
    assert {name: service["environment"][name] for name in ("HF_TOKEN", "WANDB_API_KEY")} == {
        "HF_TOKEN": None,
        "WANDB_API_KEY": None,
    }
    assert service["cap_drop"] == ["ALL"]
    assert service["read_only"] is True
    assert "privileged" not in service
