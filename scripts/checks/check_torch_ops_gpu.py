#!/usr/bin/env python3
"""Every torch operator of the library on this machine's GPU, beside the plain torch expression in float64.

    python scripts/checks/check_torch_ops_gpu.py --log results/torch_ops_check_sm_90.txt

Checks numbers in float16, bfloat16 and float32, gradients, torch's opcheck (schema, tracing), another stream, a CUDA
graph, autocast, tensors of two devices, and a small U-Net whose calls are captured in CUDA graphs (`optimize`): with
new numbers, on another stream, from another thread, after changes of its weights; a resnet block by kept filters;
and the demo's pictures. Exits with 1 when one fails. Needs `sd-ort build-ops --cuda ARCH` or --hip.
"""

from __future__ import annotations

import argparse
import copy
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from diffusers.models.resnet import ResnetBlock2D

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts/fixtures"), str(ROOT / "scripts/measure")]

from gpu_models import random_module  # noqa: E402
from torch_calls import NAMES, Draw, calls  # noqa: E402

from sd_ort.benchmark.engines.pytorch import torch_pipeline  # noqa: E402
from sd_ort.core.metrics import psnr  # noqa: E402
from sd_ort.runtime.machine import commit, machine  # noqa: E402
from sd_ort.torch import kernels, operators, optimize, reset_status, restore, status  # noqa: E402
from sd_ort.torch.modules import winograd  # noqa: E402
from sd_ort.torch.operators import contract  # noqa: E402

# Norm of the difference over the norm of the result.
LIMITS = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cpu to try the script")
    parser.add_argument("--log", type=Path, help="write the lines there too")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    lines = [f"{', '.join(machine()['gpus']) or 'CPU'}; torch {torch.__version__}; commit {commit()}"]
    print(lines[0], flush=True)
    failed = 0
    for name in NAMES:
        for check in (numbers, gradients, traced):
            reset_status()
            try:
                found = check(name, options.device)
            except Exception as error:
                failed, found = failed + 1, f"FAILED: {type(error).__name__}: {error}"
            lines.append(f"{name:18} {check.__name__:10} {found}")
            print(lines[-1], flush=True)
    if options.device == "cuda":
        for of_all in (stream, graph, autocast, two_devices, own_graphs, kept_filters, pictures):
            try:
                found = of_all()
            except Exception as error:
                failed, found = failed + 1, f"FAILED: {type(error).__name__}: {error}"
            lines.append(f"{'all':18} {of_all.__name__:10} {found}")
            print(lines[-1], flush=True)
    if options.log:
        options.log.parent.mkdir(exist_ok=True, parents=True)
        options.log.write_text("\n".join(lines) + "\n")
    return 1 if failed else 0


def operator(name: str) -> Any:
    return getattr(torch.ops.sd_ort, name).default


def listed(result: Any) -> list[torch.Tensor]:
    return list(result) if isinstance(result, tuple) else [result]


def wide(argument: Any) -> Any:
    """An argument in float64, on the CPU."""
    if isinstance(argument, torch.dtype):
        return torch.float64
    return argument.detach().cpu().double() if isinstance(argument, torch.Tensor) else argument


def error(made: torch.Tensor, wanted: torch.Tensor) -> float:
    wanted = wanted.double().cpu()
    return float((made.double().cpu() - wanted).norm() / wanted.norm().clamp_min(1e-30))


def numbers(name: str, device: str) -> str:
    """Our kernels against float64."""
    worst = 0.0
    for dtype, limit in LIMITS.items():
        for arguments in calls(name, Draw(device, dtype)):
            wanted = listed(contract.PLAIN[name](*map(wide, arguments)))
            for got, want in zip(listed(operator(name)(*arguments)), wanted, strict=True):
                assert got.shape == want.shape, f"{got.shape} instead of {want.shape}"
                worst = max(worst, error(got, want) / limit)
    assert worst < 1, f"{worst:.2f} of the error allowed"
    return f"{worst:.2f} of the error allowed; {why(name)}"


