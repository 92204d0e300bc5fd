"""`trimaran mcp`, over real standard input and output, with the client of the protocol's own SDK."""

import json
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

pytest.importorskip("mcp")

from mcp import Client, StdioServerParameters, stdio_client

from tests import forked
from trimaran.ui import DocsIndex, docs_folder

RECIPE = """\
model: {preset: tiny, shape: {layers: 1, hidden: 32}}
data: {seq_len: 32}
train: {steps: 3, global_batch: 2}
cluster: 1xcpu
"""
READING = {
    "plan", "predict", "rehearse", "list_runs", "run_status", "doctor", "incidents", "decisions", "history",
    "search_docs", "read_docs",
}  # fmt: skip
WRITING = {"train", "stop", "replan", "undo_decision"}


def with_server(folder: Path, talk: Callable[[Client], Awaitable[None]], *options: str) -> None:
    """Start `trimaran mcp` in `folder`, and run `talk` with a client that is connected to it."""

    async def main() -> None:
        words = ["-m", "trimaran", "mcp", *options]
        server = StdioServerParameters(command=sys.executable, args=words, cwd=folder, env=dict(os.environ))
        async with Client(stdio_client(server)) as client:
            await talk(client)

    anyio.run(main)


async def answer(client: Client, tool: str, **arguments: Any) -> Any:
    """Return the structured answer of a tool, which must not be an error."""
    result = await client.call_tool(tool, arguments)
    assert not result.is_error, result.content
    return result.structured_content


async def refusal(client: Client, tool: str, **arguments: Any) -> str:
    """Return the text of the error that a tool must answer with."""
    result = await client.call_tool(tool, arguments)
    assert result.is_error, result.structured_content
    return "".join(each.text for each in result.content if each.type == "text")


def test_an_assistant_plans_predicts_and_reads_the_docs(tmp_path: Path) -> None:
    question = {
        "id": 1, "cluster": {"gpu": "H100", "gpus": 8, "gpus_per_node": 8},
        "plan": {"sharding": "parameters", "global_batch": 64},
        "model": {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 128256,
                  "seq_len": 4096},
    }  # fmt: skip

    async def talk(client: Client) -> None:
        tools = {each.name: each for each in (await client.list_tools()).tools}
        assert set(tools) == READING
        assert tools["plan"].input_schema["properties"]["goal"]["enum"][0] == "throughput"
        assert tools["plan"].output_schema is not None
        found = await answer(client, "plan", model="llama-3-8b", cluster="8xH100", settings=["plan.mesh.tp=2"])
        assert found["answer"]["fits"]
        assert found["answer"]["plan"]["mesh"]["tp"] == 2
        assert found["command"].startswith("trimaran plan llama-3-8b")
        assert "misses" not in found["answer"]
        predicted = (await answer(client, "predict", questions=[question, {"id": 2}]))["answer"]
        assert predicted[0]["fits"]
        assert predicted[1]["error"]["code"]
        sections = (await answer(client, "search_docs", query="M010"))["sections"]
        assert sections[0]["page"] == "codes/M010.md"
        page = await answer(client, "read_docs", page=sections[0]["page"])
        assert page["text"].startswith("# M010")

    with_server(tmp_path, talk)


@pytest.mark.slow
def test_an_assistant_that_may_write_starts_a_real_run_and_reads_it(tmp_path: Path) -> None:
    async def talk(client: Client) -> None:
        assert {each.name for each in (await client.list_tools()).tools} == READING | WRITING
        assert "M" in await refusal(client, "train", recipe="model: {preset: no-such}", name="wrong")
        run = (await answer(client, "train", recipe=RECIPE, name="small"))["run"]
        with anyio.fail_after(120):
            while (await answer(client, "list_runs", search="small"))["runs"][:1] == []:
                await anyio.sleep(0.2)
            while (await answer(client, "run_status", run=run))["answer"]["status"] != "done":
                await anyio.sleep(0.5)
        (listed,) = (await answer(client, "list_runs"))["runs"]
        assert listed["slug"] == run == "small"
        assert listed["step"] == 3
        assert (await answer(client, "incidents", run=run))["answer"] == []
        assert (await answer(client, "decisions", run=run))["answer"]["decisions"] == []
        assert "findings" in (await answer(client, "doctor", run=run))["answer"]
        assert (await answer(client, "history"))["answer"]["num_runs"] == 1
        assert "S045" in await refusal(client, "replan", run=run, settings=["plan.micro_batch=1"])
        assert "trimaran resume" in (await answer(client, "stop", run=run))["command"]

    with_server(tmp_path, talk, "--write")


def test_what_is_outside_of_the_folder_or_would_execute_code_is_refused(tmp_path: Path) -> None:
    inside, outside = tmp_path / "project", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    (outside / "config.json").write_text("{}")
    (inside / "link").symlink_to(outside)

    async def talk(client: Client) -> None:
        for model in (str(outside), "../outside", "link", "~root/model"):
            assert "outside of" in await refusal(client, "plan", model=model), model
        assert "outside of" in await refusal(client, "plan", model="tiny", settings=[f"data.path={outside}"])
        assert "outside of" in await refusal(client, "plan", model="tiny", cluster="../outside/config.json")
        assert "neither" in await refusal(client, "plan", model="--emit")
        assert "--write" in await refusal(client, "plan", model="tiny", settings=["model.trust_remote_code=true"])
        assert "FIELD=VALUE" in await refusal(client, "plan", model="tiny", settings=["--emit"])
        for name in ("../outside", "/etc", "no-such", "a/b", ""):
            assert "W003" in await refusal(client, "run_status", run=name), name
        assert "no page" in await refusal(client, "read_docs", page="../README.md")
        assert "R011" in await refusal(client, "plan", model="tiny", settings=["plan.mesh.tq=2"])
        assert await refusal(client, "train", recipe=RECIPE, name="x")

    with_server(inside, talk)


def test_the_configuration_for_an_assistant_names_this_interpreter_and_folder(tmp_path: Path) -> None:
    entry = json.loads(forked.run("trimaran", "mcp", "--config", "--write", cwd=tmp_path, check=True).stdout)
    server = entry["mcpServers"]["trimaran"]
    assert server == {"command": sys.executable, "args": ["-m", "trimaran", "mcp", "--write"], "cwd": str(tmp_path)}


def test_the_docs_are_searched_by_section() -> None:
    folder = docs_folder()
    assert folder is not None
    index = DocsIndex.of_folder(folder)
    assert index.search("sliding window mixture of experts", 3)
    assert index.search("'\" OR ( NEAR", 3) is not None  # what SQLite would read as operators is text
    assert index.search("...", 3) == []
    assert any(each.page == "guides/replan.md" for each in index.search("change the plan of a running run", 5))
