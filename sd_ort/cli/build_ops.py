"""`sd-ort build-ops`: compile the custom-op library."""

from __future__ import annotations

from pathlib import Path

import click

from custom_ops.nvidia_targets import MEASURED, TARGETS, describe


class SpreadCommand(click.Command):
    """`--hip A B` means `--hip A --hip B`, which is all that click itself takes."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        expanded: list[str] = []
        option = ""
        for arg in args:
            if not arg.startswith("-") and option and expanded[-1] != option:
                expanded.append(option)
            elif arg.startswith("-"):
                option = arg if arg in ("--hip", "--cuda") else ""
            expanded.append(arg)
        return super().parse_args(ctx, expanded)


@click.command(cls=SpreadCommand)
@click.option("--cpu/--no-cpu", default=True, show_default=True, help="The library that ONNX Runtime loads.")
@click.option("--hip", multiple=True, metavar="ARCH...", help="AMD architectures, as gfx90a or gfx1201.")
@click.option(
    "--cuda",
    multiple=True,
    metavar="ARCH...",
    help=f"NVIDIA architectures: {', '.join(TARGETS)}; measured on {', '.join(MEASURED)}.",
)
@click.option(
    "--provider/--no-provider",
    default=None,
    help="Our execution provider too, for ONNX Runtime 1.29 or later [default: with --hip or --cuda].",
)
@click.option(
    "--headers", type=click.Path(path_type=Path), help="Folder of onnxruntime_c_api.h [default: found or fetched]."
)
def command(
    cpu: bool, hip: tuple[str, ...], cuda: tuple[str, ...], provider: bool | None, headers: Path | None
) -> None:
    """Compile the fused operators: CPU kernels always; AMD and NVIDIA kernels by architecture, and with them the
    providers hip and sdcuda.

    The library is kept in ~/.cache/sd-ort and found by every later command. The last line printed is its path.
    """
    from sd_ort.runtime import build

    for target in cuda:
        if target in TARGETS and target not in MEASURED:
            click.echo(describe(target), err=True)
    provider = bool(hip or cuda) if provider is None else provider
    build.build(cpu=cpu, hip=hip, cuda=cuda, headers=headers, provider=provider, on_progress=click.echo)
