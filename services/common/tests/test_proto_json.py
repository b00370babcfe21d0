"""Messages as JSON: maps, lists and enums there and back."""

from __future__ import annotations

import pytest

from headrace_common.errors import InvalidRequest
from headrace_common.proto_json import from_json, schema_of, to_json
from headrace_contracts.guard.v1.guard_pb2 import AuditRecord, TextScores


def test_maps_are_objects_there_and_back() -> None:
    """Of numbers by number and of numbers by text; keys are texts, as JSON has no others."""
    record = AuditRecord(request_id="req_1", released_chars_by_choice={0: 12, 3: 5})
    told = to_json(record)
    assert told["released_chars_by_choice"] == {"0": 12, "3": 5}
    assert from_json(AuditRecord, told) == record
    assert to_json(TextScores(scores={"harm": 0.5}))["scores"] == {"harm": 0.5}


def test_bytes_are_hexadecimal_there_and_back() -> None:
    """Not base64, as which most hexadecimal texts would pass, as other bytes."""
    record = AuditRecord(request_id="req_1", hash=bytes(range(32)))
    told = to_json(record)
    assert told["hash"] == bytes(range(32)).hex()
    assert from_json(AuditRecord, told) == record
    with pytest.raises(InvalidRequest):
        from_json(AuditRecord, {"hash": "no hexadecimal text"})


def test_the_schema_of_a_map_is_an_object_of_its_values() -> None:
    """What a reader of the OpenAPI sees."""
    properties = schema_of(AuditRecord.DESCRIPTOR)["properties"]
    expected = {"type": "object", "additionalProperties": {"type": "integer"}}
    assert properties["released_chars_by_choice"] == expected


@pytest.mark.parametrize("wrong", [[1], "x", {"0": "many"}])
def test_what_is_no_map_is_refused(wrong: object) -> None:
    """With a reason, not with a failure."""
    with pytest.raises(InvalidRequest, match="The body is wrong"):
        from_json(AuditRecord, {"released_chars_by_choice": wrong})
