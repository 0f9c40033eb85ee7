"""`gaffer metrics`: what the tables say, for Prometheus."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import click

from gaffer_dagster.cli.command import Read, opened, tell
from gaffer_dagster.engine import watch
from gaffer_dagster.errors import BadInputError, MissingPackageError
from gaffer_dagster.store import metrics as views


@click.command(cls=Read)
@click.option(
    "--output",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="A file for node_exporter's textfile collector, which is replaced as a whole.",
)
def metrics(output: Path | None, as_json: bool) -> None:
    """Print metrics of all jobs, incidents, watches and receivers as Prometheus text.

    What is wrong is judged anew, by the rules of alerts, whether or not any watch is alive. Where the database cannot
    be reached, FILE is left as it was, and its age tells.
    """
    if output is not None and as_json:
        raise BadInputError(f"--output {str(output)!r} is Prometheus text; leave out --json")
    if output is not None and not output.name.endswith(".prom"):
        raise BadInputError(
            f"--output {str(output)!r} does not end in .prom, and node_exporter would not read it; write to "
            f"{str(output.with_suffix('.prom'))!r}"
        )
    try:
        from gaffer_dagster.cli.exposition import exposition, samples
    except ModuleNotFoundError as error:
        if error.name != "prometheus_client":
            raise
        raise MissingPackageError(
            "metrics need the package prometheus_client, which is not here; run: pip install 'gaffer_dagster[metrics]'"
        ) from None
    with opened() as connection:
        found = views.read(connection)
        report = watch.examine(connection)
    text = exposition(found, report.at, report.findings)
    if output is not None:
        _replace(output, text)
    elif as_json:
        tell(samples(text))
    else:
        click.echo(text, nl=False)


def _replace(file: Path, text: bytes) -> None:
    """A reader has the old file or the new one, never a part; nor has it the one that is being written, whose name
    does not end as it wants."""
    try:
        number, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
        try:
            with open(number, "wb") as new:
                new.write(text)
                new.flush()
                os.fsync(number)
                os.fchmod(number, 0o644)  # the reader is another user
            os.replace(name, file)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise BadInputError(
            f"--output {str(file)!r} cannot be written: {error.strerror}; name a file in a folder that this user may "
            "write to, and that has room"
        ) from None
