"""Messages that a released version wrote must decode for ever.

`UPDATE_GOLDEN=1 pytest tests/contract/test_wire_golden.py` writes the files of the version that
pyproject.toml names, of messages that have none yet; existing bytes are never rewritten. A field
that the contract drops leaves the `.json`, which says what the bytes mean today; its number stays
reserved.
"""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from headrace_contracts.cache_index.v1 import cache_index_pb2
from headrace_contracts.guard.v1 import guard_pb2
from headrace_contracts.ratelimit.v1 import ratelimit_pb2
from headrace_contracts.router.v1 import bookings_pb2, router_pb2
from headrace_contracts.session.v1 import session_pb2
from headrace_contracts.usage.v1 import usage_pb2
from headrace_contracts.worker.v1 import worker_pb2

ROOT = Path(__file__).parents[2]
WIRE = ROOT / "tests/golden/wire"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Major and minor: what the files are named by.
VERSION = PROJECT["version"].rpartition(".")[0]
MESSAGES: list[type[Message]] = [
    worker_pb2.GenerateRequest,
    worker_pb2.GenerateEvent,
    worker_pb2.DescribeResponse,
    worker_pb2.LoadReport,
    router_pb2.PickMessage,
    router_pb2.Decision,
    router_pb2.ReplicaList,
    bookings_pb2.BookingNews,
    cache_index_pb2.PublishMessage,
    cache_index_pb2.IndexDelta,
    guard_pb2.CheckInputRequest,
    guard_pb2.CheckOutputResponse,
    guard_pb2.AuditRecord,
    guard_pb2.SentReport,
    ratelimit_pb2.AdmitRequest,
    ratelimit_pb2.AdmitResponse,
    ratelimit_pb2.SettleRequest,
    session_pb2.Frame,
    usage_pb2.UsageEvent,
    usage_pb2.WorkerUsage,
]
SCALARS: dict[int, object] = {
    FieldDescriptor.CPPTYPE_STRING: "text",
    FieldDescriptor.CPPTYPE_BOOL: True,
    FieldDescriptor.CPPTYPE_DOUBLE: 1.5,
    FieldDescriptor.CPPTYPE_FLOAT: 0.25,
}


def _scalar(field: FieldDescriptor) -> object:
    if field.type == FieldDescriptor.TYPE_BYTES:
        return b"\x00\xffbytes"
    if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
        return field.enum_type.values[-1].number
    return SCALARS.get(field.cpp_type, field.number)


def filled(message: Message, depth: int = 0) -> Message:
    """Set every field of *message* to a value of its own, nested ones too."""
    descriptor: Descriptor = message.DESCRIPTOR
    for field in descriptor.fields:
        if field.message_type and field.message_type.GetOptions().map_entry:
            _fill_map(message, field)
        elif field.message_type:
            if depth < 3:
                held = getattr(message, field.name)
                filled(held.add() if field.is_repeated else held, depth + 1)
        elif field.is_repeated:
            getattr(message, field.name).append(_scalar(field))
        else:
            setattr(message, field.name, _scalar(field))
    return message


def _fill_map(message: Message, field: FieldDescriptor) -> None:
    key, value = field.message_type.fields
    held = getattr(message, field.name)
    held[_scalar(key)] = _scalar(value)


@pytest.mark.parametrize("cls", MESSAGES, ids=lambda cls: cls.DESCRIPTOR.full_name)
def test_golden_bytes_decode_to_what_they_meant(cls: type[Message]) -> None:
    """Bytes of any version give their fields under today's contract, with their old values."""
    name = cls.DESCRIPTOR.full_name
    newest = WIRE / f"{name}.{VERSION}.bin"
    if not newest.exists() and os.environ.get("UPDATE_GOLDEN"):
        message = filled(cls())
        newest.write_bytes(message.SerializeToString(deterministic=True))
        newest.with_suffix(".json").write_text(_readable(message))
    assert newest.exists()
    for binary in WIRE.glob(f"{name}.[0-9]*.bin"):
        message = cls.FromString(binary.read_bytes())
        assert _readable(message) == binary.with_suffix(".json").read_text(), binary.name


@pytest.mark.parametrize("cls", MESSAGES, ids=lambda cls: cls.DESCRIPTOR.full_name)
def test_the_number_of_a_dropped_field_stays_reserved(cls: type[Message]) -> None:
    """Given to another field, it would read old bytes as something that they never said."""
    for binary in WIRE.glob(f"{cls.DESCRIPTOR.full_name}.[0-9]*.bin"):
        _check_unknown(cls.FromString(binary.read_bytes()))


def _check_unknown(message: Message) -> None:
    contract = DescriptorProto()
    message.DESCRIPTOR.CopyToProto(contract)
    reserved = {
        number for span in contract.reserved_range for number in range(span.start, span.end)
    }
    assert {it.field_number for it in UnknownFieldSet(message)} <= reserved
    for field, value in message.ListFields():
        if field.message_type and not field.message_type.GetOptions().map_entry:
            for held in value if field.is_repeated else (value,):
                _check_unknown(held)


def _readable(message: Message) -> str:
    fields = MessageToDict(message, preserving_proto_field_name=True)
    return json.dumps(fields, indent=1, sort_keys=True) + "\n"
