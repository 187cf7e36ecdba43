"""The pages of docs/reference, generated from the code: commands, Python API, manifest, operators and targets."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

import sd_ort
from custom_ops.operator_spec import load
from sd_ort.cli import cli
from sd_ort.core.pipeline_folder import MANIFEST, MANIFEST_KEYS
from sd_ort.optimize.targets import TARGETS
from sd_ort.runtime.provider_table import PROVIDERS

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "reference"
OPERATOR = re.compile(r"^SD_ORT_(\w*?)_?OPERATOR\((\w+), \w+\)", re.MULTILINE)
KERNELS = {
    "": "CPU and GPU kernels.",
    "CPU": "CPU kernels.",
    "GPU": "GPU kernels, launched by other operators and by torch; not registered with ONNX Runtime.",
    "PROVIDER": "GPU kernels, registered by the sd-ort provider alone.",
}


def cli_page() -> Iterator[str]:
    """Yield the lines of the page of commands: usage, description, and a list of options with their defaults."""
    yield "# Commands\n\nEach command ends with 0, or with one line on stderr and another exit code."
    context = click.Context(cli, info_name="sd-ort")
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command is not None
        scope = click.Context(command, info_name=name, parent=context, max_content_width=10_000)
        yield f"## {name}"
        yield f"    sd-ort {name} {' '.join(command.collect_usage_pieces(scope))}"
        yield _escape(inspect.cleandoc(command.help or "").replace("\b\n", ""))
        options = [parameter for parameter in command.params if isinstance(parameter, click.Option)]
        records = filter(None, (option.get_help_record(scope) for option in options))
        yield "\n".join(f"- `{names}`: {_escape(' '.join(text.split()))}" for names, text in records)


def python_page() -> Iterator[str]:
    """Yield the lines of the page of the Python API: the methods of each public class that are its own."""
    yield "# Python API\n\nThe names of diffusers, with its arguments, defaults and order of arguments."
    listed: set[Any] = set()
    for name in sd_ort.MODULES:
        class_ = getattr(sd_ort, name)
        yield f"## sd_ort.{name}\n\n{_summary(class_)}"
        for base in reversed(class_.__mro__[:-1]):
            for method_name, attribute in vars(base).items():
                method = getattr(attribute, "__func__", attribute)
                public = not method_name.startswith("_") or method_name == "__call__"
                if public and inspect.isfunction(method) and method not in listed:
                    listed.add(method)
                    yield f"- `{method_name}{_signature(method)}`: {_summary(method)}".removesuffix(": ")


def operators_page() -> Iterator[str]:
    """Yield the lines of the page of operators, in the order of registration: inputs, outputs, formula, kernels."""
    yield "# Operators\n\nDomain `sd_ort`. Inputs with `?` are optional."
    listed = [
        (kernels, folder, load(folder))
        for kernels, folder in OPERATOR.findall((ROOT / "custom_ops" / "operators.txt").read_text())
    ]
    names = {operator.name for *_, operator in listed}
    formulas: dict[str, list[str]] = {name: [] for name in names}
    for _, folder, operator in listed:
        header = ROOT / "custom_ops" / "operators" / folder / "op.h"
        comment = header.read_text().split("#pragma once")[0] if header.exists() else ""
        described = operator.name
        for paragraph in "\n".join(line.removeprefix("//").strip() for line in comment.strip().splitlines()).split(
            "\n\n"
        ):
            name = paragraph.partition("(")[0]
            described = name if name in names else described  # a header may have operators of the same kernels
            formulas[described] += [paragraph] if paragraph else []
    for kernels, _, operator in listed:
        formula = "\n\n".join(formulas[operator.name])
        yield f"## {operator.name}\n\nInputs {_names(operator.inputs)}; outputs {_names(operator.outputs)}."
        yield f"{_escape(formula)}\n\n{KERNELS[kernels]}"


def targets_page() -> Iterator[str]:
    """Yield the lines of the page of targets and of the manifest.

    Each target has its providers, dtypes, passes and operators of ONNX Runtime.
    """
    yield "# Targets and the manifest"
    yield "A target names what will run the optimized model: `sd-ort optimize IN OUT --target NAME`."
    for name, target in TARGETS.items():
        providers = [each for each, provider in PROVIDERS.items() if (provider.target or each) == name]
        yield f"## {name}\n\nProviders: {_names(tuple(providers)) or 'any, by function bodies in the model'}."
        yield f"Dtypes: {_names(target.dtypes)}. Passes, in order: " + ", ".join(
            f"`{graph_pass.name}`" for graph_pass in (*target.fusions, *target.passes_for(target.dtypes[0]))
        )
        contrib = _names(tuple(target.contrib_constraints)) or "none"
        yield f"Operators of ONNX Runtime where its kernel takes them: {contrib}."
    yield f"## The manifest\n\n`{MANIFEST}` in each pipeline folder, JSON."
    yield "\n".join(f"- `{key}`: {_escape(text)}" for key, text in MANIFEST_KEYS.items())


PAGES: dict[str, Callable[[], Iterator[str]]] = {
    "cli.md": cli_page,
    "python.md": python_page,
    "operators.md": operators_page,
    "targets.md": targets_page,
}


def pages() -> dict[str, str]:
    """Return the text of each page by its file name."""
    note = "<!-- Generated by scripts/docs: change the code, not this page. -->\n\n"
    return {name: note + "\n\n".join(filter(None, page())) + "\n" for name, page in PAGES.items()}


def stale(folder: Path) -> list[str]:
    """Return the names of pages in `folder` that differ from the code, or that no code makes."""
    current = {path.name: path.read_text() for path in folder.glob("*.md")}
    expected = pages()
    return sorted(name for name in current.keys() | expected.keys() if current.get(name) != expected.get(name))


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _summary(documented: Any) -> str:
    return _escape((inspect.getdoc(documented) or "").split("\n\n")[0].replace("\n", " "))


def _signature(method: Any) -> str:
    """Return a signature in one line, without annotations; a default that prints an address is `...`."""
    parameters = [parameter.replace(annotation=parameter.empty) for parameter in
                  inspect.signature(method).parameters.values() if parameter.name not in ("self", "cls")]  # fmt: skip
    return re.sub(r"<[^>]*>", "...", str(inspect.Signature(parameters)))


def _escape(text: str) -> str:
    return text.replace("<", "&lt;").replace("*", "\\*")


def main() -> None:
    """Write the pages, or check them."""
    if sys.argv[1:] == ["--check"]:
        if names := stale(FOLDER):
            sys.exit(f"docs/reference is not what the code says ({', '.join(names)}): run scripts/docs.")
    elif sys.argv[1:]:
        sys.exit("Usage: scripts/docs [--check]")
    else:
        FOLDER.mkdir(parents=True, exist_ok=True)
        for name, text in pages().items():
            (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
