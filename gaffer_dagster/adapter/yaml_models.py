"""What may stand in YAML: a model for each class that a job is defined with, its options, defaults and texts taken from
the class itself, so that nothing is said twice; and how such a class is made of what stands there.

The schemas are as narrow as can be (`schedule` is a mapping, and not a mapping or text or null, as Dagster would derive
it), so that `dg check yaml` and editors name the very word that is wrong.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import date, datetime, timedelta
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import dagster as dg
from dagster.components.resolved.errors import ResolutionException
from pydantic import BaseModel, Field, create_model, model_validator
from pydantic.fields import FieldInfo

from gaffer_dagster.domain.alert import shown
from gaffer_dagster.domain.duration import show_duration
from gaffer_dagster.errors import GafferError

_OPTION = re.compile(r"((?:`\w+`, )*`\w+`): (.+?)(?= (?:`\w+`, )*`\w+`: | Raises|$)")
_SENTENCE = re.compile(r"\. (?=[A-Z`])")
_URL = re.compile(r"\s*postgres(ql)?(\+\w+)?://")
_NAMES = ("database_url_variable", "heartbeat", "receivers")
_HIDDEN = "(not shown)"
_PLAIN = (str, int, bool, date, datetime)


class _Model(dg.Model):
    """Errors of pydantic show what was given, and a URL may have got there: what is no field of ours, what is no name
    where one is meant, and the URL of a database wherever it stands, is not shown."""

    @model_validator(mode="before")
    @classmethod
    def _hide(cls, given: Any) -> Any:
        return _shown(cls, given)


def _shown(model: type[BaseModel], given: Any) -> Any:
    """A mapping that lacks something is shown as a whole, with all that is within."""
    if not isinstance(given, dict):
        return _name(given)
    items = cast("dict[Any, Any]", _hidden(given)).items()
    return {name: _of_field(model.model_fields.get(name), value) for name, value in items}


def _of_field(field: FieldInfo | None, value: Any) -> Any:
    if field is None:
        return _HIDDEN
    of = cast("object", field.annotation)
    return _shown(of, value) if isinstance(of, type) and issubclass(of, BaseModel) else value


def _hidden(value: Any) -> Any:
    if isinstance(value, str):
        return _HIDDEN if _URL.match(value) else value
    if isinstance(value, list):
        return [_hidden(each) for each in cast("list[Any]", value)]
    if isinstance(value, dict):
        items = cast("dict[Any, Any]", value).items()
        return {name: _name(each) if name in _NAMES else _hidden(each) for name, each in items}
    return value


def _name(value: Any) -> Any:
    """What cannot be one is refused later, whatever stands there then."""
    if isinstance(value, list):
        return [_name(each) for each in cast("list[Any]", value)]
    is_shown = isinstance(value, str) and (value.isidentifier() or "{{" in value or shown(value) == repr(value))
    return value if is_shown or value is None else _HIDDEN


@cache
def model_of(kind: type) -> type[dg.Model]:
    """A model with the options of a class."""
    told, hints = descriptions(kind), get_type_hints(kind.__init__)
    options = inspect.signature(kind).parameters.items()
    fields = {name: (_in_yaml(hints[name]), _default(each.default), told[name]) for name, each in options}
    return make_model(kind.__name__, paragraphs(kind)[0], fields)


def make_model(name: str, told: str, fields: Mapping[str, tuple[Any, object, str]]) -> type[dg.Model]:
    """A model of fields, each with its type, its default (`...`: none) and what is said of it."""
    made = {name: (hint, Field(default, description=said)) for name, (hint, default, said) in fields.items()}
    return cast("Any", create_model)(name, __base__=_Model, __doc__=told, **made)


def descriptions(kind: type) -> Mapping[str, str]:
    """What a docstring says of each option: the first sentence after "`option`: "."""
    found: dict[str, str] = {}
    for names, text in (each for paragraph in paragraphs(kind) for each in _OPTION.findall(paragraph)):
        sentence = _SENTENCE.split(text)[0].rstrip(".")
        for name in re.findall(r"\w+", names):
            found.setdefault(name, f"{sentence[:1].upper()}{sentence[1:]}.")
    return found


def paragraphs(kind: type) -> list[str]:
    return [" ".join(each.split()) for each in (inspect.getdoc(kind) or "").split("\n\n")]


def maker(kind: type) -> Callable[[dg.ResolutionContext, Any], Any]:
    """Makes an instance of a class of the model of its options."""

    def make(context: dg.ResolutionContext, given: BaseModel) -> Any:
        options = {name: filled_in(context.at_path(name), getattr(given, name)) for name in given.model_fields_set}
        try:
            return kind(**options)
        except GafferError as error:
            raise refused(context, error, options) from None

    return make


def filled_in(context: dg.ResolutionContext, value: Any) -> Any:
    """A value with its templates filled in. Text without one stays text: Dagster would make a number of '1'."""
    if isinstance(value, str):
        is_template = "{{" in value or "{%" in value
        return context.resolve_value(value, as_type=object) if is_template else value  # pyright: ignore[reportUnknownMemberType] — Dagster's own annotation
    if isinstance(value, dict):
        items = cast("dict[Any, Any]", value).items()
        return {key: filled_in(context.at_path(key), each) for key, each in items}
    if isinstance(value, list):
        return [filled_in(context.at_path(n), each) for n, each in enumerate(cast("list[Any]", value))]
    return value


def refused(context: dg.ResolutionContext, error: object, fields: Iterable[str] = ()) -> ResolutionException:
    """Says where in which file, as Dagster does, but shows nothing of the file: a URL may have got into it. `fields`:
    those of which the error may speak."""
    for name in fields:
        if re.search(rf"\b{name}[=:]", str(error)):
            context = context.at_path(name)
            break
    where = ".".join(map(str, context.path))
    tree = context.source_position_tree
    if tree is None:
        return ResolutionException(f"{where}: {error}")
    position, _ = tree.lookup_closest_and_path(context.path, None)
    return ResolutionException(f"{position} - {where}: {error}")


def _default(value: object) -> object:
    if value is inspect.Parameter.empty:
        return ...
    return show_duration(value) if isinstance(value, timedelta) else value


def _in_yaml(hint: Any) -> Any:
    """A duration is text there, whatever can be iterated is a list, and what is left out does not stand there."""
    arguments = get_args(hint)
    if get_origin(hint) in (Union, UnionType):
        return Union[tuple(_in_yaml(each) for each in arguments if each not in (timedelta, type(None)))]  # noqa: UP007
    if get_origin(hint) is Literal or hint in _PLAIN:
        return hint
    return list[arguments] if arguments else str  # LiteralString
