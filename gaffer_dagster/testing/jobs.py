"""A job as a test has it: one run after another in this process, and how another process finds it again."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from gaffer_dagster.domain.run import Outcome, RunRecord
from gaffer_dagster.domain.spec import JobSpec
from gaffer_dagster.engine.log import wrap
from gaffer_dagster.engine.run import Run, Work, open_run
from gaffer_dagster.engine.steps import Observer
from gaffer_dagster.errors import BadInputError, UnknownJobError
from gaffer_dagster.testing.clock import ahead

if TYPE_CHECKING:
    from gaffer_dagster.adapter.by_hand import Asset

    Job = Asset | JobSpec


def job_in(where: str | Path, name: str) -> Asset:
    """The job of this name that a Python file (`"jobs.py"`) or module (`"my_project.jobs"`) defines, as `gaffer run`
    finds it with -f and -m. Raises `UnknownJobError`."""
    definitions = importlib.import_module("gaffer_dagster.cli.definitions")
    is_file = isinstance(where, Path) or where.endswith(".py")
    found = _assets_in(definitions.load_file(Path(where)) if is_file else definitions.load_module(where))
    if name not in found:
        raise UnknownJobError(f"no job {name!r} is defined in {where}; there is {', '.join(sorted(found)) or 'none'}")
    return found[name]


def run_due(
    job: Job, url: str, *, work: Work | None = None, resources: Mapping[str, object] | None = None
) -> list[RunRecord]:
    """Does all that is due right now by the clock of this database, as `gaffer run` would: one run, and where that was
    capped, the next. Their records, in order.

    `job`: an asset, which Dagster materializes with these `resources` beside that of the database; or a `JobSpec`, with
    its function as `work`. Raises what the function raised; the run that it failed is in `gaffer.job_runs`.
    """
    records: list[RunRecord] = []
    while True:
        run = run_once(job, url, work=work, resources=resources or {})
        if run.record is None:
            return records
        records.append(run.record)
        if run.record.outcome is not Outcome.CAPPED or not run.record.items:
            return records


class RunDue(Protocol):
    """The fixture `gaffer_run_due`: `run_due` in its database."""

    def __call__(
        self, job: Job, *, work: Work | None = None, resources: Mapping[str, object] | None = None
    ) -> list[RunRecord]: ...


def run_once(
    job: Job,
    url: str,
    *,
    work: Work | None,
    resources: Mapping[str, object],
    observe: Observer = lambda station: None,
) -> Run:
    """One run, as whoever asked for it is told of it. `observe` is told of each station."""

    def clock() -> datetime:
        return datetime.now(timezone.utc) + ahead(url)

    if not isinstance(job, JobSpec):
        by_hand = importlib.import_module("gaffer_dagster.adapter.by_hand")
        return by_hand.materialize(job, url, resources=resources, observe=observe, worker_clock=clock)
    if work is None:
        raise BadInputError(f"job {job.name!r} is a JobSpec, which has no function; give it as work=")
    with open_run(job, url, log=wrap(logging.getLogger("gaffer")), observe=observe, worker_clock=clock) as run:
        run.apply(work)
    run.reported()
    return run


def spec_of(job: Job) -> JobSpec:
    if isinstance(job, JobSpec):
        return job
    return importlib.import_module("gaffer_dagster.adapter.assets").job_of(job).spec


@dataclass(frozen=True)
class Place:
    """Where another process finds a job: the name and file of its module, and the asset's name there, or the spec and
    the name of its function."""

    module: str
    file: str
    name: str
    spec: JobSpec | None = None

    def load(self) -> tuple[Job, Work | None]:
        """The job and its function, loaded anew."""
        module = self._module()
        if self.spec is None:
            return _assets_in(module)[self.name], None
        work: Any = module
        for part in self.name.split("."):
            work = getattr(work, part)
        return self.spec, work

    def _module(self) -> ModuleType:
        try:
            known = importlib.util.find_spec(self.module)
        except (ImportError, ValueError):
            known = None
        if known is not None and known.origin is not None and os.path.abspath(known.origin) == self.file:
            return importlib.import_module(self.module)
        # Where it is not on the path, as pytest's importlib mode has it, or shadowed there.
        spec = importlib.util.spec_from_file_location(self.module, self.file)
        if spec is None or spec.loader is None:
            raise BadInputError(f"{self.file} cannot be loaded as Python")
        module = sys.modules[self.module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


def place_of(job: Job, work: Work | None) -> Place:
    """Where it is. Raises `BadInputError` for what another process cannot find: what is not defined in a module."""
    if isinstance(job, JobSpec):
        if work is None:
            raise BadInputError(f"job {job.name!r} is a JobSpec, which has no function; give it as work=")
        module, name = sys.modules.get(work.__module__), str(getattr(work, "__qualname__", ""))
        if module is not None and module.__file__ is not None and name and "<" not in name:
            return Place(module.__name__, os.path.abspath(module.__file__), name, job)
        raise BadInputError(
            f"the function of job {job.name!r} is run in other processes, which cannot find {name!r}; define it at the "
            "top of a module"
        )
    defined = importlib.import_module("gaffer_dagster.adapter.assets").job_of(job)
    likely = sys.modules.get(getattr(defined.work, "__module__", ""))
    for module in [likely, *list(sys.modules.values())]:
        file = getattr(module, "__file__", None)
        if module is not None and file is not None and _assets_in(module).get(defined.spec.name) is job:
            return Place(module.__name__, os.path.abspath(file), defined.spec.name)
    raise BadInputError(
        f"the asset {defined.spec.name!r} is run in other processes, which cannot find it; define it at the top of a "
        "module (a list or dict there will do), or take it from a file: job_in('jobs.py', 'NAME')"
    )


def _assets_in(module: ModuleType) -> dict[str, Asset]:
    find: Callable[[ModuleType], Any] = importlib.import_module("gaffer_dagster.adapter.by_hand").assets_in
    return {spec_of(asset).name: asset for asset in find(module)}
