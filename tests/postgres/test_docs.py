"""Every block of code in the documents does what the page says that it does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import pages

ROOT = pages.ROOT
PAGES = sorted(str(path.relative_to(ROOT)) for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
GENERATED = "docs/reference/"


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", [name for name in PAGES if not name.startswith(GENERATED)])
def test_what_a_page_shows_is_what_happens(name: str, tmp_path: Path, url: str) -> None:
    print(pages.run((ROOT / name).read_text(), tmp_path, url), "blocks")


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
