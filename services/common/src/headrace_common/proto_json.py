"""Contract messages as JSON for people and scripts, and what their fields are (JSON Schema).

Unlike protobuf's own mapping: 64-bit numbers stay numbers (they are whole and below 2**63 here),
enum values are their names without the common prefix in lower case, bytes are hexadecimal, and
every field is there, with its default if it was not set. Maps are objects, their keys texts.
"""

from __future__ import annotations

from base64 import b64encode
from typing import Any, TypeAlias, TypeVar

from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from headrace_common.errors import InvalidRequest

M = TypeVar("M", bound=Message)
# JSON objects. Any: nested values.
Json = dict[str, Any]
# Descriptors have two types that are alike, of the runtime and of its stubs.
_Descriptor: TypeAlias = Any


def to_json(message: Message) -> Json:
    """Render a message."""
    return {
        field.name: _values(field, getattr(message, field.name))
        for field in message.DESCRIPTOR.fields
        if not field.has_presence or field.is_repeated or message.HasField(field.name)
    }


def from_json(kind: type[M], body: Json) -> M:
    """Read a message from JSON as `to_json` writes it.

    Raises:
        InvalidRequest: an unknown field, or a value of a wrong type.
    """
    message = kind()
    try:
        json_format.ParseDict(_named(kind.DESCRIPTOR, body), message)
    except (json_format.ParseError, TypeError, ValueError, AttributeError) as error:
        raise InvalidRequest(f"The body is wrong: {error}.") from error
    return message


def enum_name(enum: _Descriptor, number: int) -> str:
    """Return the short name of an enum's value."""
    found = enum.values_by_number.get(number)
    return str(found.name).removeprefix(_prefix(enum)).lower() if found else str(number)


def enum_names(enum: _Descriptor) -> list[str]:
    """Return the short names of all values that mean something."""
    return [enum_name(enum, value.number) for value in enum.values if value.number]


def schema_of(descriptor: _Descriptor) -> Json:
    """Return the JSON Schema of a message."""
    return {
        "type": "object",
        "title": descriptor.name,
        "additionalProperties": False,
        "properties": {field.name: _schema(field) for field in descriptor.fields},
    }


def _map_value(field: _Descriptor) -> _Descriptor | None:
    """What a map's values are; None for fields that are no maps."""
    kind = field.message_type
    is_map = kind is not None and kind.GetOptions().map_entry
    return kind.fields_by_name["value"] if is_map else None


def _schema(field: _Descriptor) -> Json:
    if (of_map := _map_value(field)) is not None:
        return {"type": "object", "additionalProperties": _schema(of_map)}
    if field.message_type is not None:
        one = schema_of(field.message_type)
    elif field.enum_type is not None:
        one = {"type": "string", "enum": ["unspecified", *enum_names(field.enum_type)]}
    else:
        one = {"type": _json_type(field)}
    return {"type": "array", "items": one} if field.is_repeated else one


def _json_type(field: _Descriptor) -> str:
    if field.type == FieldDescriptor.TYPE_BOOL:
        return "boolean"
    if field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
        return "string"
    if field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
        return "number"
    return "integer"


def _values(field: _Descriptor, value: Any) -> Any:  # Any: a field's value
    if (of_map := _map_value(field)) is not None:
        return {str(key): _value(of_map, it) for key, it in value.items()}
    return [_value(field, it) for it in value] if field.is_repeated else _value(field, value)


def _value(field: _Descriptor, value: Any) -> Any:  # Any: a field's value
    if field.message_type is not None:
        return to_json(value)
    if field.enum_type is not None:
        return enum_name(field.enum_type, value)
    return value.hex() if isinstance(value, bytes) else value


def _named(descriptor: _Descriptor, body: Json) -> Json:
    """Say enum values and bytes as protobuf's own mapping does."""
    result = {}
    for name, value in body.items():
        field = descriptor.fields_by_name.get(name)
        of_map = None if field is None else _map_value(field)
        if of_map is not None and isinstance(value, dict):
            value = {key: _named_value(of_map, it) for key, it in value.items()}
        elif field is not None and field.is_repeated and isinstance(value, list):
            value = [_named_value(field, it) for it in value]
        elif field is not None:
            value = _named_value(field, value)
        result[name] = value
    return result


def _named_value(field: _Descriptor, value: Any) -> Any:  # Any: a field's value
    if field.message_type is not None and isinstance(value, dict):
        return _named(field.message_type, value)
    if field.enum_type is not None and isinstance(value, str):
        return _prefix(field.enum_type) + value.upper()
    if field.type == FieldDescriptor.TYPE_BYTES and isinstance(value, str):
        return b64encode(bytes.fromhex(value)).decode()
    return value


def _prefix(enum: _Descriptor) -> str:
    zero: str = enum.values_by_number[0].name
    return zero.removesuffix("UNSPECIFIED")
