"""Base of every service's settings: the environment, read once, checked, frozen."""

from __future__ import annotations

import logging
import os
import re
import socket
import sys
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

_log = logging.getLogger(__name__)
EXIT_BAD_SETTINGS = 2
_MAX_PORT = 65_535
# In redis://user:password@host and the like.
_PASSWORD = re.compile(r"(://[^/@\s:]*:)[^/@\s]*@")


class SettingsError(Exception):
    """Settings, or a file of policy that they name, are wrong; the message lists every mistake."""


class ServiceSettings(BaseSettings):
    """Settings of one service. Subclasses set ``prefix`` and ``model_config`` through `config`.

    Every field has a unit in its name, bounds and a description; secrets are `SecretStr`.
    """

    model_config = SettingsConfigDict(frozen=True, extra="forbid")
    prefix: ClassVar[str] = ""

    @classmethod
    def load(cls, **overrides: Any) -> Self:  # Any: field values, validated by pydantic
        """Read the environment; keyword arguments win over it.

        Raises:
            SettingsError: a value is wrong, or a variable with the service's prefix is unknown.
        """
        known = {f"{cls.prefix}{name}".upper() for name in cls.model_fields}
        unknown = sorted(
            name for name in os.environ if name.startswith(cls.prefix) and name not in known
        )
        if unknown:
            raise SettingsError(
                f"unknown setting(s) {', '.join(unknown)}; known are {', '.join(sorted(known))}"
            )
        try:
            return cls(**overrides)
        except ValidationError as error:
            raise SettingsError(_explain(cls.prefix, error)) from error

    @classmethod
    def load_or_exit(cls, **overrides: Any) -> Self:  # Any: as in load
        """`load`, but end the process with code 2 and the message on stderr if it fails."""
        try:
            return cls.load(**overrides)
        except SettingsError as error:
            sys.stderr.write(f"{cls.prefix.rstrip('_').lower()}: {error}\n")
            raise SystemExit(EXIT_BAD_SETTINGS) from error

    def log_values(self) -> None:
        """Log every value once; secrets stay hidden, passwords in URLs too."""
        _log.info("settings %s", {name: _shown(value) for name, value in self})


def _shown(value: object) -> object:
    if isinstance(value, SecretStr):
        return "***"
    return _PASSWORD.sub(r"\1***@", value) if isinstance(value, str) else value


def _explain(prefix: str, error: ValidationError) -> str:
    lines = [
        f"{prefix}{'_'.join(str(part) for part in item['loc']).upper()}: {item['msg']}"
        for item in error.errors()
    ]
    return "; ".join(lines)


def config(prefix: str) -> SettingsConfigDict:
    """Return the pydantic configuration for environment variables that start with *prefix*."""
    return SettingsConfigDict(env_prefix=prefix, frozen=True, extra="forbid")


def _checked(address: str) -> str:
    if address:
        split_address(address)
    return address


# host:port, or [IPv6]:port; the second may be empty.
_ADDRESS = r"(\[[0-9A-Fa-f:.]+\]|[^\s:]+):\d{1,5}"
Address = Annotated[str, Field(pattern=f"^{_ADDRESS}$"), AfterValidator(_checked)]
OptionalAddress = Annotated[str, Field(pattern=f"^({_ADDRESS})?$"), AfterValidator(_checked)]
# Of topics that a service makes.
TopicReplicas = Annotated[
    int,
    Field(
        ge=0,
        le=100,
        description="Replicas of each partition of the topics that it makes, where they do not "
        "exist yet; 0 = three, or as many as there are brokers.",
    ),
]


class RpcServiceSettings(ServiceSettings):
    """What every service that listens has."""

    listen: Address = Field("127.0.0.1:0", description="host:port to serve on; port 0: a free one.")
    metrics_listen: Address = Field(
        "127.0.0.1:0", description="host:port of /metrics, /health and /ready."
    )
    drain_grace_s: float = Field(
        20.0, ge=0, le=3600, description="Time for running work to finish after SIGTERM. Seconds."
    )


class HandOverSettings(RpcServiceSettings):
    """What a service has that serves until its successor does (`succession`)."""

    listen_fd: int | None = Field(
        None,
        ge=3,
        description="Descriptor of a bound TCP socket that this process inherits and listens on, "
        "instead of `listen`. While whoever made it holds it too, connections wait in it when the "
        "service starts again, and none is refused.",
    )
    succession_fd: int | None = Field(
        None,
        ge=3,
        description="Descriptor of a socket connected to whoever starts this process: told to "
        "stop, it gives up `metrics_listen`, writes a byte there, and goes on taking connections "
        "until the other end is closed, which says that its successor serves.",
    )


def split_address(address: str) -> tuple[str, int]:
    """Split ``host:port``, or ``[IPv6]:port``; the host comes without brackets.

    Raises:
        ValueError: no port, or none that exists.
    """
    host, _, port = address.rpartition(":")
    if not host:
        raise ValueError(f"{address!r} is not host:port")
    if not 0 <= int(port) <= _MAX_PORT:
        raise ValueError(f"{address!r}: ports end at {_MAX_PORT}")
    return host.strip("[]"), int(port)


def address_family(host: str) -> socket.AddressFamily:
    """Return the family of a socket that is to be bound to a host. A name's is IPv4."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def join_address(host: str, port: int) -> str:
    """Return ``host:port``, or ``[IPv6]:port``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
