"""Run diffusers' own pipeline tests on sd-ort's pipelines, and write a page of the result.

    git clone https://github.com/huggingface/diffusers CHECKOUT   # at the tag of the installed version
    python scripts/checks/diffusers_tests.py --diffusers CHECKOUT results/diffusers_tests.md

Every test runs twice: on diffusers, and with diffusers' classes replaced by sd-ort's, which export the test's torch
components. A test passes if its own asserts hold, and if each image that its pipelines return has 60 dB or more to the
one that diffusers returned in the same place. A test that fails on diffusers too, since its expected values need
files of the hub, is judged by these images alone. Tests whose names have an entry in NOT_RUN do not run. Beside the
page, a JSON file has the verdict of each test; tests that this run leaves out keep theirs. The command fails if a test
fails without an entry in REASONS. The tests import `parameterized` and `requests_mock`, some schedulers `scipy`.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import multiprocessing
import os
import re
import sys
import tempfile
import warnings
from collections import Counter
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from scripts.report import table
from sd_ort.core.files import write_json

TESTS = """stable_diffusion/test_stable_diffusion stable_diffusion/test_stable_diffusion_img2img
stable_diffusion/test_stable_diffusion_inpaint stable_diffusion_2/test_stable_diffusion
stable_diffusion_2/test_stable_diffusion_inpaint stable_diffusion_2/test_stable_diffusion_v_pred
stable_diffusion_xl/test_stable_diffusion_xl stable_diffusion_xl/test_stable_diffusion_xl_img2img
stable_diffusion_xl/test_stable_diffusion_xl_inpaint controlnet/test_controlnet controlnet/test_controlnet_img2img
controlnet/test_controlnet_inpaint controlnet/test_controlnet_inpaint_sdxl controlnet/test_controlnet_sdxl
controlnet/test_controlnet_sdxl_img2img latent_consistency_models/test_latent_consistency_models
latent_consistency_models/test_latent_consistency_models_img2img pag/test_pag_sd pag/test_pag_sd_img2img
pag/test_pag_sd_inpaint pag/test_pag_sdxl pag/test_pag_sdxl_img2img pag/test_pag_sdxl_inpaint pag/test_pag_controlnet_sd
pag/test_pag_controlnet_sd_inpaint pag/test_pag_controlnet_sdxl pag/test_pag_controlnet_sdxl_img2img
ip_adapters/test_ip_adapter_stable_diffusion""".split()
LORA_TESTS = ["lora/test_lora_layers_sd.py", "lora/test_lora_layers_sdxl.py"]
MIN_PSNR = 60.0  # dB
TINY_CLIP, TINY_TEXT_ENCODER = "hf-internal-testing/tiny-random-clip", "peft-internal-testing/tiny-clip-text-2"
# Why tests do not apply, by a regular expression for their names. They do not run.
NOT_RUN = {
    r"dtype|layerwise_casting|with_(incorrect_)?variants|float16|fp16|bfloat16": "a folder has one precision, which "
    "`sd-ort optimize` chooses",
    "ip_adapter|test_pipeline_signature": "sets torch attention processors, or requires diffusers' IPAdapterMixin as a "
    "base class; IP-Adapters are part of the graph, see tests/pipelines",
    "device_map|offload|to_device": "a pipeline has one provider",
    "optional_components|isolation|test_components_function": "makes a pipeline of some components; a folder has all",
    "test_save_load_local": "reads the log of diffusers' loader",
    "xformers|test_attention_slicing": "attention is fused in the graph",
    "freeu": "FreeU changes the graph, which is fixed at export",
    "multi_vae|tiny_autoencoder": "replaces the VAE by a torch module after loading",
    "from_pipe": "from_pipe shares sessions, whose components no test can replace",
}
# Why a test that fails does not apply, by a regular expression for its name and message.
REASONS = {
    "denoised": "`denoised` is an intermediate result of LCMScheduler, which a linear schedule has not",
    "test_latents_input": "replaces `image_processor`; images are always resized and normalized",
    "strength_zero": "raises InputError, not ValueError",
    r"Model.__call__\(\)": "calls the text encoder as a torch module; encode_prompt does the same",
    "long_prompt": "reads diffusers' log; sd-ort warns in its own",
    "mixture_of_denoiser": "counts calls of the scheduler's step, which a linear schedule does not make",
    "_encode_vae_image|attn_processors": "reads private methods or torch's attention processors",
    "_lora_loadable_modules|add_adapter|test_get_adapters": "adds LoRAs to torch modules with PEFT; "
    "tests/pipelines/test_lora_parity.py compares what is loaded",
    "height_width_opt": "replaces the UNet by a torch module after loading",
    "no_lora_keys_found": "raises InputError for a file without a LoRA, which diffusers logs",
    "save_from_pretrained": "removes the folder of a pipeline before its first call",
    "TestStableDiffusionInpaintPipeline.*(dB|close)": "encodes a constant image, one channel a group: no variance "
    "and rounding errors decide; with a mask of both colors 129 dB",
}
VERDICTS = ("passes", "equal images", "does not apply", "skipped by diffusers", "fails in diffusers", "fails")


@dataclass
class Result:
    """`outcome`: passed, failed, skipped or left out. `message`: the end of the failure, or why it did not run."""

    outcome: str = ""
    message: str = ""
    images: list[np.ndarray] = field(default_factory=list)


# --- One run of all tests, in a process of its own --------------------------------------------------------------------


class Recorder:
    """pytest plugin that keeps the result of each test and the images that pipelines returned in it."""

    def __init__(self) -> None:
        self.results: dict[str, Result] = {}
        self.current = Result()

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        """Leave out the tests of NOT_RUN."""
        reasons = {item: matching_reason(item.name, NOT_RUN) for item in items}
        for item, reason in reasons.items():
            if reason is not None:
                self.results[item.nodeid.removeprefix("tests/")] = Result("left out", reason)
        items[:] = [item for item, reason in reasons.items() if reason is None]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.current = self.results[nodeid.removeprefix("tests/")] = Result()

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.current.outcome = report.outcome
        if hasattr(report, "wasxfail"):
            self.current.message = f"expected to fail: {report.wasxfail}"
        elif report.skipped:
            self.current.message = str(report.longrepr[2]).removeprefix("Skipped: ")
        elif report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self.current.message = " ".join(str(crash.message if crash else report.longrepr).split())

    def recorded(self, call: Any) -> Any:
        """Return a pipeline's `__call__` that records the returned images."""

        @functools.wraps(call)
        def recording_call(pipeline: Any, *arguments: Any, **named: Any) -> Any:
            output = call(pipeline, *arguments, **named)
            images = output[0]
            self.current.images.append(np.asarray(images if hasattr(images, "shape") else [*map(np.asarray, images)]))
            return output

        return recording_call


