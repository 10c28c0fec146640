"""Which changes of a protobuf API break a peer of another version: the rules of a wire format that both can read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto

__all__ = ["breaking_changes"]


def breaking_changes(before: FileDescriptorProto, after: FileDescriptorProto) -> list[str]:
    """Return what a peer with ``before`` cannot understand of ``after``, one sentence each; empty for a compatible API.

    Messages, fields, services and methods may be added. A field may be removed only if it was deprecated before, and
    its number is reserved.
    """
    if before.package != after.package:
        return [f"the package {before.package} is called {after.package}"]
    return [*_messages("", _by_name(before.message_type), _by_name(after.message_type)), *_services(before, after)]


def _by_name(items: Any) -> dict[str, Any]:
    return {each.name: each for each in items}


def _messages(outer: str, before: Mapping[str, DescriptorProto], after: Mapping[str, DescriptorProto]) -> Iterator[str]:
    for name, old in before.items():
        new = after.get(name)
        if new is None:
            yield f"message {outer}{name} was removed"
            continue
        yield from _fields(f"{outer}{name}", old, new)
        yield from _messages(f"{outer}{name}.", _by_name(old.nested_type), _by_name(new.nested_type))
        yield from _enums(f"{outer}{name}.", old, new)


def _fields(message: str, old: DescriptorProto, new: DescriptorProto) -> Iterator[str]:
    now = {each.number: each for each in new.field}
    reserved = {number for each in new.reserved_range for number in range(each.start, each.end)}
    for field in old.field:
        where = f"{message}.{field.name} ({field.number})"
        if field.number not in now:
            if not (field.options.deprecated and field.number in reserved):
                yield f"field {where} was removed"
            continue
        changes = _differences(field, now[field.number], old, new)
        yield from (f"the {what} of field {where} is {is_!r}, and was {was!r}" for what, was, is_ in changes)


def _differences(
    field: FieldDescriptorProto, now: FieldDescriptorProto, old: DescriptorProto, new: DescriptorProto
) -> Iterator[tuple[str, object, object]]:
    values = (
        ("name", field.name, now.name),
        ("type", field.Type.Name(field.type), now.Type.Name(now.type)),
        ("message type", field.type_name, now.type_name),
        ("label", field.Label.Name(field.label), now.Label.Name(now.label)),
        ("presence", field.proto3_optional, now.proto3_optional),
        ("oneof", _oneof(field, old), _oneof(now, new)),
    )
    return ((what, was, is_) for what, was, is_ in values if was != is_)


def _oneof(field: FieldDescriptorProto, message: DescriptorProto) -> str:
    """Return the name of the field's oneof; empty without one, and for that of an optional field, which is no choice."""
    if not field.HasField("oneof_index") or field.proto3_optional:
        return ""
    return message.oneof_decl[field.oneof_index].name


def _enums(message: str, old: DescriptorProto, new: DescriptorProto) -> Iterator[str]:
    after = _by_name(new.enum_type)
    for enum in old.enum_type:
        values = {each.number for each in after[enum.name].value} if enum.name in after else set()
        yield from (
            f"value {each.name} of {message}{enum.name} was removed" for each in enum.value if each.number not in values
        )


def _services(before: FileDescriptorProto, after: FileDescriptorProto) -> Iterator[str]:
    services = _by_name(after.service)
    for service in before.service:
        methods = _by_name(services[service.name].method) if service.name in services else {}
        for method in service.method:
            where = f"{service.name}.{method.name}"
            now = methods.get(method.name)
            if now is None:
                yield f"method {where} was removed"
                continue
            for what in ("input_type", "output_type", "client_streaming", "server_streaming"):
                was, is_ = getattr(method, what), getattr(now, what)
                if was != is_:
                    yield f"the {what.replace('_', ' ')} of method {where} is {is_!r}, and was {was!r}"
