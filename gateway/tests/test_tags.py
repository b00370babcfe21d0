"""A kind that a request must name is asked for wherever it stands."""

import msgspec
import msgspec.inspect as shapes
import pytest

from headrace_gateway.messages_api.bodies import CountBody, MessagesBody
from headrace_gateway.openai_bodies import ChatBody, CompletionBody
from headrace_gateway.responses_api.bodies import InputTokensBody, ResponsesBody


def _alone(shape: shapes.Type, path: str, seen: set[type]) -> list[str]:
    """Return where one tagged struct has no sibling: msgspec then takes it without its tag."""
    if isinstance(shape, shapes.Metadata):
        return _alone(shape.type, path, seen)
    options = shape.types if isinstance(shape, shapes.UnionType) else (shape,)
    structs = [one for one in options if isinstance(one, shapes.StructType)]
    tagged = [one for one in structs if one.tag is not None]
    found = [f"{path}: {tagged[0].cls.__name__}"] if len(tagged) == 1 else []
    for one in structs:
        if one.cls not in seen:
            seen.add(one.cls)
            for field in one.fields:
                found += _alone(field.type, f"{path}.{field.encode_name}", seen)
    for one in options:
        if isinstance(one, shapes.ListType):
            found += _alone(one.item_type, f"{path}[]", seen)
        elif isinstance(one, shapes.DictType):
            found += _alone(one.value_type, f"{path}{{}}", seen)
    return found


@pytest.mark.parametrize(
    "body",
    [ChatBody, CompletionBody, CountBody, InputTokensBody, MessagesBody, ResponsesBody],
)
def test_no_kind_goes_unnamed(body: type[msgspec.Struct]) -> None:
    """A struct with a tag has a sibling, else its `type` must be a field."""
    assert _alone(shapes.type_info(body), body.__name__, set()) == []