def run(on_sd_ort: bool, checkout: Path, tests: list[str], keyword: str, cache: Path) -> dict[str, Result]:
    """Run the tests on one of the two, and return their results by node id."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    import diffusers
    import pytest
    import torch

    from scripts.fixtures.parity_pairs import FAMILIES
    from sd_ort.runtime.session import OrtModel

    torch.set_num_threads(1)
    use_stand_ins(cache / "tokenizer")
    OrtModel.set_default_attn_processor = lambda _: None  # type: ignore[attr-defined]  # which tests call first
    recorder = Recorder()
    for kind in FAMILIES:
        theirs = getattr(diffusers, kind)
        theirs.__call__ = recorder.recorded(theirs.__call__)
        if on_sd_ort:
            setattr(diffusers, kind, stand_in(theirs, recorder, cache))
    os.chdir(checkout)
    files = [str(checkout / "tests" / test) for test in tests]
    pytest.main(["-q", "--tb=short", "-p", "no:cacheprovider", "-k", keyword, *files], plugins=[recorder])
    return recorder.results


def use_stand_ins(folder: Path) -> None:
    """Replace files of the hub, for tests without a network.

    Tokenizers of 1,000 tokens become one whose tokens are bytes; text encoders of the LoRA tests get random weights.
    """
    import torch
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

    from sd_ort.checkpoints.random_weights import write_byte_tokenizer

    folder.mkdir(exist_ok=True)
    write_byte_tokenizer(folder, 1000)
    load_tokenizer = CLIPTokenizer.from_pretrained

    def tokenizer(name: Any, *arguments: Any, **options: Any) -> Any:
        return load_tokenizer(folder if name in (TINY_CLIP, TINY_TEXT_ENCODER) else name, *arguments, **options)

    CLIPTokenizer.from_pretrained = tokenizer
    sizes = dict.fromkeys(("hidden_size", "projection_dim"), 32) | {"intermediate_size": 64, "vocab_size": 1000}
    config = CLIPTextConfig(**sizes, num_attention_heads=4, num_hidden_layers=2, bos_token_id=0, eos_token_id=2)
    for cls in (CLIPTextModel, CLIPTextModelWithProjection):

        def encoder(name: Any, *_: Any, cls: Any = cls, load: Any = cls.from_pretrained, **options: Any) -> Any:
            if name != TINY_TEXT_ENCODER:
                return load(name, **options)
            torch.manual_seed(0)
            return cls(config).eval()

        cls.from_pretrained = encoder


def stand_in(theirs: Any, recorder: Recorder, cache: Path) -> type:
    """Return sd-ort's class of diffusers' name, which can be made of torch components too, as diffusers' can."""
    import sd_ort

    ours = getattr(sd_ort, theirs.__name__)

    def initialize(pipeline: Any, *arguments: Any, **options: Any) -> None:
        if arguments:
            ours.__init__(pipeline, *arguments, **options)
            return
        source = theirs(**options)
        nets = getattr(getattr(source, "controlnet", None), "nets", None)  # several ControlNets, an export for each
        sources = [theirs(**{**options, "controlnet": net}) for net in nets] if nets else [source]
        folders = [exported(each, cache) for each in sources]
        extra = {"controlnet": folders} if nets else {}
        opened = ours.from_pretrained(folders[0], "cpu", source.scheduler, threads=1, safety_checker=False, **extra)
        vars(pipeline).update(vars(opened))
        if hasattr(source, "pag_applied_layers"):
            pipeline.set_pag_applied_layers(source.pag_applied_layers)

    initialize = functools.wraps(theirs.__init__)(initialize)
    call = recorder.recorded(ours.__call__)
    return type(ours.__name__, (ours,), {"__init__": initialize, "__call__": call, "__module__": ours.__module__})


