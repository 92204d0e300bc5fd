"""Hooks of mkdocs: reference pages from the code itself, and pages for files outside docs/ that guides link to.

Pages of docs/zh get a tab of their own, in the order of the English ones, the texts of the theme in Chinese, and a link
to the same page in the other language.
"""

import io
import json
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from trimaran.app.main import COMMANDS, main

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(\]\()((?:\.\./)+[^)#\s]+)([)#])")
SECTIONS = {
    "Plan": "规划", "Pretrain": "预训练", "Fine-tune": "微调", "Own loop": "自己的循环", "Several machines": "多机",
    "Survive": "容错", "Diagnose": "诊断", "Tune": "调优", "Serve": "推理服务", "Reference": "参考",
}  # fmt: skip
LANGUAGES = {".py": "python", ".yaml": "yaml", ".sh": "bash", ".toml": "toml"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the Chinese pages to the navigation, as far as they exist."""
    found = _chinese_entries(config.nav or [])
    if config.nav and found and not any("中文" in each for each in config.nav):
        config.nav.append({"中文": found})
    return config


def on_page_context(context: dict[str, Any], page: Page, config: MkDocsConfig, nav: Any) -> dict[str, Any]:
    """Set the language of the theme to that of the page, and the links that switch it."""
    uri = page.file.src_uri
    is_chinese = uri.startswith("zh/")
    english = uri.removeprefix("zh/") if is_chinese else uri
    pair = {"en": english if (ROOT / "docs" / english).is_file() else "index.md", "zh": f"zh/{english}"}
    if not (ROOT / "docs" / pair["zh"]).is_file():
        pair["zh"] = "zh/index.md"
    config.theme["language"] = "zh" if is_chinese else "en"
    config.extra["alternate"] = [
        {"name": name, "lang": key, "link": pair[key].removesuffix(".md") + ".html"}
        for key, name in (("en", "English"), ("zh", "中文"))
    ]
    return context


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the reference, and the files outside docs/ that a page links to."""
    pages = {"reference/commands.md": _commands(), "reference/recipe.md": _recipe_fields()}
    for path in sorted(_outside_files(files)):
        text = path.read_text(encoding="utf-8")
        if path.suffix != ".md":
            text = f"# `{path.relative_to(ROOT)}`\n\n````{LANGUAGES.get(path.suffix, '')}\n{text}````\n"
        pages[_uri(path)] = text
    for uri, content in pages.items():
        files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links out of docs/ to the pages that `on_files` made of those files.

    The head of a Chinese page is removed: mkdocs takes a title only from the first line.
    """
    if page.file.src_uri.startswith("zh/"):
        markdown = re.sub(r"^<!-- source: .* -->\s*", "", markdown)
    depth = page.file.src_uri.count("/")
    origin = (ROOT / "docs" / page.file.src_uri).parent
    if page.file.generated_by and page.file.src_uri.startswith("outside/"):
        origin = (ROOT / page.file.src_uri.removeprefix("outside/")).parent

    def target(match: re.Match[str]) -> str:
        path = (origin / match[2]).resolve()
        if not path.is_relative_to(ROOT) or (path.is_relative_to(ROOT / "docs") and not depth):
            return match[0]
        if path.is_relative_to(ROOT / "docs"):
            return f"{match[1]}{'../' * depth}{path.relative_to(ROOT / 'docs').as_posix()}{match[3]}"
        return f"{match[1]}{'../' * depth}{_uri(path)}{match[3]}" if path.is_file() else match[0]

    return LINK.sub(target, markdown)


def _chinese_entries(entries: list[Any]) -> list[Any]:
    """Return the navigation's entries that have a Chinese page; their titles are those of the pages."""
    found: list[Any] = []
    for entry in entries:
        if isinstance(entry, dict):
            ((name, inner),) = entry.items()
            below = _chinese_entries(inner if isinstance(inner, list) else [inner])
            found += [{SECTIONS.get(name, name): below}] if below and isinstance(inner, list) else below
        elif (ROOT / "docs" / "zh" / entry).is_file():
            found.append(f"zh/{entry}")
    return found


def _outside_files(files: Files) -> Iterator[Path]:
    seen: set[Path] = set()
    waiting = [ROOT / "docs" / each.src_uri for each in files.documentation_pages() if not each.generated_by]
    while waiting:
        page = waiting.pop()
        for match in LINK.finditer(page.read_text(encoding="utf-8")):
            path = (page.parent / match[2]).resolve()
            is_outside = path.is_relative_to(ROOT) and not path.is_relative_to(ROOT / "docs")
            if is_outside and path.is_file() and path not in seen:
                seen.add(path)
                yield path


def _uri(path: Path) -> str:
    name = path.relative_to(ROOT).as_posix()
    return f"outside/{name}" if path.suffix == ".md" else f"outside/{name}.md"


def _commands() -> str:
    """Return the page of all commands: what `trimaran COMMAND --help` prints."""
    parts = ["# Commands\n\nWhat `trimaran COMMAND --help` prints.\n"]
    for name, summary in COMMANDS.items():
        with redirect_stdout(io.StringIO()) as printed:
            main([name, "--help"])
        parts.append(f"## {name}\n\n{summary}\n\n```text\n{printed.getvalue().strip()}\n```\n")
    return "\n".join(parts)


def _recipe_fields() -> str:
    """Return the page of all fields of a recipe, from its JSON schema."""
    with redirect_stdout(io.StringIO()) as printed:
        main(["schema"])
    schema = json.loads(printed.getvalue())
    parts = ["# Recipe\n\nEvery field of a recipe, from its JSON schema (`trimaran schema`). "
             "[Recipes](../guides/recipes.md) explains them.\n"]  # fmt: skip
    for name, section in schema["properties"].items():
        rows = list(_rows(_resolved(section, schema), schema, f"{name}."))
        if rows:
            table = "\n".join(["| field | type | default |", "|---|---|---|", *rows])
            parts.append(f"## {name}\n\n{section.get('description', '')}\n\n{table}\n")
        else:
            parts.append(f"## {name}\n\n{_kind(section, schema)}; default `{json.dumps(section.get('default'))}`\n")
    return "\n".join(parts)


def _rows(section: dict[str, Any], schema: dict[str, Any], prefix: str) -> Iterator[str]:
    for name, field in section.get("properties", {}).items():
        inner = _resolved(field, schema)
        if inner.get("properties"):
            yield from _rows(inner, schema, f"{prefix}{name}.")
        else:
            default = f"`{json.dumps(field['default'])}`" if "default" in field else ""
            yield f"| `{prefix}{name}` | {_kind(field, schema)} | {default} |"


def _resolved(field: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """Return the object that a field holds: by reference, or the first object of its alternatives."""
    if "$ref" in field:
        return schema["$defs"][field["$ref"].rpartition("/")[2]]
    choices = [_resolved(each, schema) for each in [*field.get("anyOf", []), *field.get("allOf", [])]]
    return next((each for each in choices if each.get("properties")), field)


def _kind(field: dict[str, Any], schema: dict[str, Any]) -> str:
    field = _resolved(field, schema)
    if "enum" in field:
        return ", ".join(f"`{each}`" for each in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    if choices := [*field.get("anyOf", []), *field.get("oneOf", [])]:
        return " or ".join(dict.fromkeys(_kind(each, schema) for each in choices))
    return str(field.get("type", "any"))
