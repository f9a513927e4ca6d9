"""Vision towers and models that read images against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.models.image_checks import TEXT, Parts, check_bits, check_device, check_logprobs, kind_of, loaded
from tests.models.pictures import Picture, prompt_of
from tests.runner.drive import Driver, Job
from tests.tiny_families import VISION_FAMILIES
from tests.tiny_models import tiny_vision_config, write_checkpoint
from tokserve import checkpoint
from tokserve.base.errors import StartError
from tokserve.config import Config
from tokserve.features.images.features import FeatureTable
from tokserve.features.images.vision import decode_image
from tokserve.models.registry import decoder_spec
from tokserve.protocol.images import Grid
from tokserve.protocol.params import SamplingParams
from tokserve.runner.runner import Runner
from tokserve.runner.startup import load_runner


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_logprobs_are_transformers(family: str, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, tiny_vision_config(family))
    kind = kind_of(directory)
    one, wide, tall = Picture(kind, 4, 4, 1), Picture(kind, 2, 10, 2), Picture(kind, 6, 4, 3)
    check_logprobs(directory, [[*TEXT], [TEXT[0], one], [wide, TEXT[1]], [TEXT[0], one, TEXT[1], wide, tall, TEXT[2]]])


@pytest.mark.parametrize(
    ("dtype", "family"), [("float32", "qwen2_5_vl"), ("bfloat16", "qwen3_vl"), ("bfloat16", "qwen3_5")]
)
def test_images_have_the_same_bits_in_any_batch_and_chunk_and_after_preemption(
    dtype: str, family: str, tmp_path: Path
) -> None:
    directory = write_checkpoint(tmp_path, tiny_vision_config(family))
    kind = kind_of(directory)
    one, wide, tall = Picture(kind, 4, 4, 1), Picture(kind, 2, 10, 2), Picture(kind, 6, 4, 3)
    prompts: list[Parts] = [[TEXT[0], one], [wide, TEXT[1]], [TEXT[1], tall, TEXT[0], one, TEXT[2]], [*TEXT]]
    check_bits(directory, dtype, prompts, (1, 3, 7, 16))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", pytest.param("qwen3_5", marks=pytest.mark.slow)])
def test_a_device_of_its_own_gives_the_same_bits(family: str, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, tiny_vision_config(family))
    kind = kind_of(directory)
    one, wide = Picture(kind, 4, 4, 1), Picture(kind, 2, 10, 2)
    prompts: list[Parts] = [[TEXT[0], one, TEXT[2]], [*TEXT], [wide, TEXT[1], one]]
    check_device(directory, prompts, graphs=family != "qwen3_5")


def table_of(runner: Runner) -> FeatureTable:
    return next(feature for feature in runner.hooks.features if isinstance(feature, FeatureTable))


def test_an_image_is_encoded_once_until_weights_change(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, tiny_vision_config("qwen3_vl"))
    picture = Picture(kind_of(directory), 4, 6)
    runner, facts = load_runner(
        Config.make(
            model=str(directory),
            dtype="float32",
            device="cpu",
            max_model_len=128,
            max_num_seqs=16,
            block_size=16,
            cpu_threads=1,
        )
    )
    encoder = table_of(runner).encoder
    assert encoder is not None

    def run(count: int) -> list[list[int]]:
        ids, features = prompt_of([TEXT[0], picture, TEXT[1]], raw=True)
        params = SamplingParams(max_tokens=3, temperature=0.0)
        jobs = Driver(runner, facts, 16).run([Job(ids, params, features=features) for _ in range(count)])
        return [job.output for job in jobs]

    outputs = run(16)
    assert encoder.encoded == 1 and encoder.num_bytes == 3 * picture.length * 64 * 4
    table_of(runner).on_weights()
    assert run(2) == outputs[:2] and encoder.encoded == 2
    encoder.forget()
    for max_bytes, kept in ((3 * picture.length * 64 * 4, 1), (3 * picture.length * 64 * 4 - 1, 0)):
        encoder._max_bytes, encoder.encoded = max_bytes, 0
        assert run(1) == run(1) == outputs[:1] and encoder.encoded == 2 - kept
        encoder.forget()
    assert facts.feature_bytes["image"] == 0 and facts.images == picture.kind


def test_experts_as_transformers_saves_them(tmp_path: Path) -> None:
    """A model that it has not read from a released checkpoint has its tensors of all experts the other way round."""
    directory = write_checkpoint(tmp_path, tiny_vision_config("qwen3_vl_moe"))
    released = _outcome(directory)
    tensors = load_file(directory / "model.safetensors")
    turned = {
        name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor for name, tensor in tensors.items()
    }
    assert sum(turned[name].shape != tensors[name].shape for name in tensors) > 4
    save_file(turned, directory / "model.safetensors")
    assert _outcome(directory) == released


def _outcome(directory: Path) -> Any:
    runner, facts = loaded(directory, "float32", 1)
    params = SamplingParams(max_tokens=4, temperature=0.0, prompt_logprobs=0, logprobs=0)
    return Driver(runner, facts, 8).run([Job(TEXT[0], params)])[0].outcome()


def test_pixels_are_normalized_here_as_in_the_processor(tmp_path: Path) -> None:
    config = tiny_vision_config("qwen2_5_vl")
    directory = write_checkpoint(tmp_path, config)
    absent = kind_of(directory)
    (directory / "preprocessor_config.json").write_text(
        '{"image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28], "rescale_factor": 0.00392156862745098}'
    )
    kind = kind_of(directory)
    assert Qwen2VLImageProcessorPil.image_mean == list(absent.mean)
    assert Qwen2VLImageProcessorPil.image_std == list(absent.std)
    picture = Picture(kind, 2, 2)
    raw, exact = (decode_image(picture.feature(0, raw=raw).data, kind) for raw in (True, False))
    assert raw[1] == exact[1] == Grid(1, 2, 2) and (raw[0] == exact[0]).all()
    pixel = picture.pixels[1].reshape(3, 2, 8, 8)[2, 1, 4, 5]
    expected = (pixel / 255 - 0.41) / 0.28
    assert abs(raw[0][1].reshape(3, 2, 8, 8)[2, 1, 4, 5] - expected) < 1e-6


def test_a_model_without_its_tower_is_the_text_model(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, tiny_vision_config("qwen3_vl"))
    options = {"model": str(directory), "dtype": "float32", "device": "cpu", "max_model_len": 128, "cpu_threads": 1}
    outputs = []
    for overrides in (None, {"vision_config": None}):
        runner, facts = load_runner(Config.make(**options, max_num_seqs=4, block_size=16, hf_overrides=overrides))
        assert ("image" in facts.feature_bytes) == (overrides is None) == (runner.model.tower is not None)
        [job] = Driver(runner, facts, 4).run([Job(TEXT[2], SamplingParams(max_tokens=8, temperature=0.0))])
        outputs.append(job.output)
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"num_heads": 5}, "num_heads"),
        ({"out_hidden_size": 32}, "out_hidden_size"),
        ({"deepstack_visual_indexes": [0, 1, 2]}, "deepstack_visual_indexes"),
        ({"deepstack_visual_indexes": [9]}, "deepstack_visual_indexes"),
        ({"num_position_embeddings": 37}, "num_position"),
        ({"hidden_act": "tanh"}, "hidden_act"),
        ({"patch_size": 0}, "patch_size"),
        ({"depth": "four"}, "depth"),
    ],
)
def test_towers_that_cannot_be_built_are_refused(changes: dict[str, object], name: str) -> None:
    with pytest.raises(StartError, match=name):
        decoder_spec(checkpoint.flat(tiny_vision_config("qwen3_vl", **changes)))
