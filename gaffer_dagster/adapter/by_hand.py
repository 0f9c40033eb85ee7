"""A run of one asset by Dagster, in this process, with what a test tells the engine."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import dagster as dg
from pydantic import PrivateAttr

from gaffer_dagster.adapter.assets import is_gaffer_asset, job_of
from gaffer_dagster.adapter.definitions import values_in
from gaffer_dagster.adapter.resource import GafferResource
from gaffer_dagster.domain.spec import JobSpec
from gaffer_dagster.engine.run import Run

Asset = dg.AssetsDefinition


def assets_in(module: ModuleType) -> Iterator[Asset]:
    """What `gaffer_asset` has made, as far as the module has it."""
    return (value for value in values_in(module) if is_gaffer_asset(value))


class _ByHand(GafferResource):
    """The resource of one run: hands the engine what it was not asked for, and keeps the run."""

    _options: dict[str, Any] = PrivateAttr(default_factory=dict)
    _runs: list[Run] = PrivateAttr(default_factory=list[Run])

    def tell(self, options: Mapping[str, Any]) -> None:
        self._options.update(options)

    @property
    def newest(self) -> Run:
        return self._runs[-1]

    @contextmanager
    def run(self, spec: JobSpec, **options: Any) -> Generator[Run]:
        with super().run(spec, **options, **self._options) as run:
            self._runs.append(run)
            yield run


def warm_up() -> None:
    """Has Dagster load what it loads only when it first needs an instance."""
    with dg.DagsterInstance.ephemeral():  # pyright: ignore[reportUnknownMemberType] — Dagster's own annotation
        pass


def materialize(asset: Asset, url: str, *, resources: Mapping[str, object], **options: Any) -> Run:
    """The run that materializing the asset was, as `dg.materialize` does it. `options` are those of
    `gaffer_dagster.engine.run.open_run`. Raises what the asset's function raised."""
    resource = _ByHand(dsn=url)
    resource.tell(options)
    # As it is: Dagster would hand the asset a copy of it.
    ours = dg.ResourceDefinition.hardcoded_resource(resource)
    dg.materialize([asset], resources={**resources, job_of(asset).database: ours})
    return resource.newest
