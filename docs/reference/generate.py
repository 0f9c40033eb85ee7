"""Writes the pages of this folder from the code: `python docs/reference/generate.py`. A test compares them.

Signatures are the source's own text, so that the pages are the same whatever Python or click makes them.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import click

import gaffer_dagster
from gaffer_dagster import cli

HERE = Path(__file__).parent
PACKAGE = Path(gaffer_dagster.__file__).parent
_HEAD = "<!-- Made by generate.py; change the docstrings. -->\n"
_INTERNAL = ("Batch.__init__", "Batch.close", "as_json", "from_json")


def pages() -> dict[str, str]:
    """The text of each page, by its file's name."""
    made = {"python.md": _python(), "command.md": _command(), "events.md": _events(), "tables.md": _tables()}
    return {name: f"{_HEAD}\n{text.strip()}\n" for name, text in made.items()}


# ── Python ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _python() -> str:
    homes = {name: f"gaffer_dagster.{home}" for name, home in gaffer_dagster._HOMES.items()}
    parts = ["# Python\n\nEverything here is in `gaffer_dagster`: `import gaffer_dagster as gd`."]
    parts += [_definition(name, homes[name]) for name in sorted(homes, key=str.lower)]
    parts.append("## gaffer_dagster.testing\n\n" + _doc(_tree("gaffer_dagster.testing")))
    testing = importlib.import_module("gaffer_dagster.testing")
    for name in sorted(testing.__all__, key=str.lower):
        of = getattr(testing, name)
        parts.append(_module(name, of.__name__) if inspect.ismodule(of) else _definition(name, of.__module__, "###"))
    parts.append("## gaffer_dagster.errors\n\n" + _doc(_tree("gaffer_dagster.errors")))
    errors = [node for node in _tree("gaffer_dagster.errors").body if isinstance(node, ast.ClassDef)]
    parts.append("| | |\n|---|---|\n" + "\n".join(f"| `{node.name}` | {_line(_doc(node))} |" for node in errors))
    return "\n\n".join(parts)


def _module(name: str, module: str) -> str:
    defined = [each.name for each in _tree(module).body if isinstance(each, (ast.FunctionDef, ast.ClassDef))]
    public = [each for each in defined if not each.startswith("_")]
    return "\n\n".join([f"### {name}", _doc(_tree(module)), *(_definition(each, module, "####") for each in public)])


def _definition(name: str, module: str, mark: str = "##") -> str:
    kinds = (ast.FunctionDef, ast.ClassDef)
    node = [each for each in _tree(module).body if isinstance(each, kinds) and each.name == name][-1]
    source = _source(module)
    if isinstance(node, ast.FunctionDef):
        return f"{mark} {name}\n\n{_signature(node, source)}\n\n{_doc(node)}"
    members = [each for each in node.body if isinstance(each, ast.FunctionDef)]
    members = [each for each in members if not {each.name, f"{name}.{each.name}"} & set(_INTERNAL)]
    made = [_signature(each, source, name) for each in members if each.name == "__init__"]
    parts = [f"{mark} {name}", *made, _doc(node), _values(node), _fields(node)]
    for each in members:
        if not each.name.startswith("_") and _doc(each):
            parts.append(f"{mark}# {name}.{each.name}\n\n{_signature(each, source)}\n\n{_doc(each)}")
    return "\n\n".join(part for part in parts if part)


def _values(node: ast.ClassDef) -> str:
    """Of an enum: each value with the text below it."""
    lines: list[str] = []
    for each, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(each, ast.Assign) and isinstance(each.value, ast.Constant) and isinstance(each.value.value, str):
            text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            lines.append(f"- `{each.value.value}` {_line(str(text))}".rstrip())
    return "\n".join(lines)


def _fields(node: ast.ClassDef) -> str:
    """Of a component: each field of its YAML, with what `_says` says of it."""
    lines: list[str] = []
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and "_says(" in ast.unparse(each.annotation):
            (says,) = (call for call in ast.walk(each.annotation) if isinstance(call, ast.Call) and _is_says(call))
            text = says.args[0].value if isinstance(says.args[0], ast.Constant) else "As of `JobSpec`."
            lines.append(
                f"- `{ast.unparse(each.target)}`{' (required)' if each.value is None else ''} {_line(str(text))}"
            )
    return "\n".join(lines)


def _is_says(call: ast.Call) -> bool:
    return ast.unparse(call.func) == "_says"


def _signature(node: ast.FunctionDef, source: list[str], name: str | None = None) -> str:
    """As it is written, without `self`; a class is called by its own name."""
    lines = source[node.lineno - 1 : node.body[0].lineno - 1]
    text = textwrap.dedent("\n".join(lines)).strip().removesuffix(":").removeprefix("def ")
    text = re.sub(r"\((\s*)(self|cls)(, |,\s*|(?=\)))", r"(\1", text, count=1)
    if name is not None:
        text = text.replace("__init__", name, 1).removesuffix(" -> None")
    if any(isinstance(each, ast.Name) and each.id == "property" for each in node.decorator_list):
        text = text.replace("()", "", 1).replace(" -> ", ": ")
    return f"```python\n{text}\n```"


def _source(module: str) -> list[str]:
    return inspect.getsource(importlib.import_module(module)).splitlines()


def _tree(module: str) -> ast.Module:
    return ast.parse("\n".join(_source(module)))


def _doc(node: ast.Module | ast.ClassDef | ast.FunctionDef) -> str:
    return ast.get_docstring(node) or ""


