"""Our extension in a WebUI's sources: what it relies on is looked up there and, with a folder, it is run in them.

    python scripts/checks/webui.py --webui CHECKOUT [--webui CHECKOUT ...] [--folder FOLDER] [--out FILE.json]

CHECKOUT is the source of AUTOMATIC1111's WebUI, its AMD fork, Forge or reForge. Its files are parsed, and each line of
the table that is not found is said. FOLDER is the demo model, optimized for the CPU: with it webui_run.py hooks the
extension into the modules of each checkout, in a process of its own, and calls it as they do. No page, no sampler and
no VAE of the host is run. tests/integrations/test_webui.py runs the extension against these interfaces as recorded.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from scripts.checks.check_report import report

Wanted = dict[str, dict[str, list[str] | None]]

# File -> function or Class.method, or variable -> names of its arguments that must be there, in this order.
WEBUI: Wanted = {
    "modules/sd_unet.py": {
        "SdUnetOption.create_unet": ["self"],
        "SdUnet.forward": ["self", "x", "timesteps", "context"],
        "SdUnet.activate": ["self"],
        "SdUnet.deactivate": ["self"],
        "current_unet": None,
    },
    "modules/script_callbacks.py": {"on_list_unets": ["callback"]},
    "modules/paths.py": {"models_path": None},
    "modules/shared.py": {"sd_model": None},
    "extensions-builtin/Lora/networks.py": {"loaded_networks": None},
    "extensions-builtin/Lora/network.py": {"Network.__init__": ["self", "name", "network_on_disk"]},
}
SCRIPTS: Wanted = {
    "modules/paths.py": {"models_path": None},
    "modules/scripts.py": {
        "Script.process_before_every_sampling": ["self", "p"],
        "Script.title": ["self"],
        "Script.show": ["self", "is_img2img"],
        "Script.ui": ["self", "is_img2img"],
        "AlwaysVisible": None,
    },
}
FORGE: Wanted = {
    **SCRIPTS,
    "backend/patcher/base.py": {
        "ModelPatcher.set_model_unet_function_wrapper": ["self", "unet_wrapper_function"],
        "ModelPatcher.clone": ["self"],
        "ModelPatcher.add_patches": ["self"],
    },
    "backend/modules/k_model.py": {
        "KModel.apply_model": ["self", "x", "t", "c_concat", "c_crossattn", "control", "transformer_options"]
    },
}
REFORGE: Wanted = {
    **SCRIPTS,
    "ldm_patched/modules/model_patcher.py": {
        "ModelPatcher.set_model_unet_function_wrapper": ["self", "unet_wrapper_function"],
        "ModelPatcher.clone": ["self"],
    },
    "ldm_patched/modules/model_base.py": {
        "BaseModel.apply_model": ["self", "x", "t", "c_concat", "c_crossattn", "control", "transformer_options"]
    },
}
WANTED = {"webui": WEBUI, "forge": FORGE, "reforge": REFORGE}
# Lines that these files must hold: what is called how.
LINES = {
    "webui": {"modules/sd_unet.py": ["current_unet.forward(x, timesteps, context, *args, **kwargs)"]},
    "forge": {
        "backend/sampling/sampling_function.py": [
            'model_options[\'model_function_wrapper\'](model.apply_model, {"input": input_x, "timestep": timestep_'
        ],
        "backend/modules/k_model.py": [
            "self.diffusion_model(xc, t, context=context, control=control, transformer_options=transformer_options"
        ],
        "backend/patcher/base.py": ["self.lora_patches = {}"],
    },
    "reforge": {
        "ldm_patched/modules/samplers.py": [
            'model_options[\'model_function_wrapper\'](model.apply_model, {"input": input_x, "timestep": timestep_'
        ],
        "extensions-builtin/Lora/networks.py": [
            "compiled_lora_targets.append([a.filename, b, c])",
            "current_sd.current_lora_hash = compiled_lora_targets_hash",
        ],
    },
}


def kind_of(checkout: Path) -> str:
    """Which of the three hosts it is, by what only Forge and reForge have."""
    signs = {"forge": "backend", "reforge": "ldm_patched"}
    return next((kind for kind, sign in signs.items() if (checkout / sign).is_dir()), "webui")


def defined(tree: ast.Module) -> Iterator[tuple[str, list[str] | None]]:
    """Functions and methods with their arguments, and variables of the module."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, [argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)]
        elif isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef):
                    yield f"{node.name}.{inner.name}", [argument.arg for argument in inner.args.args]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for name in (n for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)):
                yield name.id, None
        elif isinstance(node, ast.ImportFrom):
            yield from ((alias.asname or alias.name, None) for alias in node.names)


def check(checkout: Path) -> list[str]:
    """What our extension relies on and is not there, one a line."""
    kind = kind_of(checkout)
    missing = []
    for name, wanted in WANTED[kind].items():
        path = checkout / name
        if not path.is_file():
            if wanted:
                missing.append(f"{name} is not there")
            continue
        there = dict(defined(ast.parse(path.read_text(encoding="utf-8"))))
        for what, arguments in wanted.items():
            if what not in there:
                missing.append(f"{name} has no {what}")
            elif arguments is not None and (there[what] or [])[: len(arguments)] != arguments:
                missing.append(f"{name}: {what} takes {there[what]}, not {arguments}")
    for name, lines in LINES[kind].items():
        text = (checkout / name).read_text(encoding="utf-8") if (checkout / name).is_file() else ""
        missing += [f"{name} lacks {line!r}" for line in lines if line not in text]
    click.echo(f"{checkout}: {kind}, {'; '.join(missing) or 'all that the extension relies on is there'}")
    return missing


def ran(checkout: Path, folder: Path) -> dict[str, Any]:
    """What the extension did inside of the checkout's modules. Raises ClickException when they, or it, failed."""
    script = Path(__file__).with_name("webui_run.py")
    done = subprocess.run(
        [sys.executable, str(script), str(checkout.absolute()), str(folder.absolute())],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise click.ClickException(f"{checkout}: {done.stderr.strip().splitlines()[-1]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def wrong(found: dict[str, Any]) -> list[str]:
    """What is not as it must be: our UNet draws what the host's draws, and where it refuses, the host's draws."""
    limits = {"off": 1e-4, "refused, off": 0.0, "let go, off": 0.0, "host's UNet called": 0}
    bad = [name for name, limit in limits.items() if found.get(name, 0) > limit]
    return bad + [name for name in ("host's UNet called then",) if found[name] != 1]


@click.command()
@click.option("--webui", "checkouts", type=click.Path(path_type=Path, exists=True), multiple=True, required=True)
@click.option("--folder", type=click.Path(path_type=Path, exists=True), help="The demo model, optimized for the CPU.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the findings here, .json and .md.")
def main(checkouts: tuple[Path, ...], folder: Path | None, out: Path | None) -> None:
    """Look up in CHECKOUTs what our extension relies on, and run it there."""
    found: dict[str, Any] = {}
    bad = []
    for checkout in checkouts:
        missing = check(checkout)
        done = ran(checkout, folder) if folder else {}
        found[checkout.name] = {"missing": missing, **done}
        bad += [*missing, *(wrong(done) if done else [])]
    if folder:
        report("The WebUI extension in the hosts' own modules", "scripts/checks/webui.py", found, out)
    if bad:
        raise click.ClickException("; ".join(bad))


if __name__ == "__main__":
    main()
