"""The documents are whole: linked, listed, one entry for each kind of incident, and little that is not run."""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from gaffer_dagster.domain.alert import Kind, Severity
from tests.support import pages

DOCS = pages.ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
EXAMPLES = [path for path in sorted((pages.ROOT / "examples").rglob("*")) if path.suffix in (".py", ".sh", ".sql")]


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_what_a_page_links_to_is_there(page: Path) -> None:
    for link in re.findall(r"\]\((?!https?://)([^)]+)\)", page.read_text()):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_each_page_is_in_the_index() -> None:
    listed = set(re.findall(r"\]\(([^)#]+)\)", (DOCS / "README.md").read_text()))
    assert {str(page.relative_to(DOCS)) for page in PAGES} - {"README.md"} <= listed


def entries() -> dict[str, str]:
    """The runbook's entries."""
    _, *found = re.split(r"^## ", (DOCS / "runbook.md").read_text(), flags=re.MULTILINE)
    return {entry.partition("\n")[0]: entry for entry in found}


@pytest.mark.parametrize("kind", Kind)
def test_the_runbook_has_an_entry_for_each_kind_of_incident(kind: Kind) -> None:
    entry = entries()[str(kind)]
    assert "**Look**" in entry
    assert "**It is over**" in entry
    assert ("A warning. **It means** that" in entry) == (kind.severity is Severity.WARNING)


def test_the_runbook_knows_no_other_kind() -> None:
    assert set(entries()) - {str(kind) for kind in Kind} == {"The first minute", "No kind at all"}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_read_at_one_look(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 60


def assumed(page: str) -> str:
    """What a page says that its reader has already; what stands in comments he does not read."""
    visible = re.sub(r"<!--.*?-->", "", page, flags=re.DOTALL)
    found = re.search(r"^Assumed: .+?(?=\n\n)", visible, re.MULTILINE | re.DOTALL)
    return found[0] if found is not None else ""


def unsaid(page: str) -> list[str]:
    """What a reader of the page lacks: what it hides and does not name, and gaffer's tables."""
    found, said = list(pages.blocks(page)), assumed(page)
    lacking: list[str] = []
    for block in found:
        lines = [line for line in block.text.splitlines() if line]
        if block.is_hidden and block.language == "sql":
            tables = [re.match(r"create table (\w+) .*;$", line) for line in lines]
            lacking += [
                "a table" if table is None else table[1] for table in tables if not table or table[1] not in said
            ]
        elif block.is_hidden and block.language == "sh":
            lacking += [line for line in lines if not said or not re.match(SETUP, line)]
        elif block.is_hidden and (block.file is None or block.file not in said):
            lacking.append(block.file or f"line {block.line}")
    done = [block for block in found if block.language in ("sh", "sql") and block.unrun is None]
    if any(re.search(NEEDS_TABLES, block.text) for block in done):
        migrates = any("gaffer migrate" in block.text for block in found if not block.is_hidden)
        lacking += [] if migrates or said else ["gaffer migrate"]
    return lacking


SETUP = r"(cp -rL examples/|mkdir |export DAGSTER_HOME=|gaffer prepare |gaffer register )"
"""What may be hidden of a shell: that a project is there, and that its jobs are known."""
NEEDS_TABLES = r"\bgaffer (?!preview|simulate|db |watermark adopt)|\bgaffer\.\w"
"""What was restored has them."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_a_page_says_what_its_reader_has_to_have(page: Path) -> None:
    if page.parent.name != "reference":
        assert unsaid(page.read_text()) == []


@pytest.mark.parametrize(
    ("page", "lacking"),
    [
        ("<!--\n```sql\ncreate table t (n int);\n```\n-->\n", ["t"]),
        ("Assumed: a table s.\n\n<!--\n```sql\ndrop schema gaffer;\n```\n-->\n", ["a table"]),
        ("Assumed: a role.\n\n<!--\n```sh\nexport PGOPTIONS='-c role=r'\n```\n-->\n", ["export PGOPTIONS='-c role=r'"]),
        ("<!--\nAssumed: a table t.\n\n```python t.py\n1\n```\n-->\n", ["t.py"]),
        ("```sh\ngaffer run t -f t.py\n```\n", ["gaffer migrate"]),
    ],
)
def test_a_page_that_hides_what_one_needs_is_caught(page: str, lacking: list[str]) -> None:
    assert unsaid(page) == lacking


def test_what_is_not_run_is_little_and_known() -> None:
    written = [page for page in PAGES if page.parent.name != "reference"]
    found = Counter(block.unrun for page in written for block in pages.blocks(page.read_text()))
    assert found.pop(None) > 100
    assert found == {
        "install": 3,
        "browser": 2,
        "crontab": 4,
        "elsewhere": 4,
        "compose": 1,
        "kubernetes": 1,
        "checkout": 2,
    }


def unknown_tests(page: str) -> set[str]:
    """What a page names as a test, or as a file of tests, and is none."""
    text = "\n".join(path.read_text() for path in (pages.ROOT / "tests").rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", page)) - set(re.findall(r"^def (test_\w+)", text, re.MULTILINE))
    return named | {path for path in re.findall(r"`(tests/[\w/.]+)`", page) if not (pages.ROOT / path).exists()}


def test_the_evidence_that_is_named_is_there() -> None:
    page = (DOCS / "evidence.md").read_text()
    assert unknown_tests(page) == set()
    rows = [row for row in page.splitlines() if re.match(r"\| (?!so \||what \|)\w", row)]
    assert all(row.count("`") >= 4 for row in rows)  # and what it sees


def test_a_page_that_names_a_test_that_is_gone_is_caught() -> None:
    gone = "test_that_is_" + "gone"
    assert unknown_tests(f"| so | `{gone}`, `tests/{gone}.py` |") == {gone, f"tests/{gone}.py"}


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", DOCS / "reference" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_the_reference_is_what_the_code_says() -> None:
    for name, text in generator().pages().items():
        assert (DOCS / "reference" / name).read_text() == text, f"{name}: run ./dev reference"


def test_each_variable_of_the_environment_is_in_the_reference() -> None:
    code = "\n".join(path.read_text() for path in (pages.ROOT / "gaffer_dagster").rglob("*.py"))
    page = (DOCS / "reference" / "environment.md").read_text()
    for name in {name.rstrip("_") for name in re.findall(r"\bGAFFER_[A-Z_]+\b", code)} - {"GAFFER_RECEIVER_ONCALL"}:
        assert f"`{name}" in page, name
