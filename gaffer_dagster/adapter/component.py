"""`GafferComponent`: a scheduled job as a `defs.yaml` of a `dg` project, with SQL or with a function of the project."""

# No postponed annotations here: Dagster makes the fields of the component of them.

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import MISSING, dataclass, fields
from datetime import timedelta
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

import dagster as dg
from pydantic import BaseModel

from gaffer_dagster.adapter import assets, sensors
from gaffer_dagster.adapter.assets import Function, gaffer_asset
from gaffer_dagster.adapter.definitions import build_definitions
from gaffer_dagster.adapter.resource import GafferResource
from gaffer_dagster.adapter.scaffolder import GafferScaffolder
from gaffer_dagster.adapter.yaml_models import (
    descriptions,
    filled_in,
    make_model,
    maker,
    model_of,
    paragraphs,
    refused,
)
from gaffer_dagster.database import VARIABLE
from gaffer_dagster.domain.alert import Alerts, is_variable
from gaffer_dagster.domain.bounds import Bounds
from gaffer_dagster.domain.due import Due, EachInterval, Elapsed, NewRows, PendingRows
from gaffer_dagster.domain.schedule import Schedule
from gaffer_dagster.domain.spec import JobSpec
from gaffer_dagster.errors import BadSpecError, GafferError

_KINDS: Mapping[str, type] = {
    "new_rows": NewRows,
    "pending_rows": PendingRows,
    "each_interval": EachInterval,
    "elapsed": Elapsed,
}
_DUE = make_model(
    "Due",
    "What a run has to do.",
    {name: (model_of(kind), None, paragraphs(kind)[0]) for name, kind in _KINDS.items()},
)
_OF_SPEC = descriptions(JobSpec)


def _due(context: dg.ResolutionContext, given: BaseModel) -> Any:
    names = [name for name in _KINDS if name in given.model_fields_set]
    if len(names) != 1:
        raise refused(context, f"{' and '.join(names) or 'nothing'} is given; give one of {', '.join(_KINDS)}")
    return maker(_KINDS[names[0]])(context.at_path(names[0]), getattr(given, names[0]))


def _function(context: dg.ResolutionContext, path: str) -> Any:
    if not all(part.isidentifier() for part in path.removeprefix(".").split(".")) or "." not in path:
        raise refused(context, f"{path!r} is no dotted path of a function; write such as my_project.work.do_batch")
    module_name, _, name = path.rpartition(".")
    if path.startswith("."):
        loading = dg.ComponentLoadContext.from_resolution_context(context)
        module_name = loading.defs_relative_module_name(loading.path) + module_name
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, and something that it imports is not
        cure = "write the whole path, or one that begins with a dot for a file beside this one"
        raise refused(context, f"{path!r}: there is no module {error.name!r}; {cure}") from None
    if not hasattr(module, name):
        raise refused(context, f"{path!r}: {module.__file__} has no {name!r}; write a function of that name there")
    return getattr(module, name)


def _variable(context: dg.ResolutionContext, name: str) -> str:
    if not is_variable(name):
        raise refused(
            context,
            "what is there is no name of an environment variable (and not shown, since it may have a password in it); "
            f"put the database's URL into a variable, and write the variable's name, such as {VARIABLE}, without env. "
            "and braces around it, which would put the URL itself into what Dagster stores and shows",
        )
    return name


def _says(told: str, hint: Any, resolve: Callable[[dg.ResolutionContext, Any], Any] = filled_in) -> dg.Resolver:
    """Of a field: what it is for, its type in YAML, and how that becomes the field's."""
    return dg.Resolver(resolve, model_field_type=hint, description=told, inject_before_resolve=False)