def why(name: str) -> str:
    now = status()
    others = [f"{count} by torch: {reason}" for (which, reason), count in now.fallbacks.items() if which == name]
    return ", ".join([f"{now.kernels.get(name, 0)} calls by our kernels", *others])


def gradients(name: str, device: str) -> str:
    """Against those of the plain expression in float64."""
    worst = 0.0
    for arguments in calls(name, Draw(device, torch.float32, grad=True)):
        leaves = [a for a in arguments if isinstance(a, torch.Tensor) and a.is_leaf]
        if len(leaves) < sum(isinstance(a, torch.Tensor) for a in arguments):
            continue  # parts of one tensor
        wide_ones = [wide(a).requires_grad_() if isinstance(a, torch.Tensor) else wide(a) for a in arguments]
        wide_leaves = [a for a in wide_ones if isinstance(a, torch.Tensor)]
        found = torch.autograd.grad(size(operator(name)(*arguments)), leaves)
        wanted = torch.autograd.grad(size(contract.PLAIN[name](*wide_ones)), wide_leaves)
        worst = max(worst, *map(error, found, wanted))
    assert worst < 1e-4, f"error {worst:.1e}"
    return f"error {worst:.1e}"


def size(result: Any) -> torch.Tensor:
    """One number that depends on all of a result."""
    return torch.stack([each.square().sum() for each in listed(result)]).sum()


def traced(name: str, device: str) -> str:
    """torch's own checks of schema and tracing."""
    arguments = next(calls(name, Draw(device, torch.float16)))
    torch.library.opcheck(operator(name), arguments, test_utils=("test_schema", "test_faketensor"))
    return "opcheck"


def stream() -> str:
    """A call on another stream than the default sees what was queued there before it."""
    d = Draw("cuda", torch.float16)
    x, bias, skip = d(64, 1024, 1024), d(1024), d(64, 1024, 1024)
    wanted = x * 2 + bias + skip
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(50):
            x.mul_(1.0)
        x.mul_(2.0)
        got = operators.bias_add(x, bias, skip)
    torch.cuda.synchronize()
    assert error(got, wanted) < LIMITS[torch.float16]
    return "a side stream is kept to"


def graph() -> str:
    """A captured call replays on new numbers."""
    d = Draw("cuda", torch.float16)
    x, gamma, beta = d.image(2, 64, 16, 16), d(64), d(64)
    with torch.cuda.stream(torch.cuda.Stream()):
        operators.group_norm(x, gamma, beta, 8, 1e-5, silu=True)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        y = operators.group_norm(x, gamma, beta, 8, 1e-5, silu=True)
    x.copy_(d.image(2, 64, 16, 16))
    captured.replay()
    wanted = contract.PLAIN["group_norm"](*map(wide, (x, gamma, beta)), 8, 1e-5, True)
    assert error(y, wanted) < LIMITS[torch.float16]
    return "a replay computes"


def autocast() -> str:
    """Products in the autocast type, norms in float32."""
    d = Draw("cuda", torch.float32)
    with torch.autocast("cuda", torch.bfloat16):
        product = operators.linear_add(d(4, 8), d(8, 8), d(8), d(4, 8))
        norm = operators.group_norm(d(2, 8, 4).half(), d(8), d(8), 2, 1e-5)
    assert (product.dtype, norm.dtype) == (torch.bfloat16, torch.float32)
    return "types as torch's"


def two_devices() -> str:
    """One line."""
    d = Draw("cuda", torch.float32)
    said = ""
    try:
        operators.bias_add(d(2, 8), d(8).cpu(), d(2, 8))
    except RuntimeError as refusal:
        said = str(refusal)
    assert len(said.splitlines()) == 1, f"it said {said!r}"
    return said


