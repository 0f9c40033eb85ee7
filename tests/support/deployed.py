"""What is in deploy/: each expression of the alert rules and of the dashboard, and what it reads."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import promql_parser as promql
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "gaffer_rules.yaml"
DASHBOARD = DEPLOY / "grafana" / "gaffer_dashboard.json"

ADDED = {"instance", "job"}
"""The labels that Prometheus puts on whatever it scrapes."""


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    return json.loads(DASHBOARD.read_text())


def expressions() -> dict[str, str]:
    """Each by where it is, with Grafana's variables filled in."""
    found = {rule["alert"]: rule["expr"] for rule in rules()}
    for panel in dashboard()["panels"]:
        for target in panel["targets"]:
            found[f"panel {panel['id']} {target['refId']}"] = target["expr"].replace("$__rate_interval", "5m")
    return found


def selectors(expression: str) -> list[promql.VectorSelector]:
    found: list[Any] = []
    promql.walk(promql.parse(expression), found.append)
    return [each for each in found if isinstance(each, promql.VectorSelector)]


def grouped_by(expression: str) -> set[str]:
    """The labels in `on (…)` and `by (…)`."""
    return set(re.findall(r"\w+", " ".join(re.findall(r"\b(?:on|by)\s*\(([^)]*)\)", expression))))


def unknown(expression: str, printed: Mapping[str, set[str]]) -> Iterator[str]:
    """The metrics and labels in it that are not `printed` (the labels of each metric)."""
    for selector in selectors(expression):
        if selector.name not in printed:
            yield str(selector.name)
        else:
            yield from ({each.name for each in selector.matchers.matchers} - printed[selector.name] - ADDED)
    yield from grouped_by(expression) - set[str]().union(*printed.values()) - ADDED
