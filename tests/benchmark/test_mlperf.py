"""MLPerf's load generator on a tiny model, its captions and scores."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny_pipeline
from cli_type import Cli, success
from PIL import Image

from sd_ort import demo
from sd_ort.benchmark import loadgen, mlperf, quality, replicas
from sd_ort.benchmark.loadgen import LoadGenSettings
from sd_ort.benchmark.quality import AccuracyWeights
from sd_ort.cli.benchmark import command
from sd_ort.core.errors import InputError, SdOrtError
from sd_ort.demo import scenes
from sd_ort.serving.image_jobs import BatchSettings, ImageJob, ModelInfo
from sd_ort.serving.replica import PipelineReplica, ReplicaConfig

SMALL = ("--torch", "none", "--steps", 1, "--height", 64, "--width", 64, "--threads", 1)


def numbered(numbers: Sequence[int]) -> list[np.ndarray]:
    return [np.full((2, 2, 3), number, np.uint8) for number in numbers]


@pytest.mark.parametrize("scenario", loadgen.SCENARIOS)
def test_each_scenario_generates_its_queries(scenario: str, tmp_path: Path) -> None:
    batches: list[Sequence[int]] = []

    def draw(numbers: Sequence[int]) -> list[np.ndarray]:
        batches.append(list(numbers))
        return numbered(numbers)

    most = 1 if scenario == "SingleStream" else 4
    report = loadgen.run(draw, LoadGenSettings(scenario, 8, most, 20, rate=500.0), tmp_path)
    assert sum(map(len, batches)) == report["queries"] == 20
    assert max(map(len, batches)) <= most
    assert {number for numbers in batches for number in numbers} <= set(range(8))
    assert 0 < report["latency_s"]["p50"] <= report["latency_s"]["p99"] <= report["latency_s"]["max"]
    assert ("images_per_s" in report) == (scenario != "SingleStream")
    assert "MLPerf Results Summary" in (tmp_path / "mlperf_log_summary.txt").read_text()


def test_the_accuracy_run_logs_every_image_once(tmp_path: Path) -> None:
    loadgen.run(numbered, LoadGenSettings("Offline", 5, 2, 5, accuracy=True), tmp_path)
    logged = json.loads((tmp_path / "mlperf_log_accuracy.json").read_text())
    assert {entry["qsl_idx"]: bytes.fromhex(entry["data"]) for entry in logged} == {
        number: bytes([number]) * 12 for number in range(5)
    }


def test_no_batch_has_a_size_that_was_not_warmed_up() -> None:
    sizes: list[int] = []

    def run_batch(_: object, size: int, prompts: Sequence[str], __: int) -> tuple[dict[str, Any], None]:
        sizes.append(size)
        return {"images": numbered([int(prompt) for prompt in prompts])}, None

    worker: Any = SimpleNamespace(call=run_batch)
    backend = mlperf.WorkerBackend(worker, [str(i) for i in range(9)], [4, 2])
    backend.warm_up()
    assert sizes == [1, 2, 4]
    assert [int(image[0, 0, 0]) for image in backend([8, 3, 5, 1, 0, 2, 7])] == [8, 3, 5, 1, 0, 2, 7]
    assert sizes == [1, 2, 4, 4, 2, 1]
    assert [int(image[0, 0, 0]) for image in backend([*range(9), 3])] == [*range(9), 3]
    assert sizes[6:] == [4, 2]  # two batches of four in one call, which overlap
    assert backend.mean_batch() == pytest.approx(17 / 6)


def test_an_engine_that_fails_ends_the_run(tmp_path: Path) -> None:
    calls = threading.Semaphore(2)

    def draw(numbers: Sequence[int]) -> list[np.ndarray]:
        if not calls.acquire(blocking=False):
            raise SdOrtError("out of memory")
        return numbered(numbers)

    with pytest.raises(SdOrtError, match="out of memory"):
        loadgen.run(draw, LoadGenSettings("Server", 4, 1, 30, rate=1000.0), tmp_path)


def test_the_rules_are_mlperfs(tmp_path: Path) -> None:
    (tmp_path / "user.conf").write_text("*.Server.target_qps = 2.5\n")
    rules = loadgen.read_rules(str(tmp_path / "user.conf"), "Server")
    assert rules["server_target_latency_ns"] == 20_000_000_000  # SDXL: 20 s
    assert rules["min_duration_ms"] == 600_000
    assert rules["performance_sample_count_override"] == 5000
    assert rules["server_target_qps"] == 2.5


def test_mlperf_of_a_tiny_model(sd_ort: Cli, small_export: Path, tmp_path: Path) -> None:
    loads = ("--mlperf", "--calls", 2, "--queries", 4, "--server-load", 0.5, "--batch", "1,2", "--accuracy")
    table = success(sd_ort, "benchmark", small_export, *loads, *SMALL, "--out", tmp_path)
    report = json.loads((tmp_path / "mlperf.json").read_text())
    (row,) = report["engines"]
    assert row["status"] == "ok"
    assert (row["Offline"]["batch"], row["Offline"]["queries"]) == (2, 4)
    assert row["Server"]["rate_per_s"] == pytest.approx(row["Offline"]["images_per_s"] / 2)
    assert "not a valid MLPerf result" in table
    assert "SingleStream" in (tmp_path / "report.html").read_text()
    logs = tmp_path / "mlperf" / "1"
    assert all((logs / name / "mlperf_log_detail.txt").is_file() for name in (*loadgen.SCENARIOS, "accuracy"))
    record = json.loads((tmp_path / "sd_ort_files.json").read_text())
    assert {path.relative_to(tmp_path).as_posix() for path in logs.rglob("*") if path.is_file()} <= set(record)
    (logs / "Server" / "mlperf_log_detail.txt").write_text("mine")
    code, _, err = sd_ort("benchmark", small_export, *loads, *SMALL, "--out", tmp_path)
    assert (code, "mlperf_log_detail.txt was not written by sd-ort, or changed" in err) == (5, True)


class Here:
    """Replicas in threads of this process, where `RayCluster` has Ray's (which tests/serving starts)."""

    def __init__(self, openings: Sequence[ReplicaConfig]) -> None:
        self.replicas = [SimpleNamespace(name=str(index), stop=lambda: None, is_alive=lambda: True)
                         for index, _ in enumerate(openings)]  # fmt: skip
        for each, opening in zip(self.replicas, openings, strict=True):
            each.start, each.generate = partial(self.start, each, opening), partial(self.generate, each)
        self.drawing: set[str] = set()

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *_: object) -> None:
        self.replicas.clear()

    async def start(self, each: SimpleNamespace, opening: ReplicaConfig) -> ModelInfo:
        each.replica = PipelineReplica(opening)  # one after another: diffusers cannot be imported twice at once
        return each.replica.model

    async def generate(self, each: SimpleNamespace, jobs: Sequence[ImageJob]) -> list[bytes]:
        self.drawing.add(each.name)
        return await asyncio.to_thread(each.replica.generate, jobs)


