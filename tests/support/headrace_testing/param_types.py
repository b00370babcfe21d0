"""Example bodies out of an SDK's types: one for every field and every kind of value it may have.

The request types of public SDKs are the documentation of their APIs in a form that a test can walk.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NotRequired, Required

import typing_extensions

# Nested fields below are examples of what lies above them.
_MAX_DEPTH = 9
_SIMPLE: dict[Any, tuple[Any, ...]] = {
    bool: (True, False),
    int: (7,),
    float: (0.5,),
    str: ("x",),
    bytes: ("x",),
    object: ({"a": "b"},),
    Any: ({"a": "b"},),
    type(None): (None,),
}
_LISTS = (list, tuple, collections.abc.Iterable, collections.abc.Sequence)


@dataclass(frozen=True)
class Example:
    """A value with one thing about it that is special.

    Args:
        path: where that stands, as errors spell it; list items are all at index 0.
        special: what stands there.
        value: the whole value.
        plain: the whole value without it; None = that would be no value.
    """

    path: str
    special: Any
    value: Any
    plain: Any = None

    def under(self, step: str, wrap: Callable[[Any], Any]) -> Example:
        """Return it as part of something larger, which *wrap* puts around it."""
        rest = self.path if not self.path or self.path.startswith("[") else f".{self.path}"
        plain = None if self.plain is None else wrap(self.plain)
        return Example(f"{step}{rest}", self.special, wrap(self.value), plain)


class Examples:
    """Makes examples of types.

    Args:
        fixed: values of fields by name, where any other would be wrong for a reason of its own.
    """

    def __init__(self, fixed: Mapping[str, Any] | None = None) -> None:
        self._fixed = fixed or {}

    def of(self, kind: Any, depth: int = 0) -> Iterator[Example]:
        """Yield examples, the simplest first; each field of a `TypedDict` once at least."""
        kind = _bare(kind)
        origin, args = typing.get_origin(kind), typing.get_args(kind)
        if origin is Literal or kind in _SIMPLE:
            values = args if origin is Literal else _SIMPLE[kind]
            yield from (Example("", value, value) for value in values)
        elif origin in (typing.Union, types.UnionType):
            for one in args:
                yield from self.of(one, depth)
        elif typing_extensions.is_typeddict(kind):
            yield from self._objects(kind, depth)
        elif origin in _LISTS:
            for item in self.of(args[0], depth + 1):
                yield item.under("[0]", lambda it: [it])
        elif origin in (dict, collections.abc.Mapping):
            yield from (
                Example("", {"x": it.value}, {"x": it.value}) for it in self.of(args[1], depth + 1)
            )
        else:
            yield Example("", "x", "x")

    def _objects(self, kind: Any, depth: int) -> Iterator[Example]:
        hints = typing_extensions.get_type_hints(kind, include_extras=True)
        required = {
            name: self._first(name, hints[name], depth)
            for name in hints
            if name in self._fixed or _is_required(kind, name, hints[name])
        }
        yield Example("", required, required)
        if depth >= _MAX_DEPTH:
            return
        for name, hint in hints.items():
            kinds = () if name in self._fixed else self.of(hint, depth + 1)
            for field in kinds:
                told = field.under(name, functools.partial(_with, required, name))
                if told.plain is None and name not in required:
                    told = dataclasses.replace(told, plain=required)
                yield told

    def _first(self, name: str, hint: Any, depth: int) -> Any:
        if name in self._fixed:
            return self._fixed[name]
        return next(self.of(hint, depth + 1)).value


def _with(fields: Mapping[str, Any], name: str, value: Any) -> dict[str, Any]:
    return {**fields, name: value}


def _is_required(kind: Any, name: str, hint: Any) -> bool:
    # The class itself does not see what its postponed annotations say.
    marks = (typing_extensions.get_origin(hint), hint)
    if any(mark in (Required, typing_extensions.Required) for mark in marks):
        return True
    if any(mark in (NotRequired, typing_extensions.NotRequired) for mark in marks):
        return False
    return name in kind.__required_keys__


def fields_of(kind: Any) -> dict[str, Any]:
    """Return the fields of a `TypedDict`, or of a union of some, and their types."""
    kind = _bare(kind)
    if not typing_extensions.is_typeddict(kind):
        merged: dict[str, Any] = {}
        for one in typing.get_args(kind):
            merged |= fields_of(one)
        return merged
    return dict(typing_extensions.get_type_hints(kind, include_extras=True))


def _bare(kind: Any) -> Any:
    while typing_extensions.get_origin(kind) in (
        Annotated,
        Required,
        NotRequired,
        typing_extensions.Required,
        typing_extensions.NotRequired,
    ):
        kind = typing.get_args(kind)[0]
    if isinstance(kind, typing_extensions.TypeAliasType):
        return _bare(kind.__value__)
    return kind