@dg.scaffold_with(GafferScaffolder)
@dataclass(kw_only=True, eq=False)
class GafferComponent(dg.Component, dg.Resolvable):
    """A scheduled job whose work is one SQL statement, or a Python function, and what is due to it.

    It is `gaffer_asset` and `build_definitions` in YAML. All the components of a code location share one sensor.
    """

    name: Annotated[str, _says("The asset's name, and the end of the job's, by which its watermark goes.", str)]
    due: Annotated[Due, _says("What a run has to do: one of these.", _DUE, _due)]
    sql: Annotated[
        str | None,
        _says("The work: one statement that reads what is due as `due`, like `insert into t select … from due`.", str),
    ] = None
    function: Annotated[
        Function | None,
        _says("The work: the path of a function of a Batch; with a dot first, in a file beside this.", str, _function),
    ] = None
    schedule: Annotated[
        Schedule | None,
        _says("When to wake the job; left out: when asked to.", model_of(Schedule), maker(Schedule)),
    ] = None
    bounds: Annotated[Bounds | None, _says("How much one run may do.", model_of(Bounds), maker(Bounds))] = None
    alerts: Annotated[
        Alerts | None, _says("When to speak about the job, and to whom.", model_of(Alerts), maker(Alerts))
    ] = None
    exclusion: Annotated[str, _says(_OF_SPEC["exclusion"], Literal["fence", "advisory"])] = "fence"
    max_late: Annotated[timedelta | str | None, _says(_OF_SPEC["max_late"], str)] = None
    protect: Annotated[Sequence[str], _says(_OF_SPEC["protect"], list[str])] = ()
    database_url_variable: Annotated[
        str, _says("The name, never the value, of the variable with the database's URL.", str, _variable)
    ] = VARIABLE
    key_prefix: Annotated[
        str | Sequence[str] | None, _says("What comes before the name in the asset's key.", str | list[str])
    ] = None
    deps: Annotated[Iterable[Any] | None, _says("The keys of assets it depends on: `raw/flights`.", list[str])] = None
    description: Annotated[str | None, _says("Of the asset; left out: the function's docstring.", str)] = None
    group_name: Annotated[str | None, _says("The asset's group.", str)] = None
    owners: Annotated[Sequence[str] | None, _says("Mail addresses, or teams: `team:data`.", list[str])] = None
    tags: Annotated[Mapping[str, str] | None, _says("The asset's tags.", dict[str, str])] = None
    kinds: Annotated[AbstractSet[str] | None, _says("The asset's kinds; left out: postgres.", list[str])] = None
    metadata: Annotated[Mapping[str, Any] | None, _says("The asset's metadata.", dict[str, Any])] = None
    code_version: Annotated[str | None, _says("Of the work, by which Dagster tells changes.", str)] = None

    @classmethod
    def get_spec(cls) -> dg.ComponentTypeSpec:
        return dg.ComponentTypeSpec(description="\n\n".join(paragraphs(GafferComponent)), tags=["postgres", "schedule"])

    @classmethod
    def model(cls) -> type[BaseModel]:
        return _model(cls)

    @classmethod
    def resolve_from_model(cls, context: dg.ResolutionContext, model: BaseModel) -> Any:
        made = super().resolve_from_model(context, model)
        try:
            _ = made.asset
        except (GafferError, dg.DagsterError) as error:
            raise refused(context, error, model.model_fields_set) from None
        return made

    @property
    def database(self) -> str:
        """The key of the resource that the job works on."""
        is_usual = self.database_url_variable == VARIABLE
        return "gaffer" if is_usual else f"gaffer_{self.database_url_variable.lower()}"

    @cached_property
    def asset(self) -> dg.AssetsDefinition:
        """The job. Raises `BadSpecError`."""
        if (self.sql is None) == (self.function is None):
            raise BadSpecError(f"job {self.name!r}: give its work as either sql= or function=")
        named = {each.name: getattr(self, each.name) for each in fields(GafferComponent)}
        work = named.pop("function") or None
        del named["database_url_variable"]
        keys = [dg.AssetKey.from_user_string(each) if isinstance(each, str) else each for each in self.deps or ()]
        options: Any = {**named, "database": self.database, "deps": keys or None}
        made = cast("Any", gaffer_asset)(**options)
        return made if work is None else made(work)

    @cached_property
    def resource(self) -> GafferResource:
        return GafferResource(dsn=dg.EnvVar(self.database_url_variable))

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """Its asset. The first component of the code location also brings what there is one of, the sensor, which needs
        all jobs; and with it the jobs, schedules and checks of all."""
        # In no folder, as in `dg.build_defs_for_component`, it is alone.
        is_in_folder = getattr(context.component_loc, "instance_key", None) is not None
        together = self._together(context) if is_in_folder else [self]
        if together[0] is not self:
            return dg.Definitions(assets=[self.asset])
        if is_in_folder:
            _check_files(context)
        built = build_definitions(
            *(each.asset for each in together), resources={each.database: each.resource for each in together}
        )
        return dg.Definitions(
            assets=[self.asset],
            asset_checks=built.asset_checks,
            jobs=built.jobs,
            schedules=built.schedules,
            sensors=built.sensors,
            resources=built.resources,
        )

    def _together(self, context: dg.ComponentLoadContext) -> "Sequence[GafferComponent]":
        """The components of the code location, in the order of their files."""
        found = context.component_tree.get_all_components(of_type=GafferComponent)
        if found and not any(each is self for each in found):
            raise BadSpecError(
                f"job {self.name!r}: Dagster does not count it among the GafferComponents of this code location, and "
                "it would have a sensor of its own; let a @dg.component_instance return it, annotated `-> "
                "gd.GafferComponent` in a file without `from __future__ import annotations`"
            )
        return found or [self]


@cache
def _model(component: type[GafferComponent]) -> type[BaseModel]:
    found: dict[str, tuple[Any, object, str]] = {}
    for each in fields(component):
        says = next(about for about in get_args(each.type) if isinstance(about, dg.Resolver))
        default = ... if each.default is MISSING else each.default
        found[each.name] = (says.model_field_type, default, says.description or "")
    return make_model(component.__name__, paragraphs(component)[0], found)


_looking: set[int] = set()


def _check_files(context: dg.ComponentLoadContext) -> None:
    """Refuses jobs that Python files of the folder define: two sensors would each take the other's jobs for gone."""
    tree = context.component_tree
    if id(tree) in _looking:  # such a file asks for what we define
        return
    _looking.add(id(tree))
    try:
        for decl in cast("Any", tree.find_root_decl()).iterate_all_component_decls():
            path, part = getattr(decl.loc, "file_path", Path()), getattr(decl.loc, "instance_key", None)
            if path.suffix == ".py" and part is None and not any(decl.iterate_child_component_decls()):
                _check_file(path, context.build_defs(decl.loc))
    finally:
        _looking.discard(id(tree))


def _check_file(path: Path, built: dg.Definitions) -> None:
    if any(sensor.name == sensors.NAME for sensor in built.sensors or []):
        what = "calls build_definitions"
    elif any(assets.is_gaffer_asset(asset) for asset in built.assets or []):
        what = "has a @gaffer_asset"
    else:
        return
    raise BadSpecError(
        f"{path} {what}, and this code location has GafferComponents, whose one sensor must know all jobs; write the "
        "job as a GafferComponent too, with the path of its function as function:"
    )
