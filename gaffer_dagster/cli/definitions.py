"""The jobs that a file or module of the user defines."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from gaffer_dagster.errors import BadInputError, GafferError, UnknownJobError


def jobs_in(file: Path | None, module: str | None) -> dict[str, Any]:
    if (file is None) == (module is None):
        raise BadInputError("name where the job is defined: either -f FILE or -m MODULE")
    loaded = load_file(file) if file is not None else load_module(module or "")
    # Only now is Dagster needed: the definitions use it.
    found = importlib.import_module("gaffer_dagster.adapter.definitions").find_jobs(loaded)
    if not found:
        raise UnknownJobError(
            f"no job is defined in {file or module}; name the file or module that has what @gaffer_asset makes"
        )
    return found


def load_module(name: str) -> ModuleType:
    if not name or name.startswith("."):
        raise BadInputError(
            f"{name!r} is no module's name; write it from its top on, such as package.module; for a file, give -f FILE"
        )
    sys.path.insert(0, str(Path.cwd()))
    try:
        with _not_left(name):
            return importlib.import_module(name)
    except _NotLoadedError as error:
        cause = error.__cause__
        missing = cause.name if isinstance(cause, ModuleNotFoundError) else None
        if missing is None or not f"{name}.".startswith(f"{missing}."):
            raise  # the module is there, and something that it imports is not
        cure = (
            f"for a file, give -f {name}" if name.endswith(".py") else "run in the folder that it is in, or install it"
        )
        raise BadInputError(f"there is no module {name!r} here; {cure}") from None


def load_file(file: Path) -> ModuleType:
    # Under a name that shadows nothing: the file may be called json.py.
    name = f"_gaffer_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise BadInputError(f"{file} cannot be loaded as Python; give a .py file")
    sys.path.append(str(file.resolve().parent))
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[name] = loaded
    try:
        with _not_left(str(file)):
            spec.loader.exec_module(loaded)
    except _NotLoadedError as error:
        if "relative import" not in str(error.__cause__):
            raise
        raise BadInputError(f"{file} imports from its own package; run it as -m PACKAGE.MODULE instead") from error
    return loaded


class _NotLoadedError(BadInputError):
    """Its cause is what was raised."""


@contextmanager
def _not_left(where: str) -> Generator[None]:
    """`sys.exit()` while the definitions load would end the command, with success even, and nothing done. Whatever else
    is raised is told with the line of the user's code that it comes from; what we refuse says enough by itself."""
    try:
        yield
    except GafferError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [each for each in frames if "importlib" not in each.filename and each.filename != __file__]
        at = f" ({own[-1].filename}, line {own[-1].lineno})" if own and not isinstance(error, SyntaxError) else ""
        raise _NotLoadedError(
            f"{where} cannot be loaded: {type(error).__name__}: {error}{at}; mend it, and try again"
        ) from error
    except SystemExit as error:
        raise BadInputError(
            f"{where} ended itself (SystemExit {error}) while it was loaded; let it only define"
        ) from error
