"""What is wrong with a file that an administrator wrote: every complaint with its line, and with what to write instead.

Files are checked against a model; what the model's library says is for programmers, so it is said again here for whoever
wrote the file: ``FILE:LINE: what is wrong; what helps``. All complaints about a file come together.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from scrubber.config.policy_values import WRITTEN_AS
from scrubber.config.yaml_lines import Located, Location
from scrubber.domain.errors import BadConfiguration

__all__ = ["validated"]

_Model = TypeVar("_Model", bound=BaseModel)

_TYPES = {
    "bool_type": "write true or false",
    "int_type": "write a whole number",
    "string_type": "write a word; quote it if it looks like a number or like true or false",
    "string_too_short": "write at least one character",
    "list_type": "write a list, such as [79, 151]",
    "model_type": "write its keys below it, indented",
    "dict_type": "write its keys below it, indented",
}
_LISTS = {
    "units": "write a list, such as [nvidia-dcgm.service]",
    "pods": "write a list, such as [{namespace: gpu-operator, service-account: nvidia-dcgm}]",
    "overrides": "write a list, each entry with a name, such as - name: inference",
    "models": 'write a list, such as ["NVIDIA H200*"]',
    "resources": "write a list, such as [nvidia.com/gpu]",
}


def validated(model: type[_Model], document: Located, name: str) -> _Model:
    """``document`` as ``model`` has it; ``name`` is how the file is called in complaints.

    Raises:
        BadConfiguration: one line for each complaint, in the order of the file.
    """
    try:
        return model.model_validate(document.value)
    except ValidationError as error:
        complaints = sorted({_complaint(each, document, model) for each in error.errors(include_url=False)})
        raise BadConfiguration("\n".join(f"{name}:{line}: {text}" for line, text in complaints)) from None


def _complaint(error: ErrorDetails, document: Located, model: type[BaseModel]) -> tuple[int, str]:
    """Line and text of one of pydantic's errors."""
    where: Location = error["loc"]
    context = error.get("ctx", {})
    kind = error["type"]
    of_key = bool(where) and where[-1] == "[key]"
    if of_key:
        where = where[:-1]
    if error["input"] is None and kind != "missing" and not context.get("at"):
        text = f"{_name(where)}nothing is written here; write its value, or remove the key"
    elif kind == "policy":
        where = (*where, *context["at"])
        text = f"{_name(where)}{context['sentence']}" if where else context["sentence"]
    elif kind == "extra_forbidden":
        text = _unknown_key(where, model)
    elif kind == "choice":
        text = _name(where[:-1] if of_key else where) + _not_a_choice(context["written"], context["choices"])
    elif kind == "missing":
        text = f'the key "{where[-1]}" is missing; add a line such as {where[-1]}: {_example(where, model)}'
    elif kind == "string_pattern_mismatch":
        text = f'{_name(where)}"{error["input"]}" is {WRITTEN_AS[context["pattern"]]}'
    elif kind in ("greater_than_equal", "less_than_equal"):
        least_or_most = f"at least {context['ge']}" if "ge" in context else f"at most {context['le']}"
        text = f"{_name(where)}{error['input']} is impossible; write {least_or_most}"
    else:
        helps = _LISTS.get(str(where[-1])) if kind == "list_type" and where else None
        helps = helps or _TYPES.get(kind, error["msg"])
        text = f"{_name(where)}{_shown(error['input'])} does not fit here; {helps}"
    return document.line(where), text if text.endswith("?") else f"{text}."


def _name(where: Location) -> str:
    """``limits.hand-over: ``; list positions are left to the line number."""
    return ".".join(part for part in where if isinstance(part, str)) + ": "


def _example(where: Location, model: type[BaseModel]) -> str:
    """What may be written for a key that is missing."""
    field = dict(_fields(where[:-1], model))[str(where[-1])]
    return str((field.examples or ["mine"])[0])


def _unknown_key(where: Location, model: type[BaseModel]) -> str:
    known = [alias for alias, _ in _fields(where[:-1], model)]
    key = str(where[-1])
    close = get_close_matches(key.lower().replace("_", "-"), known, n=1)
    helps = f'did you mean "{close[0]}"?' if close else f"known here: {', '.join(known)}"
    around = [part for part in where[:-1] if isinstance(part, str)]
    place = f' in "{around[-1]}"' if around else ""
    return f'unknown key "{key}"{place}; {helps}'


def _fields(where: Location, model: type[BaseModel]) -> list[tuple[str, FieldInfo]]:
    """The keys that may stand at ``where``, with what is known of them."""
    for part in where:
        if isinstance(part, int):  # of a list, of which all entries are alike
            continue
        annotation = {field.alias: field.annotation for field in model.model_fields.values()}.get(part)
        annotation = next(iter(get_args(annotation)), annotation)
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return [(str(field.alias), field) for field in model.model_fields.values()]


def _not_a_choice(written: str, choices: list[str]) -> str:
    close = get_close_matches(written.lower().replace("_", "-"), choices, n=1)
    helps = f'did you mean "{close[0]}"?' if close else f"write one of {', '.join(choices)}"
    return f'"{written}" is not known; {helps}'


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else str(value)
