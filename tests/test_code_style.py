"""Rules of the source tree: names are nouns, private names stay private, scripts import nothing from tests, and
platform-specific C++ is in one header. `lint-imports` checks the layers."""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Iterator, Set
from functools import cache
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("sd_ort", "fusion_passes", "custom_ops")

Node = TypeVar("Node", bound=ast.AST)


@cache
def trees() -> dict[str, ast.Module]:
    """Every Python file of ours by its path."""
    files = [path for folder in (*PACKAGES, "scripts", "tests") for path in (ROOT / folder).rglob("*.py")]
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in sorted(files)}


def nodes(kind: type[Node]) -> Iterator[tuple[str, Node]]:
    """Every node of a kind, with the path of its file."""
    for path, tree in trees().items():
        yield from ((path, node) for node in ast.walk(tree) if isinstance(node, kind))


def imports_of_ours() -> Iterator[tuple[str, str, ast.alias]]:
    """(file, module, name) of every `from <module of ours> import <name>`."""
    for path, node in nodes(ast.ImportFrom):
        if node.module is not None and node.module.split(".")[0] in PACKAGES:
            yield from ((path, node.module, alias) for alias in node.names)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_names_are_no_participles() -> None:
    """A name says what a value is. CONTRIBUTING.md has the words."""
    participles = set("asked drawn found given held kept known made said taken told wanted".split())
    names = []
    for path, node in nodes(ast.AST):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.append((path, node.id if isinstance(node, ast.Name) else node.attr))
        elif isinstance(node, ast.arg | ast.FunctionDef):
            names.append((path, node.arg if isinstance(node, ast.arg) else node.name))
    assert [(path, name) for path, name in names if name.strip("_") in participles] == []


def test_private_names_stay_in_their_module() -> None:
    violations, imported = [], set()
    for path, module, alias in imports_of_ours():
        imported.add((path, alias.asname or alias.name))
        if any(map(is_private, (alias.name, *module.split(".")))):
            violations.append(f"{path}: {alias.name} of {module}")
    for path, node in nodes(ast.Attribute):
        if is_private(node.attr) and isinstance(node.value, ast.Name) and (path, node.value.id) in imported:
            violations.append(f"{path}: {node.value.id}.{node.attr}")
    assert violations == []


def module_imports(tree: ast.Module, modules: Set[str]) -> set[str]:
    """The modules of ours that one imports, inside functions and for types too.

    `from package import name`: the module of this name, or the package if it is another one of its names.
    """
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= inside if inside <= modules else {node.module, *inside}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names & modules


def test_no_module_cycles() -> None:
    """Modules do not import each other in a circle, but for `sd_ort` itself, whose public names are read when used."""
    of = {path.removesuffix(".py").replace("/", ".").removesuffix(".__init__"): tree for path, tree in trees().items()}
    modules = {name for name in of if name.split(".")[0] in PACKAGES} - {"sd_ort"}
    assert len(modules) > 300
    graph = {name: module_imports(of[name], modules) - {name} for name in modules}
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError


def test_scripts_import_nothing_from_tests() -> None:
    names = {path.stem for path in (ROOT / "tests").rglob("*.py")} | {"tests"}
    imports = [
        (path, node.module) for path, node in nodes(ast.ImportFrom) if (node.module or "").split(".")[0] in names
    ]
    imports += [(path, alias.name) for path, node in nodes(ast.Import) for alias in node.names if alias.name in names]
    assert [(path, module) for path, module in imports if path.startswith("scripts/")] == []


def test_kernels_wait_first() -> None:
    """A kernel that began early and did not wait would read what another one has not written yet."""
    files = [path for suffix in ("*.hip", "*.h") for path in (ROOT / "custom_ops").rglob(suffix)]
    bodies = [
        body for path in files for body in re.findall(r"^__global__ .*?\) \{\n(.*?)\n", path.read_text(), re.M | re.S)
    ]
    assert len(bodies) == sum(len(re.findall(r"^\s*__global__ ", path.read_text(), re.M)) for path in files) > 20
    assert {body.strip() for body in bodies} == {"wait_for_predecessor();"}


def test_what_differs_by_system_is_in_one_header() -> None:
    """Standard C++ everywhere else, so that Windows' compilers take it (scripts/checks/windows_sources.py)."""
    headers = r"#include <(?:dlfcn|unistd|windows|pthread|io|direct|process|sys/\w+)\.h>"
    calls = rf"{headers}|\b(?:std::)?aligned_alloc\b|__declspec|\bvisibility\("
    sources = [path for kind in ("cc", "h", "hip") for path in (ROOT / "custom_ops").rglob(f"*.{kind}")]
    paths = {str(path.relative_to(ROOT / "custom_ops")) for path in sources if re.search(calls, path.read_text())}
    # tiles.h asks Linux for its matrix units, and does without them elsewhere; glibc.cc is of glibc alone.
    assert paths == {"common/platform.h", "interface.h", "common/tiles.h", "common/glibc.cc"}


def test_scripts_do_not_patch_the_path() -> None:
    """Shared modules are imported as `scripts.<folder>.<module>`. Only an application's checkout is put on the path."""
    patching = {str(path) for path, tree in trees().items() if path.startswith("scripts/") and _patches_path(tree)}
    applications = {"comfyui_host", "comfyui_page", "host_loras", "webui_serve"}
    tinygrad = "scripts/amd/simulated_rocm/emulator/tinygrad_emulator.py"
    assert patching == {tinygrad, *(f"scripts/checks/{name}.py" for name in applications)}


def _patches_path(tree: ast.Module) -> bool:
    return any(isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.path" for node in ast.walk(tree))
