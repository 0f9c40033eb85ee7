"""Imported by the process that the runs are forked from, so that each need not load what Dagster loads when it first
runs something: that would take three times as long as the run."""

from __future__ import annotations

from gaffer_dagster.adapter.by_hand import warm_up

warm_up()
