"""What users need to test their own jobs: a scratch database, a settable clock."""

from gaffer_dagster.testing.clock import Clock
from gaffer_dagster.testing.database import scratch_database

__all__ = ["Clock", "scratch_database"]
