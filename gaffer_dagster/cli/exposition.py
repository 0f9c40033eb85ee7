"""Metrics as Prometheus text. Needs prometheus_client, so it is imported only where they are asked for.

A job's name is the label `job_name`: Prometheus puts a label `job` of its own on whatever it scrapes, and renames ours.
A value that is not there (never succeeded, nothing due) is a series that is not there, since 0 would be a time in 1970.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from gaffer_dagster import __version__
from gaffer_dagster.domain.alert import Kind
from gaffer_dagster.domain.incident import Finding
from gaffer_dagster.store.metrics import JobStatus, Metrics

_Value = datetime | float | None
_JOB: dict[str, tuple[str, Callable[[JobStatus], _Value]]] = {
    "first_seen_timestamp_seconds": ("When the job was made known.", lambda job: job.first_seen_at),
    "last_success_timestamp_seconds": ("When it last succeeded; missing: never.", lambda job: job.last_success_at),
    "due_since_timestamp_seconds": (
        "The earliest tick, past by now, that a success is waited for; missing: nothing is due.",
        lambda job: job.due_since,
    ),
    "grace_seconds": ("How late a success may come after its tick.", lambda job: job.grace_seconds),
    "backlog": ("What was due and left, as the newest run that could tell said.", lambda job: job.backlog),
    "backlog_since_timestamp_seconds": (
        "Since when something due has been left, as far as runs know; missing: nothing is.",
        lambda job: job.backlog_since,
    ),
    "consecutive_failures": ("Ticks in a row whose runs failed.", lambda job: job.consecutive_failures),
    "consecutive_capped": (
        "Runs in a row that stopped at their bounds, with something left.",
        lambda job: job.consecutive_capped,
    ),
    "parked_rows": ("Rows that were given up.", lambda job: job.parked),
    "lease_fence": ("The fence of its newest lease; only grows.", lambda job: job.fence),
    "paused": ("1: its runs do nothing at present.", lambda job: job.paused),
    "muted": ("1: nothing is sent of its incidents at present.", lambda job: job.muted),
    "retired": ("1: it is not meant to run any more.", lambda job: job.retired),
}


class _Families(Collector):
    def __init__(self, metrics: Metrics, at: datetime, findings: Sequence[Finding]) -> None:
        self._database, self._metrics, self._at, self._findings = metrics.database, metrics, at, findings

    def collect(self) -> Iterator[Metric]:
        yield self._gauge("gaffer_build_info", "1, for the version that wrote this.", ["version"], [([__version__], 1)])
        yield self._gauge(
            "gaffer_metrics_written_timestamp_seconds",
            "When this was read, by the database's clock: what is here is as old as that.",
            [],
            [([], self._at)],
        )
        yield from self._of_jobs()
        yield from self._of_incidents()
        yield from self._of_watches()
        yield from self._of_receivers()

    def _of_jobs(self) -> Iterator[Metric]:
        jobs = self._metrics.jobs
        for name, (text, value) in _JOB.items():
            yield self._gauge(f"gaffer_job_{name}", text, ["job_name"], [([job.name], value(job)) for job in jobs])
        overdue = {each.job: self._at - each.since for each in self._findings if each.kind is Kind.ABSENCE}
        yield self._gauge(
            "gaffer_job_overdue_seconds",
            "Since its grace is over, by the rule of its alerts; 0: it is in time.",
            ["job_name"],
            [([job.name], overdue.get(job.name, timedelta()).total_seconds()) for job in jobs],
        )
        lost = CounterMetricFamily(
            "gaffer_job_leases_lost_total",
            "Runs that were found dead, or whose lease was taken from them.",
            labels=["database", "job_name"],
        )
        took = SummaryMetricFamily(
            "gaffer_run_duration_seconds",
            "Runs that ended by themselves, whatever their outcome, and how long they took.",
            labels=["database", "job_name"],
        )
        for job in jobs:
            lost.add_metric([self._database, job.name], job.leases_lost)
            took.add_metric([self._database, job.name], job.runs_ended, job.run_seconds)
        yield lost
        yield took

    def _of_incidents(self) -> Iterator[Metric]:
        labels = ["job_name", "watch", "kind", "severity"]
        yield self._gauge(
            "gaffer_finding_since_timestamp_seconds",
            "Since when this has been wrong, by the same rules as alerts, and by no watch's leave.",
            labels,
            [([each.job, each.watch, each.kind, each.severity], each.since) for each in self._findings],
        )
        alerts = self._metrics.alerts
        yield self._gauge(
            "gaffer_alert_since_timestamp_seconds",
            "Since when this has been wrong, of each incident that a watch has opened.",
            [*labels, "acked"],
            [
                ([each.job, each.watch, each.kind, each.severity, str(each.acked).lower()], each.since)
                for each in alerts
            ],
        )
        count = Counter({(str(kind), str(kind.severity)): 0 for kind in Kind})
        count.update((each.kind, each.severity) for each in alerts)
        yield self._gauge("gaffer_alerts_open", "Incidents that are open.", ["kind", "severity"], list(count.items()))

    def _of_watches(self) -> Iterator[Metric]:
        watches = self._metrics.watches
        yield self._gauge(
            "gaffer_watch_last_pass_timestamp_seconds",
            "When this watch looked last.",
            ["watch"],
            [([each.name], each.last_pass_at) for each in watches],
        )
        yield self._gauge(
            "gaffer_watch_interval_seconds",
            "How often it means to look; missing: it does not say.",
            ["watch"],
            [([each.name], each.interval_seconds) for each in watches],
        )
        passes = CounterMetricFamily(
            "gaffer_watch_passes_total", "How often it has looked.", labels=["database", "watch"]
        )
        for each in watches:
            passes.add_metric([self._database, each.name], each.passes)
        yield passes

    def _of_receivers(self) -> Iterator[Metric]:
        receivers = self._metrics.receivers
        yield self._gauge(
            "gaffer_receiver_waiting_notices",
            "Notices that this receiver has not taken yet, with those that a mute holds back.",
            ["receiver"],
            [([each.name], each.waiting) for each in receivers],
        )
        yield self._gauge(
            "gaffer_receiver_last_seen_timestamp_seconds",
            "When somebody last had a look at what is to be sent to it.",
            ["receiver"],
            [([each.name], each.last_seen_at) for each in receivers],
        )
        yield self._gauge(
            "gaffer_receiver_failing",
            "1: it did not take the last one.",
            ["receiver"],
            [([each.name], each.failing_since is not None) for each in receivers],
        )

    def _gauge(
        self, name: str, text: str, labels: Sequence[str], values: Sequence[tuple[Sequence[str | None], _Value]]
    ) -> Metric:
        family = GaugeMetricFamily(name, text, labels=["database", *labels])
        for given, value in values:
            if value is not None:
                number = value.timestamp() if isinstance(value, datetime) else value
                family.add_metric([self._database, *(str(each or "") for each in given)], number)
        return family


def exposition(metrics: Metrics, at: datetime, findings: Sequence[Finding]) -> bytes:
    """All of it, as of `at`. `findings`: what is wrong by then."""
    registry = CollectorRegistry()
    registry.register(_Families(metrics, at, findings))
    return generate_latest(registry)


def samples(text: bytes) -> Iterator[dict[str, object]]:
    """The same, one by one."""
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            yield {"name": sample.name, "labels": sample.labels, "value": sample.value}
