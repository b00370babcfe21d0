"""A policy's table written as TOML: texts, flags, lists of texts, and tables of those."""

from __future__ import annotations

import json
from collections.abc import Mapping


def table_toml(table: Mapping[str, object]) -> str:
    """Return *table* as TOML, plain values before tables.

    Args:
        table: as `tomllib` reads a policy's table.
    """
    plain = [
        f"{_key(name)} = {_value(value)}" for name, value in table.items() if not _is_table(value)
    ]
    lines = [*plain, ""] if plain else []
    for name, value in table.items():
        if isinstance(value, Mapping):
            lines.append(f"[{_key(name)}]")
            lines += [f"{_key(key)} = {_value(inner)}" for key, inner in value.items()]
            lines.append("")
    return "\n".join(lines)


def _is_table(value: object) -> bool:
    return isinstance(value, Mapping)


def _key(name: str) -> str:
    return name if name.replace("_", "a").isalnum() and name.isascii() else json.dumps(name)


def _value(value: object) -> str:
    if isinstance(value, Mapping):
        inner = ", ".join(f"{_key(key)} = {_value(one)}" for key, one in value.items())
        return f"{{ {inner} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    # A JSON text is a TOML text, but for DEL, which JSON leaves as it is.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
