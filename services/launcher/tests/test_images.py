"""The images hold what their services need, and no more."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]
FOLDERS = {
    "gateway": "gateway",
    "router": "router",
    "cache-index": "cache-index",
    "guard": "guard",
    "worker": "worker",
    "ratelimit": "services/ratelimit",
    "billing": "services/billing",
    "launcher": "services/launcher",
}
SHARED = ["services/common/src", "services/contracts/src"]
# A worker on a GPU brings it; on a CPU nothing imports it.
NOT_IN_IMAGES = {"triton"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def instructions(extra: str) -> list[tuple[str, str]]:
    """Read a Dockerfile: word and what follows, continued lines joined."""
    text = (ROOT / FOLDERS[extra] / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(word, " ".join(rest.split())) for word, _, rest in (x.partition(" ") for x in lines)]


def only(extra: str, word: str) -> str:
    (found,) = [rest for it, rest in instructions(extra) if it == word]
    return found


def module_of(extra: str) -> str:
    return f"headrace_{extra.replace('-', '_')}"


@pytest.mark.parametrize("extra", FOLDERS)
def test_an_image_runs_its_service_as_nobody_in_particular(extra: str) -> None:
    """By number, so that Kubernetes can see that it is not root."""
    assert only(extra, "USER") == "10001"
    assert f'["python", "-m", "{module_of(extra)}"]' == only(extra, "ENTRYPOINT")
    assert (ROOT / FOLDERS[extra] / "src" / module_of(extra) / "__main__.py").exists()


@pytest.mark.parametrize("extra", FOLDERS)
def test_an_image_holds_one_service_and_what_all_share(extra: str) -> None:
    """Requirements first, so that a change of the source installs nothing again."""
    copied = [rest.split()[:-1] for word, rest in instructions(extra) if word == "COPY"]
    own = f"{FOLDERS[extra]}/src"
    requirements = ["constraints.txt", "pyproject.toml", "deploy/requirements.py"]
    assert copied == [requirements, [own, *SHARED]]
    assert f"python requirements.py {extra} > {extra}.txt" in str(instructions(extra))


def test_all_images_have_one_base() -> None:
    """Layers that they share are stored and patched once."""
    bases = {(only(extra, "FROM"), str(instructions(extra)[:4])) for extra in FOLDERS}
    assert len(bases) == 1


def test_settings_in_images_exist() -> None:
    """A misspelt one would keep the service from starting."""
    fields = {f"HEADRACE_GATEWAY_{'outbox_dir'.upper()}", f"HEADRACE_WORKER_{'cache_dir'.upper()}"}
    named = {
        name for extra in FOLDERS for name in re.findall(r"(HEADRACE_\w+)=", only(extra, "ENV"))
    }
    assert named == fields


@pytest.mark.parametrize("extra", FOLDERS)
def test_requirements_are_those_of_the_extra(extra: str) -> None:
    """What an image installs is what pyproject.toml says."""
    done = subprocess.run(
        [sys.executable, "deploy/requirements.py", extra],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=30,
    )  # fmt: skip
    wanted = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"][extra]]
    assert done.stdout.splitlines() == wanted


@pytest.mark.parametrize("extra", FOLDERS)
def test_an_extra_brings_all_that_its_service_imports(extra: str) -> None:
    """On a developer's machine everything is installed; in the image only this is."""
    brought = closure((*PROJECT["dependencies"], *PROJECT["optional-dependencies"][extra]))
    distributions = importlib.metadata.packages_distributions()
    missing = {
        name
        for name in third_party(extra) - NOT_IN_IMAGES
        if not brought & {normal(one) for one in distributions.get(name, [name])}
    }
    assert missing == set()


def third_party(extra: str) -> set[str]:
    """Name the foreign packages that a service imports, also by the shared modules it uses."""
    waiting = [*(ROOT / FOLDERS[extra] / "src").rglob("*.py")]
    seen: set[Path] = set()
    found: set[str] = set()
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        for module in imports_of(path):
            if module.startswith("headrace_"):
                waiting += shared_file(module)
            else:
                found.add(module.partition(".")[0])
    return found - sys.stdlib_module_names


@functools.cache
def imports_of(path: Path) -> frozenset[str]:
    return frozenset(_imports(ast.parse(path.read_text())))


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (it.name for it in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module
            # One of these may be a module as well.
            yield from (f"{node.module}.{it.name}" for it in node.names)


def shared_file(module: str) -> list[Path]:
    base = ROOT / SHARED[0] / module.replace(".", "/")
    return [path for path in (base.with_suffix(".py"), base / "__init__.py") if path.exists()]


def closure(requirements: tuple[str, ...]) -> set[str]:
    """Name the distributions that these requirements bring with them."""
    waiting, seen = [Requirement(it) for it in requirements], set()
    while waiting:
        one = waiting.pop()
        for extra in one.extras | {""}:
            if (normal(one.name), extra) in seen:
                continue
            seen.add((normal(one.name), extra))
            further = map(Requirement, importlib.metadata.requires(one.name) or [])
            waiting += [
                it for it in further if not it.marker or it.marker.evaluate({"extra": extra})
            ]
    return {name for name, _ in seen}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
