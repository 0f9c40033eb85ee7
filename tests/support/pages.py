"""Does what a page of Markdown shows: every fenced block, in order, in one folder and on one database.

What the fence says after the backticks decides:

    sh              bash does it; variables and the folder are there for the next one. `exit=1`: how it has to end
    sql             psql does it, in one session that stays open; `sql a`, `sql b`: in sessions of these names.
                    `error`: it has to be refused
    python          is run as a script
    python jobs.py  is written to that file, and run if no later block speaks of it; other files are written only
    text            is what the block before it printed: `…` stands for whatever is there (on a line of its own, for
                    any lines), and the width of blanks and tables does not count
    (nothing)       is a figure
    … UNRUN         one of the words below: cannot be done here, and is only read

`db.example.org/shop`, in whatever is done, is the page's database.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlencode
from uuid import uuid4

import yaml
from markdown_it import MarkdownIt
from psycopg.conninfo import conninfo_to_dict

from tests.support import tools, warm

ROOT = Path(__file__).parents[2]
_LONGEST = 120
"""Seconds that a block may take."""
UNRUN = {
    "install": "it would fetch packages",
    "browser": "it serves until it is stopped; tests/dagster has real servers",
    "kubernetes": "there is no cluster",
    "compose": "there are no containers",
    "crontab": "there is no cron",
    "checkout": "it takes minutes to hours; tests/evidence has the short forms",
    "elsewhere": "it is a line for another program's file, such as dbt's",
}


@dataclass(frozen=True)
class Block:
    language: str
    words: tuple[str, ...]
    text: str
    line: int
    is_hidden: bool = False

    @property
    def unrun(self) -> str | None:
        return next((word for word in self.words if word in UNRUN), None)

    @property
    def file(self) -> str | None:
        return next((word for word in self.words if "." in word), None)


def blocks(text: str) -> Iterator[Block]:
    """Also those within a comment, which prepare something that the reader has already."""
    for token in MarkdownIt().parse(text):
        if token.type == "html_block":
            for each in blocks(token.content.strip().removeprefix("<!--").removesuffix("-->")):
                yield replace(each, is_hidden=True)
        if token.type == "code_block" and not token.content.startswith("./dev "):  # as CI itself calls it
            raise AssertionError(f"line {(token.map or [0])[0] + 1}: a block without a fence cannot be told from prose")
        if token.type == "fence":
            language, *words = token.info.split() or [""]
            yield Block(language, tuple(words), token.content, (token.map or [0])[0] + 1)


def read(block: Block) -> None:
    """What can be checked of a block that is not run."""
    if block.language == "yaml":
        assert list(yaml.safe_load_all(block.text)), "empty"
    elif block.language == "sh":
        subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)
    elif block.language == "crontab":
        for line in block.text.splitlines():
            assert re.match(r"([\d*/,H-]+ ){5}\S|[A-Z_]+=|#", line), line
    else:
        assert block.language in ("sql", "toml", "dockerfile"), f"nobody can read {block.language!r}"


class Page:
    """A page that is being done."""

    def __init__(self, folder: Path, url: str) -> None:
        self._folder = folder
        self._said: str | None = None
        self._sessions: dict[str, subprocess.Popen[str]] = {}
        self._state = folder / ".state"
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("GAFFER_", "DAGSTER_", "PG"))}
        path = [
            str(warm.folder()),
            str(Path(sys.executable).parent),
            str(Path(tools.of_postgres("psql")).parent),
            kept["PATH"],
        ]
        self._environment = {
            **kept,
            "PATH": os.pathsep.join(path),
            "PYTHONPATH": str(ROOT),
            "HOME": str(folder),
            "GAFFER_DATABASE_URL": url,
            "DAGSTER_DISABLE_TELEMETRY": "yes",
            "TZ": "UTC",
        }
        self._state.write_text("")
        where = conninfo_to_dict(url)
        self._place = (
            f"/{where['dbname']}?{urlencode({name: where[name] for name in ('host', 'port') if name in where})}"
        )
        (folder / "examples").symlink_to(ROOT / "examples")

    def do(self, block: Block, after: Sequence[Block]) -> None:
        block = replace(block, text=block.text.replace("db.example.org/shop", self._place))
        if block.unrun is not None:
            read(block)
        elif block.language == "":
            assert re.search("[─│▼►→]", block.text), "a block that is no figure says what it is: sh, sql, python, text"
        elif block.language == "text":
            self._compare(block)
        elif block.file is not None:
            (self._folder / block.file).write_text(block.text)
            is_used = any(Path(block.file).stem in each.text for each in after if each.language in ("sh", "python"))
            if block.language == "python" and not is_used:
                self._said = self._shell(f"python {shlex.quote(block.file)}", 0)
        elif block.language == "python":
            (self._folder / ".block.py").write_text(block.text)
            self._said = self._shell("python .block.py", 0)
        elif block.language == "sh":
            code = next((int(word[5:]) for word in block.words if word.startswith("exit=")), 0)
            self._said = self._shell(block.text, code)
        elif block.language == "sql":
            session = next((word for word in block.words if word != "error"), "")
            self._said = self._sql(session, block.text)
            assert ("ERROR:" in self._said) == ("error" in block.words), self._said
        else:
            raise AssertionError(f"nobody can run {block.language!r}: {', '.join(UNRUN)} say why not")

    def _shell(self, text: str, code: int) -> str:
        with tempfile.TemporaryFile("w+") as said:
            bash = subprocess.Popen(
                ["bash", "-euo", "pipefail", "-c", f". {self._state}; {{ {text}\n}}; export -p >{self._state}"],
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                bash.wait(_LONGEST)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(bash.pid, signal.SIGKILL)  # what a block leaves behind it that failed
            said.seek(0)
            shown = said.read()
        assert bash.returncode == code, f"exit {bash.returncode}, not {code}:\n{shown}"
        return shown

    def _sql(self, session: str, text: str) -> str:
        if session not in self._sessions:
            self._sessions[session] = subprocess.Popen(
                ["bash", "-c", f'. {self._state}; exec psql -X -q -P pager=off -P footer=off "$GAFFER_DATABASE_URL"'],
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        psql, end = self._sessions[session], uuid4().hex
        assert psql.stdin is not None
        assert psql.stdout is not None
        psql.stdin.write(f"{text}\n;\n\\echo {end}\n")
        psql.stdin.flush()
        lines = list(iter(psql.stdout.readline, f"{end}\n"))
        return "".join(lines)

    def _compare(self, block: Block) -> None:
        assert self._said is not None, "nothing was run before it"
        assert re.fullmatch(pattern(block.text), plain(self._said)), f"it printed:\n{self._said}"

    def close(self) -> None:
        for psql in self._sessions.values():
            psql.kill()
            psql.wait()
        if (self._folder / ".gaffer").exists():
            self._shell("gaffer db stop", 0)


def plain(text: str) -> str:
    """Without the lines and blanks that a table has for the eye."""
    lines = (" ".join(re.sub(r"[┃│|]", " ", line).split()) for line in text.splitlines())
    return "".join(f"{line}\n" for line in lines if line.strip("─━┏┳┓┡╇┩└┴┘├┼┤-+ "))


def pattern(shown: str) -> str:
    lines = plain(shown).splitlines()
    return "".join("(?:.*\n)*?" if line == "…" else ".*".join(map(re.escape, line.split("…"))) + "\n" for line in lines)


def run(text: str, folder: Path, url: str) -> int:
    """How many blocks there were. Raises `AssertionError` with the line of the one that is not as it says."""
    found = list(blocks(text))
    with _opened(folder, url) as page:
        for number, block in enumerate(found, 1):
            try:
                page.do(block, found[number:])
            except (AssertionError, subprocess.SubprocessError, yaml.YAMLError) as error:
                raise AssertionError(
                    f"line {block.line} ({' '.join([block.language, *block.words])}): {error}"
                ) from error
    return len(found)


@contextmanager
def _opened(folder: Path, url: str) -> Generator[Page]:
    page = Page(folder, url)
    try:
        yield page
    finally:
        page.close()