def own_graphs() -> str:
    """Captured calls of a U-Net against the same model without graphs, both by transformed filters where they may."""
    winograd.FEWEST_PIXELS = winograd.LEAST_SAVED = 0
    model: Any = random_module("sd15-tiny", "unet").half()
    model = optimize(model, "performance")
    plain = optimize(copy.deepcopy(model), "performance", graph=False)
    reset_status()

    def turn(seed: int, size: int = 16, prompt: torch.Tensor | None = None) -> None:
        d = Draw("cuda", torch.float16)
        sample, context = d(2 + seed, 4, size, size)[seed:], d(2 + seed, 7, model.config.cross_attention_dim)[seed:]
        context = context if prompt is None else prompt
        made = model(sample, 100 * seed, context).sample
        wanted = plain(sample, 100 * seed, context).sample
        assert error(made, wanted) < LIMITS[torch.float16], f"error {error(made, wanted):.1e} in call {seed}"

    with torch.no_grad():
        for seed in range(4):
            turn(seed)
        with torch.cuda.stream(torch.cuda.Stream()):
            turn(4)
            turn(5, size=24)
            turn(6, size=24)
        with ThreadPoolExecutor(1) as other:
            other.submit(torch.no_grad()(turn), 7).result()
        for each in (model, plain):
            each.conv_in.weight.mul_(1.5)  # in place: read by the graph
        turn(8)
        assert status().graphs[type(model).__name__, "captured"] == 2
        for each in (model, plain):
            each.conv_out.weight.data = each.conv_out.weight.data * 1.5  # elsewhere: captured anew
        turn(9)
        turn(10)
        turn(11)
        prompt = Draw("cuda", torch.float16)(2, 7, model.config.cross_attention_dim)
        for seed in (12, 13, 14):
            turn(seed, prompt=prompt)
        prompt.mul_(1.5)  # what was made of it is made again
        turn(15, prompt=prompt)
        for each in (model, plain):
            each.mid_block.resnets[0].conv1.weight.mul_(1.5)  # in place: its filters are made again
        turn(16, prompt=prompt)
    ran = {what: count for (_, what), count in status().graphs.items()}
    assert ran == {"captured": 3, "replayed": 14, "replayed for the same prompt": 3}, str(ran)
    assert not status().not_captured, str(status())
    return "captured 3 times, replayed 14 times, 3 of these for the same prompt"


def kept_filters() -> str:
    """A resnet block whose weights change, on two streams, against float64."""
    if not kernels.is_hopper_or_newer(torch.device("cuda", 0)):
        return "not on this GPU"
    block: Any = ResnetBlock2D(in_channels=448, out_channels=448, temb_channels=None).half().cuda()
    optimize(block, "performance")
    reset_status()
    x, worst = Draw("cuda", torch.float16).image(2, 448, 17, 16), 0.0
    streams = [torch.cuda.default_stream(), torch.cuda.Stream()]
    with torch.no_grad():
        for turn in range(4):
            streams[turn % 2].wait_stream(streams[turn % 2 - 1])
            with torch.cuda.stream(streams[turn % 2]):
                made = block(x, None)
                wanted = restore(copy.deepcopy(block)).cpu().double()(wide(x), None)
                worst = max(worst, error(made, wanted))
                if turn > 0:
                    block.conv1.weight.mul_(1.5)
    ran = {name: status().kernels[name] for name in ("nhwc_winograd", "winograd_filters")}
    assert ran == {"nhwc_winograd": 8, "winograd_filters": 4}, f"{ran}; {status().fallbacks}"
    assert worst < LIMITS[torch.float16], f"error {worst:.1e}"
    return f"error {worst:.1e}, filters made 4 times in 4 calls of 2 convolutions"


def pictures(device: str = "cuda") -> str:
    """Three prompts through the demo pipeline in float32, as it is and with `optimize`."""
    pipeline = torch_pipeline("demo").to(device)
    pipeline.set_progress_bar_config(disable=True)

    def drawn() -> list[Any]:
        generator = torch.Generator().manual_seed(0)
        prompts = ("a red circle", "a green square", "a blue circle")
        return [pipeline(p, num_inference_steps=6, output_type="np", generator=generator).images for p in prompts]

    before = drawn()
    optimize(pipeline, "performance")
    reset_status()
    worst = min(psnr(a, b) for a, b in zip(before, drawn(), strict=True))
    assert worst >= 60, f"{worst:.1f} dB"
    return f"{worst:.1f} dB; " + ", ".join(f"{what} {count} times" for (_, what), count in status().graphs.items())


if __name__ == "__main__":
    sys.exit(main())
