"""What is in deploy/. That each metric it reads is one that `gaffer metrics` prints: tests/postgres/test_metrics.py."""

from __future__ import annotations

import re
import shutil
import subprocess
from itertools import combinations
from pathlib import Path

import promql_parser as promql
import pytest
import yaml

from gaffer_dagster.domain.alert import Kind, Severity
from tests.support import deployed

PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool (of Prometheus) is not on this machine")


@pytest.mark.parametrize(("where", "expression"), deployed.expressions().items(), ids=deployed.expressions())
def test_every_expression_is_promql(where: str, expression: str) -> None:
    assert deployed.selectors(expression), where


def test_an_expression_that_is_none_is_seen() -> None:
    with pytest.raises(ValueError, match="inside braces"):
        promql.parse('gaffer_job_muted{job_name="a" == 1')


def test_every_rule_waits_and_says_how_bad_what_and_what_to_type() -> None:
    rules = deployed.rules()
    assert len({rule["alert"] for rule in rules}) == len(rules) >= 10
    for rule in rules:
        assert promql.parse_duration(rule["for"]).total_seconds() >= 60
        assert set(rule["annotations"]) == {"summary", "description"}
        assert re.search(r"`gaffer \w+", rule["annotations"]["description"]), rule["alert"]
        # Without one of its own it has that of what was found.
        if "labels" in rule:
            assert rule["labels"]["severity"] in set(map(str, Severity))
        else:
            assert deployed.selectors(rule["expr"])[0].name == "gaffer_finding_since_timestamp_seconds"


def test_every_rule_of_jobs_names_the_job_and_is_silent_where_it_is_muted() -> None:
    of_jobs = [rule for rule in deployed.rules() if "job_name" in rule["expr"]]
    assert len(of_jobs) >= 6
    for rule in of_jobs:
        assert "{{ $labels.job_name }}" in rule["annotations"]["summary"]
        assert "{{ $labels.job_name }}`" in rule["annotations"]["description"]
        assert "gaffer_job_muted" in {each.name for each in deployed.selectors(rule["expr"])}


def test_every_kind_of_alert_has_one_rule() -> None:
    """Takeovers by the counter, and a watch by its last pass."""
    found: list[str] = []
    for rule in deployed.rules():
        selector = deployed.selectors(rule["expr"])[0]
        if selector.name == "gaffer_finding_since_timestamp_seconds":
            (kind,) = selector.matchers.matchers
            found += [str(each) for each in Kind if _matches(kind, str(each))]
    assert sorted(found) == sorted(str(kind) for kind in Kind if kind not in (Kind.TAKEOVERS, Kind.WATCH))


def _matches(matcher: promql.Matcher, value: str) -> bool:
    named = re.fullmatch(matcher.value, value) is not None
    return named if matcher.op in (promql.MatchOp.Equal, promql.MatchOp.Re) else not named


def test_panels_have_a_number_each_and_do_not_overlap() -> None:
    panels = deployed.dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) >= 10
    for one, other in combinations(panels, 2):
        assert not _overlap(one["gridPos"], other["gridPos"]), (one["title"], other["title"])
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)


def _overlap(one: dict[str, int], other: dict[str, int]) -> bool:
    return all(
        one[at] < other[at] + other[size] and other[at] < one[at] + one[size] for at, size in (("x", "w"), ("y", "h"))
    )


def test_panels_that_overlap_are_seen() -> None:
    assert _overlap({"x": 0, "y": 0, "w": 4, "h": 4}, {"x": 3, "y": 3, "w": 4, "h": 4})
    assert not _overlap({"x": 0, "y": 0, "w": 4, "h": 4}, {"x": 4, "y": 0, "w": 4, "h": 4})


