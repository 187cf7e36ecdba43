#!/usr/bin/env python3
"""Check every torch operator on this machine's GPU against its torch fallback in float64.

    python scripts/checks/check_torch_ops_gpu.py --log results/torch_ops_check_sm_90.txt

Checks values in float16, bfloat16 and float32, gradients, torch's opcheck (schema, tracing), another stream, a CUDA
graph, autocast, tensors of two devices, and a small UNet whose calls are captured in CUDA graphs (`optimize`): with
new inputs, on another stream, from another thread, after updates of its weights. Also a resnet block with cached
Winograd filters, and images of the demo. Exits with 1 if a check fails. Needs `sd-ort build-ops --cuda ARCH` or --hip.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from diffusers.models.resnet import ResnetBlock2D

from scripts.bench.gpu_models import random_module
from scripts.fixtures.torch_calls import NAMES, RandomTensors, calls
from sd_ort.checkpoints.torch_pipeline import torch_pipeline
from sd_ort.core.metrics import psnr, relative_l2_error
from sd_ort.runtime.machine import commit, machine
from sd_ort.torch import kernels, operators, optimize, reset_status, restore, status
from sd_ort.torch.modules import winograd
from sd_ort.torch.operators import registration

# Maximum relative L2 error.
LIMITS = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="use cpu to try the script")
    parser.add_argument("--log", type=Path, help="also write the lines to this file")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    lines = [f"{', '.join(machine()['gpus']) or 'CPU'}; torch {torch.__version__}; commit {commit()}"]
    print(lines[0], flush=True)
    failures = 0

    def run(operator: str, check: Callable[..., str], *arguments: str) -> None:
        nonlocal failures
        reset_status()
        try:
            result = check(*arguments)
        except Exception as error:
            failures, result = failures + 1, f"FAILED: {type(error).__name__}: {error}"
        lines.append(f"{operator:20} {check.__name__:18} {result}")
        print(lines[-1], flush=True)

    for name in NAMES:
        for check in (values, gradients, tracing):
            run(name, check, name, options.device)
    if options.device == "cuda":
        for check_all in (stream, cuda_graph, autocast, two_devices, captured_unet, cached_filters, demo_images):
            run("all", check_all)
    if options.log:
        options.log.parent.mkdir(exist_ok=True, parents=True)
        options.log.write_text("\n".join(lines) + "\n")
    return 1 if failures else 0


def operator(name: str) -> Any:
    return getattr(torch.ops.sd_ort, name).default


def as_list(result: Any) -> list[torch.Tensor]:
    return list(result) if isinstance(result, tuple) else [result]


def wide(argument: Any) -> Any:
    """Return an argument in float64 on the CPU."""
    if isinstance(argument, torch.dtype):
        return torch.float64
    return argument.detach().cpu().double() if isinstance(argument, torch.Tensor) else argument


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return relative_l2_error(actual.double().cpu().numpy(), expected.double().cpu().numpy())


def values(name: str, device: str) -> str:
    """Compare the kernels with the fallback in float64."""
    worst = 0.0
    for dtype, limit in LIMITS.items():
        for arguments in calls(name, RandomTensors(device, dtype)):
            expected = as_list(registration.FALLBACKS[name](*map(wide, arguments)))
            for output, reference in zip(as_list(operator(name)(*arguments)), expected, strict=True):
                assert output.shape == reference.shape, f"{output.shape} instead of {reference.shape}"
                worst = max(worst, relative_error(output, reference) / limit)
    assert worst < 1, f"{worst:.2f} of the error limit"
    return f"{worst:.2f} of the error limit; {call_counts(name)}"


def call_counts(name: str) -> str:
    counts = status()
    fallbacks = [f"{count} by torch: {why}" for (other, why), count in counts.fallbacks.items() if other == name]
    return ", ".join([f"{counts.kernels.get(name, 0)} calls by sd_ort kernels", *fallbacks])


def gradients(name: str, device: str) -> str:
    """Compare the gradients with those of the fallback in float64."""
    worst = 0.0
    for arguments in calls(name, RandomTensors(device, torch.float32, grad=True)):
        leaves = [a for a in arguments if isinstance(a, torch.Tensor) and a.is_leaf]
        if len(leaves) < sum(isinstance(a, torch.Tensor) for a in arguments):
            continue  # views of one tensor
        wide_arguments = [wide(a).requires_grad_() if isinstance(a, torch.Tensor) else wide(a) for a in arguments]
        wide_leaves = [a for a in wide_arguments if isinstance(a, torch.Tensor)]
        actual = torch.autograd.grad(square_sum(operator(name)(*arguments)), leaves)
        expected = torch.autograd.grad(square_sum(registration.FALLBACKS[name](*wide_arguments)), wide_leaves)
        worst = max(worst, *map(relative_error, actual, expected))
    assert worst < 1e-4, f"error {worst:.1e}"
    return f"error {worst:.1e}"


def square_sum(result: Any) -> torch.Tensor:
    """Return the sum of the squares of all elements of the results."""
    return torch.stack([tensor.square().sum() for tensor in as_list(result)]).sum()


def tracing(name: str, device: str) -> str:
    """Run torch's own checks of schema and tracing."""
    arguments = next(calls(name, RandomTensors(device, torch.float16)))
    torch.library.opcheck(operator(name), arguments, test_utils=("test_schema", "test_faketensor"))
    return "opcheck"