def exported(source: Any, cache: Path) -> Path:
    """Return the export of a diffusers pipeline, one for all pipelines of the same class and weights."""
    import sd_ort
    from sd_ort.core.files import code_hash
    from sd_ort.export.exporter import export

    code = code_hash(*(Path(str(sd_ort.__file__)).parent / part for part in ("checkpoints", "export")))

    with tempfile.TemporaryDirectory() as folder:
        source.save_pretrained(folder)
        digest = hashlib.sha256(code.encode())
        for file in sorted(Path(folder).rglob("*")):
            if file.is_file() and "scheduler" not in str(file):
                digest.update(file.name.encode() + file.read_bytes())
        out = cache / digest.hexdigest()[:20]
        if not out.is_dir():
            export(folder, out, exporter="torchscript")
    return out


def matching_reason(text: str, table: dict[str, str]) -> str | None:
    """Return the reason of the first regular expression in `table` that `text` has; None without one."""
    return next((reason for pattern, reason in table.items() if re.search(pattern, text)), None)


# --- Both runs, compared ----------------------------------------------------------------------------------------------


def verdict(ours: Result, theirs: Result) -> tuple[str, str]:
    """Return the verdict of one test, and its reason."""
    if theirs.outcome == "left out":
        return "does not apply", theirs.message
    if theirs.outcome == "skipped":
        return "skipped by diffusers", theirs.message
    if theirs.outcome == "failed" and not theirs.images:
        return "fails in diffusers", short(theirs.message)
    each = [similarity(*pair) for pair in zip(ours.images, theirs.images, strict=False)]
    least = min(each, default=np.inf)
    equal = least >= MIN_PSNR and len(ours.images) == len(theirs.images)
    if equal and ours.outcome == theirs.outcome:
        return "passes" if ours.outcome == "passed" else "equal images", ""
    different = ", ".join(f"image {i + 1} {psnr:.1f} dB" for i, psnr in enumerate(each) if psnr < MIN_PSNR)
    return "fails", short(ours.message) or f"{len(ours.images)} of {len(theirs.images)} images; {different}"


def short(message: str) -> str:
    """Return the start of a message for a cell of the page, without temporary folders."""
    return re.sub(r"/tmp/\S+", "a folder", message)[:160].replace("|", "/")


