"""Tables for people fit the window that there is."""

from __future__ import annotations

import re

import pytest

from gaffer_dagster.cli.command import Table

ERROR = "relation nightly does not exist: create it, or name another one in the definition of the job"


def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int) -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    monkeypatch.setenv("TERM", "xterm")
    table = Table("run", "job", "started", "outcome", "backlog", "error")
    table.add_row("12", "nightly_report", "2027-01-01 06:00:00Z", "failed", "-", ERROR)
    table.add_row("13", "nightly_report", "2027-01-02 06:00:00Z", "succeeded", "0", "")
    table.print()
    return re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)


@pytest.mark.parametrize("columns", [200, 100])
def test_a_wide_window_has_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int
) -> None:
    text = shown(monkeypatch, capsys, columns)
    assert text.startswith("┏")
    assert "2027-01-01 06:00:00Z" in text
    assert "…" not in text


@pytest.mark.parametrize("columns", [80, 40, 20])
def test_in_a_narrow_one_nothing_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int
) -> None:
    text = shown(monkeypatch, capsys, columns)
    assert max(map(len, text.splitlines())) <= columns
    assert "…" not in text
    told = " ".join(text.split())
    assert f"run 12 · job nightly_report · started 2027-01-01 06:00:00Z · outcome failed · error {ERROR}" in told
    assert told.endswith("run 13 · job nightly_report · started 2027-01-02 06:00:00Z · outcome succeeded · backlog 0")
