"""Every block of code in the documents does what the page says that it does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psycopg
import pytest

from gaffer_dagster.testing.database import Databases
from tests.support import pages

ROOT = pages.ROOT
PAGES = sorted(str(path.relative_to(ROOT)) for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
GENERATED = "docs/reference/"
DEPLOY = "docs/how-to/deploy.md"


@pytest.fixture
def bare_url(gaffer_databases: Databases, gaffer_server: str) -> Iterator[str]:
    """A database without gaffer's tables. The roles of the page on deploying, which are the server's, go with it."""
    with gaffer_databases.scratch(migrated=False) as made:
        yield made
    with psycopg.connect(gaffer_server, autocommit=True) as connection:
        connection.execute("drop role if exists shop_owner, shop_app, shop_ops")
        with suppress(psycopg.errors.DependentObjectsStillExist):  # another database of the server has them, too
            connection.execute("drop role if exists gaffer_owner, gaffer_runner, gaffer_reader, gaffer_operator")


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", [name for name in PAGES if name != DEPLOY and not name.startswith(GENERATED)])
def test_what_a_page_shows_is_what_happens(name: str, tmp_path: Path, url: str) -> None:
    print(pages.run((ROOT / name).read_text(), tmp_path, url), "blocks")


@pytest.mark.timeout(240)
def test_the_page_on_deploying_needs_no_more_than_an_empty_database(tmp_path: Path, bare_url: str) -> None:
    print(pages.run((ROOT / DEPLOY).read_text(), tmp_path, bare_url), "blocks")


def owners(url: str) -> set[str]:
    """Of the schema gaffer, and of all that is in it."""
    with psycopg.connect(url) as connection:
        return {
            owner
            for (owner,) in connection.execute(
                """
                select nspowner::regrole::text from pg_namespace where nspname = 'gaffer'
                union all select relowner::regrole::text from pg_class where relnamespace = 'gaffer'::regnamespace
                union all select proowner::regrole::text from pg_proc where pronamespace = 'gaffer'::regnamespace
                """
            )
        }


def roles_once() -> str:
    """The first step of the page on deploying."""
    return (ROOT / DEPLOY).read_text().partition("\n## 2. ")[0]


def test_the_roles_of_the_page_on_deploying_are_split(tmp_path: Path, bare_url: str) -> None:
    pages.run(roles_once(), tmp_path, bare_url)
    assert owners(bare_url) == {"gaffer_owner"}
    with psycopg.connect(bare_url, autocommit=True) as connection:
        connection.execute("set role shop_owner")
        connection.execute("create table gaffer.of_a_later_migration ()")
        connection.execute("set role shop_app")
        connection.execute("insert into hours values (now())")
        for refused in ("delete from gaffer.job", "create table gaffer.mine ()", "select gaffer.allow_writes('me')"):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(refused)


def test_a_page_on_deploying_that_leaves_out_the_roles_is_caught(tmp_path: Path, bare_url: str) -> None:
    page = roles_once()
    lying = page.replace("gaffer migrate --roles\n", "gaffer migrate\n")
    assert lying != page
    with pytest.raises(AssertionError, match="gaffer_owner"):
        pages.run(lying, tmp_path, bare_url)
    assert "gaffer_owner" not in owners(bare_url)


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("```sh\nfalse\necho on\n```", "exit 1, not 0"),
        ("```sh exit=3\nexit 1\n```", "exit 1, not 3"),
        ("```sh\ngaffer nonsense\n```", "No such command"),
        ("```sh\necho one\n```\n```text\ntwo\n```", "it printed:\none"),
        ("```sh\nprintf 'one\\ntwo\\n'\n```\n```text\none\n```", "it printed"),
        ("```sql\nselect 1 / 0;\n```", "division by zero"),
        ("```sql error\nselect 1;\n```", "line 1"),
        ("```python\nraise SystemExit(4)\n```", "exit 4"),
        ("```python jobs.py\nimport nothing_of_the_kind\n```", "No module named"),
        ("```yaml compose\na: [\n```", "line 1"),
        ("```python\nprint(1)\n```\n```rust\nfn main() {}\n```", "nobody can run 'rust'"),
        ("```\nsome code\n```", "no figure"),
        ("say:\n\n    gaffer status\n", "without a fence"),
    ],
)
def test_a_page_that_lies_is_caught(page: str, said: str, tmp_path: Path, url: str) -> None:
    with pytest.raises(Exception, match=r"(?s).+") as caught:
        pages.run(page, tmp_path, url)
    assert said in str(caught.value)


def test_what_a_page_may_leave_open(tmp_path: Path, url: str) -> None:
    page = """
```sh
export WHO=ann
printf 'at 12:31\\nmore\\neven more\\nlast  one\\n'
```

```text
at …
…
last one
```

```sql a
begin; create table t (n int); insert into t values (1); commit; begin;
select count(*) as rows from t;
```

```text
 rows
------
    1
…
```

```sql b
insert into t values (2);
```

```sql a
select count(*) from t; select now() = statement_timestamp() as is_new;
```

```sh
echo $WHO
```

```text
ann
```
"""
    assert pages.run(page, tmp_path, url) == 8