def stream() -> str:
    """Check that a call on a side stream runs after the work that was queued on that stream before."""
    d = RandomTensors("cuda", torch.float16)
    x, bias, skip = d(64, 1024, 1024), d(1024), d(64, 1024, 1024)
    expected = x * 2 + bias + skip
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(50):
            x.mul_(1.0)
        x.mul_(2.0)
        output = operators.bias_add(x, bias, skip)
    torch.cuda.synchronize()
    assert relative_error(output, expected) < LIMITS[torch.float16]
    return "runs in order on a side stream"


def cuda_graph() -> str:
    """Check that a captured call replays with new inputs."""
    d = RandomTensors("cuda", torch.float16)
    x, gamma, beta = d.image(2, 64, 16, 16), d(64), d(64)
    with torch.cuda.stream(torch.cuda.Stream()):
        operators.group_norm(x, gamma, beta, 8, 1e-5, silu=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = operators.group_norm(x, gamma, beta, 8, 1e-5, silu=True)
    x.copy_(d.image(2, 64, 16, 16))
    graph.replay()
    expected = registration.FALLBACKS["group_norm"](*map(wide, (x, gamma, beta)), 8, 1e-5, True)
    assert relative_error(y, expected) < LIMITS[torch.float16]
    return "a replay reads new inputs"


def autocast() -> str:
    """Check that MatMul runs in the autocast dtype and norms in float32."""
    d = RandomTensors("cuda", torch.float32)
    with torch.autocast("cuda", torch.bfloat16):
        product = operators.linear_add(d(4, 8), d(8, 8), d(8), d(4, 8))
        norm = operators.group_norm(d(2, 8, 4).half(), d(8), d(8), 2, 1e-5)
    assert (product.dtype, norm.dtype) == (torch.bfloat16, torch.float32)
    return "dtypes as torch's"


def two_devices() -> str:
    """Check that tensors of two devices raise an error of one line."""
    d = RandomTensors("cuda", torch.float32)
    message = ""
    try:
        operators.bias_add(d(2, 8), d(8).cpu(), d(2, 8))
    except RuntimeError as error:
        message = str(error)
    assert len(message.splitlines()) == 1, f"the message is {message!r}"
    return message


def captured_unet() -> str:
    """Compare captured calls of a UNet with the same model without graphs, both with Winograd convolutions."""
    winograd.MIN_PIXELS = winograd.MIN_SAVING = 0
    model: Any = random_module("sd15-tiny", "unet").half()
    model = optimize(model, "performance")
    uncaptured = optimize(copy.deepcopy(model), "performance", graph=False)
    reset_status()

    def compare(seed: int, size: int = 16, prompt: torch.Tensor | None = None) -> None:
        d = RandomTensors("cuda", torch.float16)
        sample, context = d(2 + seed, 4, size, size)[seed:], d(2 + seed, 7, model.config.cross_attention_dim)[seed:]
        context = context if prompt is None else prompt
        output, expected = (unet(sample, 100 * seed, context).sample for unet in (model, uncaptured))
        error = relative_error(output, expected)
        assert error < LIMITS[torch.float16], f"error {error:.1e} in call {seed}"

    with torch.no_grad():
        for seed in range(4):
            compare(seed)
        with torch.cuda.stream(torch.cuda.Stream()):
            compare(4)
            compare(5, size=24)
            compare(6, size=24)
        with ThreadPoolExecutor(1) as other:
            other.submit(torch.no_grad()(compare), 7).result()
        for unet in (model, uncaptured):
            unet.conv_in.weight.mul_(1.5)  # in place: the graph reads it
        compare(8)
        assert status().graphs[type(model).__name__, "captured"] == 2
        for unet in (model, uncaptured):
            unet.conv_out.weight.data = unet.conv_out.weight.data * 1.5  # another address: captured again
        compare(9)
        compare(10)
        compare(11)
        prompt = RandomTensors("cuda", torch.float16)(2, 7, model.config.cross_attention_dim)
        for seed in (12, 13, 14):
            compare(seed, prompt=prompt)
        prompt.mul_(1.5)  # tensors derived from it are recomputed
        compare(15, prompt=prompt)
        for unet in (model, uncaptured):
            unet.mid_block.resnets[0].conv1.weight.mul_(1.5)  # in place: its filters are recomputed
        compare(16, prompt=prompt)
    counts = {event: count for (_, event), count in status().graphs.items()}
    assert counts == {"captured": 3, "replayed": 14, "replayed for the same prompt": 3}, str(counts)
    assert not status().not_captured, str(status())
    return "captured 3 times, replayed 14 times, 3 of these for the same prompt"


def cached_filters() -> str:
    """Compare a resnet block whose weights change, on two streams, with float64."""
    if not kernels.is_hopper_or_newer(torch.device("cuda", 0)):
        return "not on this GPU"
    block: Any = ResnetBlock2D(in_channels=448, out_channels=448, temb_channels=None).half().cuda()
    optimize(block, "performance")
    reset_status()
    x, worst = RandomTensors("cuda", torch.float16).image(2, 448, 17, 16), 0.0
    streams = [torch.cuda.default_stream(), torch.cuda.Stream()]
    with torch.no_grad():
        for call in range(4):
            streams[call % 2].wait_stream(streams[call % 2 - 1])
            with torch.cuda.stream(streams[call % 2]):
                output = block(x, None)
                expected = restore(copy.deepcopy(block)).cpu().double()(wide(x), None)
                worst = max(worst, relative_error(output, expected))
                if call > 0:
                    block.conv1.weight.mul_(1.5)
    counts = {name: status().kernels[name] for name in ("nhwc_winograd", "winograd_filters")}
    assert counts == {"nhwc_winograd": 8, "winograd_filters": 4}, f"{counts}; {status().fallbacks}"
    assert worst < LIMITS[torch.float16], f"error {worst:.1e}"
    return f"error {worst:.1e}, filters computed 4 times in 4 calls of 2 convolutions"


def demo_images(device: str = "cuda") -> str:
    """Compare images of the demo pipeline in float32 for three prompts, with and without `optimize`."""
    pipeline = torch_pipeline("demo").to(device)
    pipeline.set_progress_bar_config(disable=True)

    def generate() -> list[Any]:
        generator = torch.Generator().manual_seed(0)
        prompts = ("a red circle", "a green square", "a blue circle")
        return [pipeline(p, num_inference_steps=6, output_type="np", generator=generator).images for p in prompts]

    before = generate()
    optimize(pipeline, "performance")
    reset_status()
    worst = min(psnr(a, b) for a, b in zip(before, generate(), strict=True))
    assert worst >= 60, f"{worst:.1f} dB"
    return f"{worst:.1f} dB; " + ", ".join(f"{event} {count} times" for (_, event), count in status().graphs.items())


if __name__ == "__main__":
    sys.exit(main())