def _line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _command() -> str:
    return "\n\n".join(["# The command", _text(_doc(_tree("gaffer_dagster.cli"))), *_commands(cli.main, "gaffer")])


def _commands(command: click.Command, name: str) -> Iterator[str]:
    usage = " ".join([name, *(_argument(each) for each in command.params if isinstance(each, click.Argument))])
    parts = [f"## {name}", f"```\n{usage}{' COMMAND …' if isinstance(command, click.Group) else ''}\n```"]
    parts.append(_text(command.help or ""))
    options = [each for each in command.params if isinstance(each, click.Option)]
    if options:
        parts.append("| | |\n|---|---|\n" + "\n".join(f"| `{_option(each)}` | {_help(each)} |" for each in options))
    yield "\n\n".join(parts)
    if isinstance(command, click.Group):
        context = click.Context(command)
        for each in command.list_commands(context):
            found = command.get_command(context, each)  # which is loaded by now
            if found is not None and not found.hidden:
                yield from _commands(found, f"{name} {each}")


def _argument(argument: click.Argument) -> str:
    shown = argument.metavar or (argument.name or "").upper()
    if argument.metavar is None and not argument.required:
        shown = f"[{shown}]"
    return shown + ("..." if argument.nargs == -1 and not shown.endswith("...") else "")


def _option(option: click.Option) -> str:
    names = "/".join([", ".join(option.opts), *option.secondary_opts])
    if option.is_flag:
        return names
    choices = "\\|".join(map(str, option.type.choices)) if isinstance(option.type, click.Choice) else None
    return f"{names} {option.metavar or choices or option.type.name.split()[0].upper()}"


def _help(option: click.Option) -> str:
    shown = f" Default: {option.default}." if option.show_default else ""
    return _line((option.help or "") + shown)


def _text(text: str) -> str:
    """Wherever a line breaks in the source."""
    return inspect.cleandoc(text).replace("\b\n", "")


# ── events ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _events() -> str:
    rows = sorted({row for path in PACKAGE.rglob("*.py") for row in _logged(path)})
    keys = _keys(PACKAGE / "adapter" / "metadata.py")
    return "\n\n".join(
        [
            "# Events and metadata",
            "## Log events\n\nOn the logger `gaffer`, as text or by `gaffer_dagster.engine.log.JsonFormatter` as JSON. "
            "Each also has the fields of the run that it is of, such as `job`. A run that may not work says its "
            "outcome (`busy`, `paused`, `late`) as the event; a notice says `alert opened`, `alert reminded` or "
            "`alert resolved`.",
            "| event | level | fields |\n|---|---|---|\n" + "\n".join(rows),
            "## Metadata in Dagster\n\n" + "\n".join(f"- `{key}`" for key in keys),
        ]
    )


def _logged(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if not (isinstance(node, ast.Call) and node.args):
            continue
        of, _, level = ast.unparse(node.func).rpartition(".")
        if level == "tell":  # chosen by how it went
            of, level = "log", "info, error"
        if not re.fullmatch(r"(self\.)?_?log", of) or level.split(",")[0] not in ("debug", "info", "warning", "error"):
            continue
        event = node.args[0]
        if isinstance(event, ast.Constant):
            fields = ", ".join(f"`{each.arg}`" for each in node.keywords if each.arg not in (None, "exc_info"))
            yield f"| {event.value} | {level} | {fields} |"


def _keys(path: Path) -> list[str]:
    constants = (node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
    return sorted({each for each in constants if isinstance(each, str) and re.fullmatch(r"gaffer/\w+", each)})


# ── tables ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _tables() -> str:
    scripts = [path.read_text() for path in sorted((PACKAGE / "store" / "migrations").glob("*.sql"))]
    text = "\n".join(scripts)
    tables = re.findall(r"^create table (gaffer\.\w+) (\(.*?^\);|\([^\n]*\);)", text, re.DOTALL | re.MULTILINE)
    views = re.findall(r"^create view (gaffer\.\w+)", text, re.MULTILINE)
    said = dict(
        re.findall(r"^comment on (?:view|column) (gaffer\.[\w.]+) is\s+((?:'(?:[^']|'')*'\s*)+);", text, re.MULTILINE)
    )
    said = {name: re.sub(r"'\s+'", "", told.strip()[1:-1]).replace("''", "'") for name, told in said.items()}
    parts = [
        "# Tables and views",
        "All are in the schema `gaffer`. Read what you like; write through the command and the functions of "
        "[sql.md](../sql.md) only. Views keep their columns; tables may change with a version.",
    ]
    for view in views:
        columns = {name: said[name] for name in said if name.startswith(f"{view}.")}
        lines = [f"- `{name.rsplit('.', 1)[1]}`: {_line(told)}" for name, told in columns.items()]
        parts.append("\n".join([f"## {view}\n\n{said[view]}\n", *lines]))
    for table, columns in tables:
        parts.append(f"## {table}\n\n```sql\ncreate table {table} {columns}\n```")
    added = re.findall(r"^alter table (gaffer\.\w+)\s+(add column .*?;)$", text, re.DOTALL | re.MULTILINE)
    parts += ["## Added later\n\n```sql\n" + "\n".join(f"alter table {name} {what}" for name, what in added) + "\n```"]
    return "\n\n".join(parts)


if __name__ == "__main__":
    for name, text in pages().items():
        (HERE / name).write_text(text)
