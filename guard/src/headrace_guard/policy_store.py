"""Where policies come from: the policy file, and those that operators put beside it.

A put policy is one TOML file in the kept folder, written whole or not at all, and wins over one of
the same name in the policy file. `load` reads both again; a mistake leaves everything as it was.

Several guards have the same policies when they have the same file and the same folder: each reads
again what changed, whoever changed it, and changes wait for one another at a lock in the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from headrace_common.errors import InvalidRequest, NotFound, StaleVersion
from headrace_guard.policy import Policy, PolicyError, load_policies, parse_policy
from headrace_guard.policy_toml import table_toml

_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")
_SUFFIX = ".toml"
# Part of the version of every put policy.
_PUT = "put"
# In the kept folder; no policy's name begins with a dot.
_LOCK = ".lock"


@dataclass(frozen=True)
class Policies:
    """All policies at one time.

    Args:
        by_name: the policies.
        put: names of those that were put.
    """

    by_name: dict[str, Policy]
    put: frozenset[str] = frozenset()


class PolicyStore:
    """Reads and keeps policies. Not for use by two threads at a time.

    Args:
        file: policy file; None = the packaged one.
        kept_dir: where put policies are; None = none can be put.
    """

    def __init__(self, file: Path | None, kept_dir: Path | None) -> None:
        self._file, self._kept_dir = file, kept_dir
        self._seen = self._signature()

    def load(self) -> Policies:
        """Read everything.

        Raises:
            PolicyError: something is wrong; all mistakes of the first wrong file.
        """
        self._seen = self._signature()
        return self._read()

    def _read(self) -> Policies:
        by_name = load_policies(self._file)
        put: set[str] = set()
        for path in self._kept_files():
            try:
                by_name[path.stem] = parse_policy(path.stem, path.read_text("utf-8"), _PUT)
            except (OSError, UnicodeDecodeError) as error:
                raise PolicyError(f"{path}: {error}") from error
            put.add(path.stem)
        return Policies(by_name, frozenset(put))

    def has_changed(self) -> bool:
        """Whether any file changed since the last `load`."""
        return self._signature() != self._seen

    def put(self, name: str, text: str, if_version: str = "") -> None:
        """Check and keep one policy.

        Raises:
            InvalidRequest: the policy is wrong, or there is no folder for it.
            StaleVersion: another version than *if_version* is there, maybe by another guard.
        """
        folder = self._folder()
        if not _NAME.fullmatch(name):
            raise InvalidRequest(
                "A policy's name has up to 64 small letters, digits, dots, dashes and underscores.",
                param="name",
            )
        try:
            parse_policy(name, text, _PUT)
        except PolicyError as error:
            raise InvalidRequest(str(error), param="toml") from error
        with _alone_in(folder):
            if if_version:
                self._check_version(name, if_version)
            _write_whole(folder / (name + _SUFFIX), text)

    def delete(self, name: str) -> None:
        """Drop a put policy.

        Raises:
            NotFound: none of this name was put.
        """
        folder = self._folder()
        path = folder / (name + _SUFFIX)
        if not _NAME.fullmatch(name) or not path.exists():
            raise NotFound(f"No policy {name!r} was put.")
        with _alone_in(folder):
            path.unlink(missing_ok=True)

    def _folder(self) -> Path:
        if self._kept_dir is None:
            where = (
                f"the file {self._file}" if self._file else "a file (HEADRACE_GUARD_POLICY_FILE)"
            )
            raise InvalidRequest(
                f"This guard takes no policies here: write them into {where}, which every guard "
                "reads again when it changes, or give the guards one folder in common "
                "(HEADRACE_GUARD_POLICY_DIR)."
            )
        return self._kept_dir

    def _check_version(self, name: str, if_version: str) -> None:
        try:
            current = self._read().by_name.get(name)
        except PolicyError as error:
            raise InvalidRequest(str(error)) from error
        if current is None or current.version != if_version:
            version = current.version if current else "none"
            raise StaleVersion(f"Another version is in force: {version}.", param="if_version")

    def _kept_files(self) -> list[Path]:
        if self._kept_dir is None or not self._kept_dir.is_dir():
            return []
        return sorted(
            path for path in self._kept_dir.glob(f"*{_SUFFIX}") if _NAME.fullmatch(path.stem)
        )

    def _signature(self) -> tuple[tuple[str, int, int], ...]:
        return tuple(self._stats())

    def _stats(self) -> Iterator[tuple[str, int, int]]:
        for path in [*([self._file] if self._file else []), *self._kept_files()]:
            with contextlib.suppress(OSError):
                stat = path.stat()
                yield str(path), stat.st_mtime_ns, stat.st_size


def policy_text(policy: Policy) -> str:
    """Return a policy's own table as TOML."""
    return table_toml(policy.table or {})


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _LOCK).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write_whole(path: Path, text: str) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