def test_the_dashboard_reads_the_source_database_and_jobs_that_are_chosen() -> None:
    found = deployed.dashboard()
    assert [each["name"] for each in found["templating"]["list"]] == ["datasource", "database", "job"]
    for panel in found["panels"]:
        assert panel["title"]
        for part in (panel, *panel["targets"]):
            assert part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        for target in panel["targets"]:
            for selector in deployed.selectors(target["expr"].replace("$__rate_interval", "5m")):
                chosen = {each.name: each.value for each in selector.matchers.matchers}
                assert chosen["database"] == "$database"
                if selector.name.startswith(("gaffer_job_", "gaffer_run_")):
                    assert chosen["job_name"] == "$job"


# ── what Prometheus itself makes of the rules ────────────────────────────────────────────────────────────────────────

Series = dict[str, str]
PAST = "-600x60"  # it is 0 when promtool begins


def series(name: str, **labels: str) -> str:
    """As Prometheus has it once it has scraped it."""
    all_labels = {"instance": "db:9100", "job": "node", "database": "app"} | labels
    return name + "{" + ", ".join(f'{label}="{value}"' for label, value in all_labels.items()) + "}"


def of_job(name: str, **labels: str) -> str:
    return series(f"gaffer_job_{name}", **({"job_name": "copied"} | labels))


def finding(kind: Kind) -> str:
    return series(
        "gaffer_finding_since_timestamp_seconds", job_name="copied", kind=str(kind), severity=str(kind.severity)
    )


def alert(kind: Kind, acked: str) -> str:
    labels = {"job_name": "copied", "kind": str(kind), "severity": str(kind.severity), "acked": acked}
    return series("gaffer_alert_since_timestamp_seconds", **labels)


ALIVE = {
    series("gaffer_watch_last_pass_timestamp_seconds", watch="dagster"): "0+60x60",
    series("gaffer_watch_interval_seconds", watch="dagster"): "60x60",
    series("gaffer_metrics_written_timestamp_seconds"): "0+60x60",
    series("gaffer_receiver_failing", receiver="log"): "0x60",
    series("gaffer_receiver_failing", receiver="removed"): "1x60",
    series("gaffer_receiver_last_seen_timestamp_seconds", receiver="log"): "0+60x60",
    series("gaffer_receiver_last_seen_timestamp_seconds", receiver="removed"): "-90000x60",
    of_job("first_seen_timestamp_seconds"): "-1000000x60",
    # What is so of another job, and of a job of this name in another database, is nothing to this one.
    of_job("muted", job_name="other"): "1x60",
    of_job("muted", database="crm"): "1x60",
    of_job("last_success_timestamp_seconds", job_name="other"): "0x60",
    of_job("last_success_timestamp_seconds", database="crm"): "0x60",
}
CASES: dict[str, tuple[Series, list[tuple[str, str]]]] = {
    "all is well": ({of_job("muted"): "0x60", alert(Kind.PARKED, "false"): PAST}, []),
    "overdue": ({finding(Kind.ABSENCE): PAST}, [("GafferJobOverdue", "error")]),
    "overdue and muted": ({finding(Kind.ABSENCE): PAST, of_job("muted"): "1x60"}, []),
    "overdue and acknowledged": ({finding(Kind.ABSENCE): PAST, alert(Kind.ABSENCE, "true"): PAST}, []),
    "overdue, and something else acknowledged": (
        {finding(Kind.ABSENCE): PAST, alert(Kind.PARKED, "true"): PAST},
        [("GafferJobOverdue", "error")],
    ),
    "failing": ({finding(Kind.FAILURES): PAST}, [("GafferJobFailing", "error")]),
    "capped": ({finding(Kind.CAPPED): PAST}, [("GafferBacklogGrowing", "warning")]),
    "parked": ({finding(Kind.PARKED): PAST}, [("GafferAlertOpen", "warning")]),
    "never succeeded": (
        {of_job("due_since_timestamp_seconds"): "-86000x60"},
        [("GafferJobNeverSucceeded", "warning")],
    ),
    "due for long, and succeeded once": (
        {of_job("due_since_timestamp_seconds"): "-86000x60", of_job("last_success_timestamp_seconds"): "-990000x60"},
        [],
    ),
    "runs that die": ({of_job("leases_lost_total"): "5 5 6 6 7 7 8 8x60"}, [("GafferLeasesLost", "warning")]),
    "one run that died": ({of_job("leases_lost_total"): "5 5 6 6x60"}, []),
}


