"""`sd-ort optimize IN OUT`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sd_ort.core.pipeline_folder import standalone_model

if TYPE_CHECKING:
    from sd_ort.optimize.weight_storage import WeightStorage


@click.command()
@click.argument("source", metavar="IN", type=click.Path(path_type=Path))
@click.argument("output", metavar="OUT", type=click.Path(path_type=Path))
@click.option(
    "--target",
    help="cpu, cuda, rocm, migraphx, hip, gpu (what our provider sdcuda runs) or portable "
    "[default: what the installed onnxruntime wheel drives].",
)
@click.option("--float16", "dtype", flag_value="float16", help="Weights and tensors in float16.")
@click.option(
    "--float16-io", is_flag=True, help="With --float16 of one .onnx file: its inputs and outputs in float16 too."
)
@click.option(
    "--bfloat16",
    "dtype",
    flag_value="bfloat16",
    help="Weights and tensors in bfloat16; for target cpu, weights and products.",
)
@click.option(
    "--weights",
    type=click.Choice(["int8", "int4", "float8"]),
    help="Store weights of linears and convolutions in fewer bits (all but the VAE's), for target cpu or portable.",
)
@click.option(
    "--weight-group",
    type=click.Choice(["32", "64", "128"]),
    help="With --weights int8 or int4: elements of a linear's row that share a scale [default: 64].",
)
@click.option("--asymmetric", is_flag=True, help="With --weights int8 or int4: with zero points.")
@click.option(
    "--calibrate/--no-calibrate",
    default=None,
    help="With --float16: find what must stay in float32 by running it [default: components below 1 GiB].",
)
@click.option(
    "--inputs", type=click.Path(path_type=Path), help="Calibrate on recorded runs: an .npz of component/input[/run]."
)
@click.option(
    "--hoist/--no-hoist",
    default=None,
    help="Run the prompt's and the schedule's part of the UNet or transformer once [default: on cuda, rocm, hip and "
    "gpu with --float16, a transformer also with --bfloat16].",
)
@click.option("--component", "components", multiple=True, help="Only this component; may be given several times.")
@click.option("--config", metavar="MODEL", help="With IN in one file: a folder or hub id of its family.")
@click.option("--controlnet", metavar="MODEL", help="With a checkpoint: a ControlNet's diffusers folder or hub id.")
@click.option(
    "--ip-adapter", type=click.Path(path_type=Path), help="With a checkpoint: add the IP-Adapter in this file."
)
@click.option(
    "--image-encoder", type=click.Path(path_type=Path), help="Its encoder [default: image_encoder beside it]."
)
@click.option("--vae", type=click.Path(path_type=Path), help="Take the VAE of this file instead of the checkpoint's.")
@click.option("--unsafe-pickle", is_flag=True, help="Read .ckpt and .bin, as weights alone; only if you trust them.")
@click.option("--overwrite", is_flag=True, help="Replace files in OUT that were changed since sd-ort wrote them.")
def command(
    source: Path,
    output: Path,
    target: str | None,
    dtype: str | None,
    float16_io: bool,
    weights: str | None,
    weight_group: str | None,
    asymmetric: bool,
    calibrate: bool | None,
    inputs: Path | None,
    hoist: bool | None,
    components: tuple[str, ...],
    config: str | None,
    controlnet: str | None,
    ip_adapter: Path | None,
    image_encoder: Path | None,
    vae: Path | None,
    unsafe_pickle: bool,
    overwrite: bool,
) -> None:
    """Fuse the pipeline folder IN for a target and write it to OUT.

    IN is a folder that `sd-ort export` wrote, or a checkpoint as `export` takes it (a diffusers folder, a .safetensors
    file, a hub id, `demo`). A checkpoint of a published architecture, or of one that was optimized before, fills a
    template in seconds and without tracing; others are exported on the way, and a template is kept.

    IN may also be one .onnx file of any model (or a folder that holds one), and OUT is then one too.

    The default target is what the installed ONNX Runtime wheel drives. `portable` runs on any ONNX runtime: each fused
    operator carries its meaning as a model-local function, and a registered operator library takes over where it has a
    kernel.
    """
    from sd_ort.checkpoints.open import CheckpointOptions
    from sd_ort.stages import optimize

    manifest = optimize(
        source,
        output,
        checkpoint=CheckpointOptions(config, vae, unsafe_pickle, ip_adapter, image_encoder, controlnet),
        on_progress=click.echo,
        target=target,
        dtype=dtype or "float32",
        components=list(components) or None,
        calibrate=calibrate,
        inputs=inputs,
        hoist=hoist,
        float16_io=float16_io,
        weights=_weight_storage(weights, weight_group, asymmetric),
        overwrite=overwrite,
    )
    show(manifest["components"], source if standalone_model(source) is not None else output)
    click.echo(f"Wrote {output}")


def _weight_storage(dtype: str | None, group: str | None, asymmetric: bool) -> WeightStorage | None:
    """Return the storage that the options ask for. Raises InputError for options that do not go together."""
    from sd_ort.core.errors import InputError
    from sd_ort.optimize.weight_storage import WeightStorage

    if dtype in (None, "float8") and group is not None:
        raise InputError("--weight-group goes with --weights int8 or int4: leave it out.")
    if dtype is None:
        if asymmetric:
            raise InputError("--asymmetric goes with --weights int8 or int4: leave it out.")
        return None
    return WeightStorage(dtype, int(group or 64), not asymmetric)


def show(entries: dict[str, dict[str, Any]], explained: Path) -> None:
    """Print what was made of each component; `explained` is what `sd-ort explain` takes to say more."""
    from sd_ort.optimize.optimizer import COUNTED

    rows = [op for op in COUNTED if any(op in entry["op_counts"] for entry in entries.values())]
    widths = {name: max(16, len(name) + 2) for name in entries}
    click.echo(f"{'':26}" + "".join(f"{name:>{width}}" for name, width in widths.items()))
    for row in rows:
        click.echo(
            f"{row:26}"
            + "".join(f"{entries[name]['op_counts'].get(row, 0):>{width}}" for name, width in widths.items())
        )
    for name, entry in entries.items():
        if "not_fused" in entry:
            click.echo(f"{name}: not fused: {entry['not_fused']}.")
        if "low_coverage" in entry:
            click.echo(f"{name}: only {entry['low_coverage']} fused; `sd-ort explain {explained}` says why.", err=True)
        for reason in entry["kernel_fallbacks"]:
            click.echo(f"{name}: {reason}; they run as sd_ort operators.")
        if "hoisted" in entry:
            click.echo("; ".join(f"{part}: {nodes} nodes" for part, nodes in entry["hoisted"].items()))
        if "calibration" in entry:
            click.echo(f"{name}: {entry['calibration']}{'; they stay in float32:' if entry['float32_sites'] else ''}")
        for site in entry.get("float32_sites", ()):
            click.echo(f"    {site['max_abs']:>12.0f}  {site['op']:24}{site['value']}")