def similarity(image: np.ndarray, other: np.ndarray) -> float:
    """Return the PSNR of two images or latents, in dB, with a peak of 1 or the largest magnitude."""
    if image.shape != other.shape:
        return 0.0
    difference = np.sqrt(np.mean((image.astype(np.float64) - other) ** 2))
    peak = max(1.0, float(np.abs(other).max(initial=0)))
    return float(20 * np.log10(peak / difference)) if difference else np.inf


def main() -> None:
    """Run the tests twice and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--diffusers", type=Path, metavar="CHECKOUT")
    parser.add_argument(
        "--join", nargs="+", type=Path, default=[], metavar="RECORD", help="JSON files of other runs; nothing is run"
    )
    parser.add_argument("--cache", type=Path, help="folder that keeps the exports")
    parser.add_argument("--tests", nargs="+", default=[*(f"pipelines/{test}.py" for test in TESTS), *LORA_TESTS])
    parser.add_argument("-k", dest="keyword", default="", help="as pytest's")
    parser.add_argument("--processes", type=int, default=2, choices=(1, 2), help="1 runs diffusers first, then sd-ort")
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    if options.diffusers is None and not options.join:
        parser.error("give --diffusers, or --join.")
    results = [] if options.join else run_both(options)
    record = options.out.with_suffix(".json")
    rows: dict[str, list[str]] = json.loads(record.read_text()) if record.is_file() else {}
    for other in options.join:
        rows |= json.loads(other.read_text())
    for name, theirs in results[0].items() if results else ():
        rows[name] = list(verdict(results[1].get(name, Result()), theirs))
    for name, (kind, reason) in rows.items():
        if kind == "fails" and (explanation := matching_reason(f"{name} {reason}", REASONS)):
            rows[name] = ["does not apply", explanation]
    write_json(record, dict(sorted(rows.items())))
    counts = Counter(kind for kind, _ in rows.values())
    options.out.write_text(page(rows))
    print(dict(counts))
    if counts["fails"]:
        sys.exit(f"{counts['fails']} tests fail: see {options.out}.")


def run_both(options: argparse.Namespace) -> list[dict[str, Result]]:
    """Return the results of the tests on diffusers and on sd-ort."""
    with tempfile.TemporaryDirectory() as folder:
        cache = (options.cache or Path(folder)).resolve()
        cache.mkdir(exist_ok=True)
        common = options.diffusers.resolve(), options.tests, options.keyword, cache
        with multiprocessing.get_context("spawn").Pool(options.processes, maxtasksperchild=1) as processes:
            return processes.starmap(run, [(False, *common), (True, *common)], chunksize=1)


def page(rows: dict[str, list[str]]) -> str:
    """Return the page: verdicts by class, and each reason once with its tests."""
    counts = Counter(kind for kind, _ in rows.values())
    text = HEAD.format(**{name: version(name) for name in ("diffusers", "torch", "transformers")})
    text += ", ".join(f"{counts[kind]} {kind}" for kind in VERDICTS) + ".\n\n"
    classes: dict[str, Counter[str]] = {}
    for name, (kind, _) in sorted(rows.items()):
        classes.setdefault(name.rpartition("::")[0].removeprefix("pipelines/"), Counter())[kind] += 1
    rows_by_class = ((group, *(kinds[kind] for kind in VERDICTS)) for group, kinds in classes.items())
    text += "\n".join(table(("class", *VERDICTS), rows_by_class)) + "\n"
    reasons: dict[tuple[str, str], Counter[str]] = {}
    for name, (kind, reason) in sorted(rows.items()):
        if reason and not kind.startswith("skipped"):
            reasons.setdefault((kind, reason), Counter())[re.sub(r"\[.*", "", name.rpartition("::")[2])] += 1
    rows_by_reason = (
        (kind, reason, ", ".join(f"{test} ({count})" if count > 1 else test for test, count in tests.items()))
        for (kind, reason), tests in sorted(reasons.items())
    )
    text += "\n" + "\n".join(table(("verdict", "reason", "tests"), rows_by_reason)) + "\n"
    return text


HEAD = """# diffusers' own tests

By `scripts/checks/diffusers_tests.py` on a CPU, with diffusers {diffusers}, torch {torch} and transformers
{transformers}: what each verdict means is said there. Classes without a row have not run.

"""

if __name__ == "__main__":
    main()
