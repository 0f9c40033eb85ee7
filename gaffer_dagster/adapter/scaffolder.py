"""`dg scaffold defs gaffer_dagster.GafferComponent NAME`: a job that loads as it is, to be changed where it says so."""

from __future__ import annotations

import re
from typing import Any, Literal

import dagster as dg
from pydantic import BaseModel, Field

from gaffer_dagster.errors import BadInputError

_YAML = """\
type: {type}
attributes:
  name: {name}
  schedule:
    cron: "{cron}"
    timezone: {timezone}
  due:
    new_rows: # or pending_rows, each_interval, elapsed
      table: {table}
      key: {key}
{does}"""
_SQL = """\
  sql: | # one statement, which reads what is due as `due`
    insert into {name} select * from due
"""
_FUNCTION = """\
  function: .work.{name} # in work.py, beside this file
"""
_WORK = '''\
import gaffer_dagster as gd


def {name}(batch: gd.Batch) -> None:
    """Does one batch: what it writes through it commits together with the watermark, or not at all."""
    batch.insert("{name}", batch.rows)
'''
_COMPONENT = """\
import dagster as dg
import gaffer_dagster as gd
{imports}

@dg.component_instance
def load(context: dg.ComponentLoadContext) -> gd.GafferComponent:
    return gd.GafferComponent(
        name="{name}",
        schedule=gd.Schedule("{cron}", timezone="{timezone}"),
        due=gd.NewRows("{table}", key="{key}"),
        {does},
    )
"""
_SQL_OF_COMPONENT = 'sql="insert into {name} select * from due"'


class GafferScaffoldParams(BaseModel):
    table: str = Field("source", description="The table whose new rows are due.")
    key: str = Field("id", description="A column of it that is unique and never null.")
    cron: str = Field("@hourly", description="When to wake the job.")
    timezone: str = Field("UTC", description="The zone in which the cron is meant.")
    work: Literal["sql", "python"] = Field(
        "sql", description="`sql`, or `python` for a function, which is written too."
    )


class GafferScaffolder(dg.Scaffolder[GafferScaffoldParams]):
    @classmethod
    def get_scaffold_params(cls) -> type[GafferScaffoldParams]:
        return GafferScaffoldParams

    def scaffold(self, request: dg.ScaffoldRequest[GafferScaffoldParams]) -> None:
        folder = request.target_path.parent if request.append else request.target_path
        is_python = request.params.work == "python"
        name = re.sub(r"\W", "_", folder.name.lower(), flags=re.ASCII)
        words: dict[str, Any] = {"type": request.type_name, "name": name, **request.params.model_dump()}
        if is_python and (folder / "work.py").exists():
            raise BadInputError(f"{folder / 'work.py'} is there already; scaffold into a folder of its own")
        if is_python:
            (folder / "work.py").write_text(_WORK.format(**words))
        if request.scaffold_format == "python":
            words["imports"] = "\nfrom .work import {name}\n".format(**words) if is_python else ""
            words["does"] = f"function={name}" if is_python else _SQL_OF_COMPONENT.format(**words)
            (folder / "component.py").write_text(_COMPONENT.format(**words))
            return
        words["does"] = (_FUNCTION if is_python else _SQL).format(**words)
        path = request.target_path if request.append else folder / "defs.yaml"
        with path.open("a" if request.append else "w") as file:
            file.write(("---\n" if request.append else "") + _YAML.format(**words))
