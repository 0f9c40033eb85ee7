"""The only folder that imports dagster. Dagster shows our version with a code location that uses it."""

from dagster_shared.libraries import DagsterLibraryRegistry

from gaffer_dagster import __version__

DagsterLibraryRegistry.register("gaffer_dagster", __version__, is_dagster_package=False)