def fired(told: Series, fires: list[dict[str, str]], by: str, folder: Path, rules: str) -> str | None:
    """What promtool says against it that exactly these alerts fire, 50 minutes on; None: nothing."""
    (folder / "rules.yaml").write_text(rules)
    test = {
        "rule_files": ["rules.yaml"],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": name, "values": values} for name, values in told.items()],
                "promql_expr_test": [
                    {
                        "expr": f'count by ({by}) (ALERTS{{alertstate="firing"}})',
                        "eval_time": "50m",
                        "exp_samples": [
                            {"labels": "{" + ", ".join(f'{k}="{v}"' for k, v in each.items()) + "}", "value": 1}
                            for each in fires
                        ],
                    }
                ],
            }
        ],
    }
    (folder / "test.yaml").write_text(yaml.safe_dump(test))
    done = subprocess.run([str(PROMTOOL), "test", "rules", "test.yaml"], cwd=folder, capture_output=True, text=True)
    return None if done.returncode == 0 else done.stdout + done.stderr


def of_case(case: str, folder: Path, rules: str) -> str | None:
    told, fires = CASES[case]
    expected = [{"alertname": name, "job_name": "copied", "severity": severity} for name, severity in fires]
    return fired(ALIVE | told, expected, "alertname, job_name, severity", folder, rules)


@needs_promtool
def test_prometheus_takes_the_rules() -> None:
    done = subprocess.run([str(PROMTOOL), "check", "rules", str(deployed.RULES)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
@pytest.mark.parametrize("case", CASES)
def test_what_fires_of_a_job(case: str, tmp_path: Path) -> None:
    assert of_case(case, tmp_path, deployed.RULES.read_text()) is None


@needs_promtool
@pytest.mark.parametrize(
    ("case", "old", "new"),
    [
        ("overdue and muted", "gaffer_job_muted == 1", "gaffer_job_muted == 2"),
        (
            "overdue",
            "unless on (instance, database, job_name) gaffer_job_muted",
            "unless on (instance) gaffer_job_muted",
        ),
        ("overdue, and something else acknowledged", "job_name, kind)", "job_name)"),
        ("due for long, and succeeded once", "gaffer_job_last_success_timestamp_seconds", "gaffer_job_parked_rows"),
        ("one run that died", ">= 3", ">= 1"),
        ("never succeeded", "> 86400", "> 864000"),
    ],
)
def test_broken_rules_are_caught(case: str, old: str, new: str, tmp_path: Path) -> None:
    text = deployed.RULES.read_text()
    assert old in text
    assert of_case(case, tmp_path, text.replace(old, new)) is not None


@needs_promtool
@pytest.mark.parametrize(
    ("gone", "instead", "fires"),
    [
        ("gaffer_watch_last_pass", None, ["GafferAbsent"]),
        ("gaffer_job_first_seen", None, ["GafferNoJob"]),
        ("gaffer_metrics_written", "0+60x10 600x50", ["GafferMetricsStale"]),
        ("gaffer_watch_last_pass", "0+60x20 1200x40", ["GafferNobodyWatches", "GafferWatchStopped"]),
        ("gaffer_receiver_failing", "1x60", ["GafferReceiverFailing"]),
    ],
)
def test_what_fires_of_those_who_look(gone: str, instead: str | None, fires: list[str], tmp_path: Path) -> None:
    told = {name: values for name, values in ALIVE.items() if not name.startswith(gone)}
    if instead is not None:
        told |= {name: instead for name in ALIVE if name.startswith(gone)}
    expected = [{"alertname": name} for name in fires]
    assert fired(told, expected, "alertname", tmp_path, deployed.RULES.read_text()) is None
