"""Scheduled Dagster jobs that must not fail quietly: a fenced lease and watermark store in Postgres.

Names load when they are first used, so that the `gaffer` command starts without Dagster, and works without it.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gaffer_dagster.adapter.assets import gaffer_asset
    from gaffer_dagster.adapter.component import GafferComponent
    from gaffer_dagster.adapter.definitions import build_definitions
    from gaffer_dagster.adapter.resource import GafferResource
    from gaffer_dagster.domain.alert import Alerts
    from gaffer_dagster.domain.bounds import Bounds
    from gaffer_dagster.domain.due import EachInterval, Elapsed, NewRows, PendingRows
    from gaffer_dagster.domain.run import Outcome, RunRecord
    from gaffer_dagster.domain.schedule import Schedule
    from gaffer_dagster.domain.spec import JobSpec
    from gaffer_dagster.engine.batch import Batch
    from gaffer_dagster.errors import GafferError, GafferWarning

__version__ = "0.1.0"

__all__ = [
    "Alerts",
    "Batch",
    "Bounds",
    "EachInterval",
    "Elapsed",
    "GafferComponent",
    "GafferError",
    "GafferResource",
    "GafferWarning",
    "JobSpec",
    "NewRows",
    "Outcome",
    "PendingRows",
    "RunRecord",
    "Schedule",
    "build_definitions",
    "gaffer_asset",
]

_HOMES = {
    "Alerts": "domain.alert",
    "Batch": "engine.batch",
    "Bounds": "domain.bounds",
    "EachInterval": "domain.due",
    "Elapsed": "domain.due",
    "GafferComponent": "adapter.component",
    "GafferError": "errors",
    "GafferResource": "adapter.resource",
    "GafferWarning": "errors",
    "JobSpec": "domain.spec",
    "NewRows": "domain.due",
    "Outcome": "domain.run",
    "PendingRows": "domain.due",
    "RunRecord": "domain.run",
    "Schedule": "domain.schedule",
    "build_definitions": "adapter.definitions",
    "gaffer_asset": "adapter.assets",
}


def _load(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


if not TYPE_CHECKING:  # a type checker would take every name for one of ours
    __getattr__ = _load


def __dir__() -> list[str]:
    # `dg` takes each name that is listed here, and would stop, for all packages, at one that cannot be loaded.
    return sorted({*globals(), *filter(_loads, __all__)})


def _loads(name: str) -> bool:
    try:
        _load(name)
    except Exception as error:
        warnings.warn(f"gaffer_dagster.{name} cannot be loaded: {error}", _load("GafferWarning"), stacklevel=3)
        return False
    return True