def test_mlperf_of_replicas(sd_ort: Cli, tmp_path: Path, one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each image of the accuracy run is that of one pipeline alone, to the byte."""
    clusters: list[Here] = []
    monkeypatch.setattr(replicas, "RayCluster", lambda openings: clusters.append(Here(openings)) or clusters[0])
    folder = tiny_pipeline.write(tmp_path / "toy")
    flags = ("--mlperf", "--replicas", 2, "--queries", 5, "--batch", "1,2", "--accuracy", "--steps", 2, "--guidance", 7)
    success(sd_ort, "benchmark", folder, *flags, "--out", tmp_path / "out")
    assert clusters[0].drawing == {"0", "1"}
    report = json.loads((tmp_path / "out" / "mlperf.json").read_text())
    assert report["mlperf"]["replicas"] == 2
    (row,) = report["engines"]
    assert [row[name]["queries"] for name in loadgen.SCENARIOS] == [5, 5, 5]
    assert row["SingleStream"]["mean_batch"] == 1 <= row["Offline"]["mean_batch"] <= 2
    prompts = mlperf.prompts_for(row["model"], 5, 0)
    alone = PipelineReplica(ReplicaConfig(folder, {"provider": "cpu", "threads": 1}))
    logged = json.loads((tmp_path / "out" / "mlperf" / "1" / "accuracy" / "mlperf_log_accuracy.json").read_text())
    assert sorted(entry["qsl_idx"] for entry in logged) == list(range(5))
    for entry in logged[:2]:
        number = entry["qsl_idx"]
        (file,) = alone.generate([ImageJob(prompts[number], "", number, BatchSettings(None, None, 2, 7.0))])
        assert bytes.fromhex(entry["data"]) == np.asarray(Image.open(io.BytesIO(file))).tobytes()


def test_replicas_that_cannot_be(sd_ort: Cli, tmp_path: Path) -> None:
    folder = tiny_pipeline.write(tmp_path / "toy")
    for wrong, words in (
        (("--replicas", 2), "--replicas goes with --mlperf"),
        (("--mlperf", "--profile"), "exclude each other"),
        (("--mlperf", "--gpus", 2), "takes no --gpus"),
        (("--mlperf", "--replicas", 2, "--gpus", 2), "pass one"),
        (("--mlperf", "--replicas", 2, "--torch", "demo"), "not torch eager"),
    ):
        code, _, error = sd_ort("benchmark", folder, *wrong, "--provider", "cpu", "--out", tmp_path / "out")
        assert (code in (2, 3), words in error, error.strip().count("\n")) == (True, True, 0), error
    assert not (tmp_path / "out").exists()


def test_old_name_of_server_load_is_read() -> None:
    for name in ("--server-load", "--load"):
        assert command.make_context("benchmark", ["DIR", name, "0.5"]).params["server_load"] == 0.5


def test_official_is_for_sdxl(sd_ort: Cli, small_export: Path, tmp_path: Path) -> None:
    code, _, error = sd_ort("benchmark", small_export, "--mlperf", "--official", *SMALL, "--out", tmp_path)
    assert code == 2
    assert "leave out --official" in error
    assert not (tmp_path / "mlperf.json").exists()


def test_captions(tmp_path: Path) -> None:
    coco = {"annotations": [{"image_id": 7, "id": 1, "caption": "A cat.\n"}, {"image_id": 7, "id": 2, "caption": "No."},
                            {"image_id": 8, "id": 3, "caption": "Two  dogs"}]}  # fmt: skip
    files = {
        "a.json": json.dumps(coco),
        "b.tsv": "id\tcaption\n1\tA cat.\n2\tTwo dogs\n",
        "c.txt": "A cat.\n\nTwo dogs\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        assert sorted(mlperf.read_captions(tmp_path / name)) == ["A cat.", "Two dogs"]


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.json", "[]"), ("a.json", '{"annotations": [1]}'), ("a.json", "{"), ("a.tsv", "a\tb\n1\t2\n"), ("a.txt", "\n"),
     ("a.txt", "x" * 3000), ("a.json", '{"annotations": [{"image_id": 1, "caption": 5}]}')],
)  # fmt: skip
def test_captions_that_are_none(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match="captions"):
        mlperf.read_captions(tmp_path / name)
    with pytest.raises(InputError, match=r"nowhere\.txt cannot be read: No such file or directory\."):
        mlperf.read_captions(tmp_path / "nowhere.txt")


def test_scores_that_cannot_be_had_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = np.zeros((128, 128, 3), np.uint8)
    scores = quality.scores("sd15", ["a dog"], {0: image}, AccuracyWeights())
    assert "demo" in scores["fidelity_percent"]
    assert "--accuracy-weights DIR with clip/" in scores["clip_score"]
    assert "inception.pth and val2014.npz" in scores["fid"]
    assert quality.scores("demo", scenes.unseen_prompts(1), {0: image}, AccuracyWeights())["fidelity_percent"] == 0.0
    np.savez(tmp_path / "stats.npz", mu=np.zeros(2), sigma=np.eye(2))
    inception = tmp_path / "inception.pth"
    for weights, message in (
        (AccuracyWeights(clip=tmp_path), "holds no CLIP model"),
        (AccuracyWeights(inception=inception), "FID needs both"),
        (AccuracyWeights(fid_stats=tmp_path / "x"), "FID needs both"),
        (AccuracyWeights(inception=inception, fid_stats=tmp_path / "stats.npz"), "inception.pth is missing"),
    ):
        with pytest.raises(InputError, match=message):
            weights.check()
    inception.touch()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "torch_fidelity" else name)
    with pytest.raises(InputError, match=r"torch_fidelity is not installed: pip install torch-fidelity"):
        AccuracyWeights(inception=inception, fid_stats=tmp_path / "stats.npz").check()


def test_a_folder_of_weights(sd_ort: Cli, tmp_path: Path) -> None:
    """Each file is found by its name, in part too; wrong folders and options that contradict it are refused."""
    (tmp_path / "weights" / "clip").mkdir(parents=True)
    folder, pipeline = tmp_path / "weights", tiny_pipeline.write(tmp_path / "toy")
    assert AccuracyWeights.from_folder(folder) == AccuracyWeights(clip=folder / "clip")
    for name in ("inception.pth", "val2014.npz"):
        (folder / name).touch()
    assert AccuracyWeights.from_folder(folder) == AccuracyWeights(
        folder / "clip", folder / "inception.pth", folder / "val2014.npz"
    )
    for options, message in (
        (("--mlperf", "--accuracy-weights", tmp_path), "has no weights for --accuracy-weights: put a CLIP model into"),
        (("--mlperf", "--accuracy-weights", folder, "--clip", folder), "has all of --clip, --inception"),
        (("--accuracy-weights", folder), "--accuracy-weights goes with --mlperf"),
    ):
        code, _, err = sd_ort("benchmark", pipeline, *options, "--provider", "cpu", "--out", tmp_path / "out")
        assert (code, err.count("\n")) == (2, 1), err
        assert message in err
    assert not (tmp_path / "out").exists()


def test_clip_score_of_a_random_model(tmp_path: Path) -> None:
    """100 times the mean cosine of the projected features of image and prompt, Hessel et al. 2021."""
    import torch
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTokenizer

    tokenizer = CLIPTokenizer.from_pretrained(demo.MODEL_DIR / "tokenizer")
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    widths = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(2)
    model = CLIPModel(
        CLIPConfig(
            text_config={**widths, **ids, "vocab_size": len(tokenizer)},
            vision_config={**widths, "image_size": 32, "patch_size": 16},
            projection_dim=8,
        )
    ).eval()
    processor = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=32)
    model.save_pretrained(tmp_path / "clip")
    CLIPProcessor(processor, tokenizer).save_pretrained(tmp_path / "clip")
    prompts = ["a red circle", "a large blue square above a green ring"]
    images = list(np.random.default_rng(1).integers(0, 256, (2, 32, 32, 3), dtype=np.uint8))
    cosines = []
    for prompt, image in zip(prompts, images, strict=True):
        pixels = (image / 255 - np.array(processor.image_mean)) / np.array(processor.image_std)
        with torch.no_grad():
            hidden = (
                model.text_model(torch.tensor([tokenizer(prompt).input_ids])).pooler_output,
                model.vision_model(torch.from_numpy(pixels.transpose(2, 0, 1)[None].astype(np.float32))).pooler_output,
            )
        projections = model.text_projection.weight, model.visual_projection.weight
        a, b = (w.detach().numpy() @ x[0].numpy() for w, x in zip(projections, hidden, strict=True))
        cosines.append(a @ b / np.sqrt((a @ a) * (b @ b)))
    expected = 100 * np.mean(cosines)
    weights = AccuracyWeights.from_folder(tmp_path)
    weights.check()
    actual = quality.scores("sd15", prompts, dict(enumerate(images)), weights)["clip_score"]
    assert expected > 1
    assert actual == pytest.approx(expected, rel=1e-4)


def test_fid_against_known_statistics(tmp_path: Path) -> None:
    """Frechet distance of two Gaussians: |m - n|^2 + tr(S + T - 2 (S T)^(1/2)), Heusel et al. 2017."""
    import torch

    class Means(torch.nn.Module):
        num_features = 3

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.double().mean((2, 3)) / 255

    rng = np.random.default_rng(0)
    images = [rng.integers(0, 256, (4, 4, 3), dtype=np.uint8) for _ in range(40)]
    features = np.stack([image.mean((0, 1)) / 255 for image in images])
    generated = features.mean(0), np.cov(features.T)
    photographs = np.array([0.4, 0.5, 0.7]), np.diag([0.02, 0.01, 0.03])
    np.savez(tmp_path / "stats.npz", mu=photographs[0], sigma=photographs[1])
    root = np.sqrt(np.linalg.eigvals(generated[1] @ photographs[1])).real.sum()
    expected = ((generated[0] - photographs[0]) ** 2).sum() + np.trace(generated[1] + photographs[1]) - 2 * root
    assert quality.fid(images, Means(), tmp_path / "stats.npz") == pytest.approx(expected, rel=1e-4)
