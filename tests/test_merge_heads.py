"""Heads that an adapter brings and its base lacks: classifiers and reward models that were trained on language models.

The oracle is the live model: transformers' class with PEFT's adapter on it, on batches with padding.
"""

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from builders import (
    INPUT_IDS,
    SIZES,
    add_tensors,
    all_tensors,
    check_close,
    check_loads,
    edit_config,
    rms,
    save_base,
    train,
    train_adapter,
)
from golden import Golden
from multimodal_models import TOWER
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer, Gemma3Config, LlamaConfig, Qwen3Config

from cogumi.merge import check_merged, merge_adapter

PAD = 3
PADDED = INPUT_IDS.clone()
PADDED[0, -7:] = PAD

FAMILIES: dict[str, Any] = {
    "open": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "tied": Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
    "classifier": LlamaConfig(
        **SIZES, num_labels=4, pad_token_id=PAD, architectures=["LlamaForSequenceClassification"]
    ),
    "images": Gemma3Config(
        text_config=SIZES | {"head_dim": 16, "sliding_window": 16, "pad_token_id": None},
        vision_config=TOWER,
        mm_tokens_per_image=4,
        architectures=["Gemma3ForConditionalGeneration"],
    ),
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("heads")
    return {name: save_base(root / name, config, max_shard_size="60KB") for name, config in FAMILIES.items()}


def class_of(base: Path, labels: int = 3, task: str = "SequenceClassification") -> Any:
    """The base as transformers loads it with a head: a new one, unless it has one for as many labels."""
    torch.manual_seed(7)
    auto = getattr(transformers, f"AutoModelFor{task}")
    model = auto.from_pretrained(base, num_labels=labels, dtype=torch.float32, ignore_mismatched_sizes=True)
    model.config.get_text_config().pad_token_id = PAD
    return model


def outputs(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model.eval()(input_ids=PADDED).logits.double()


# name: (base, labels, lora)
HEADS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "classifier": ("open", 3, {"target_modules": ["q_proj", "down_proj"]}),
    "two-labels": ("tied", 2, {"target_modules": ["q_proj"]}),
    "reward": ("tied", 1, {"target_modules": ["q_proj", "v_proj"]}),
    "dora": ("open", 3, {"target_modules": ["q_proj"], "use_dora": True}),
    "embedding": ("tied", 3, {"target_modules": ["q_proj", "embed_tokens"]}),
    "without-task": ("open", 3, {"target_modules": ["q_proj"], "task_type": None, "modules_to_save": ["score"]}),
    "tokens": ("open", 5, {"target_modules": ["q_proj"], "task_type": "TOKEN_CLS"}),
    "its-own-base": ("classifier", 4, {"target_modules": ["q_proj"]}),
    "other-labels": ("classifier", 2, {"target_modules": ["q_proj"]}),
    "images": ("images", 3, {"target_modules": r".*language_model.*\.(q_proj|down_proj)"}),
}


@pytest.mark.parametrize("case", HEADS)
def test_the_merge_is_the_live_classifier(case: str, bases: dict[str, Path], tmp_path: Path) -> None:
    family, labels, lora = HEADS[case]
    task = "TokenClassification" if case == "tokens" else "SequenceClassification"
    base, out = bases[family], tmp_path / "out"
    adapter = train(class_of(base, labels, task), tmp_path / "adapter", **{"task_type": "SEQ_CLS"} | lora)
    report = merge_adapter(adapter, out, base=base, dtype="float32", progress=False)

    live = outputs(PeftModel.from_pretrained(class_of(base, labels, task), str(adapter)))
    assert live.shape[-1] == labels
    config = AutoConfig.from_pretrained(out)
    assert config.num_labels == labels
    assert config.architectures[0].endswith(f"For{task}")
    merged = getattr(transformers, config.architectures[0]).from_pretrained(out, dtype=torch.float32)
    merged.config.get_text_config().pad_token_id = PAD
    check_close(rms(outputs(merged) - live), rms(live - outputs(class_of(base, labels, task))))
    check_loads(out)
    assert not any(name.startswith("lm_head") for name in all_tensors(out))
    checked = check_merged(out, progress=False)
    assert (checked.missing, checked.elements) == (None, report.elements)

    head = "score.weight"
    merge_adapter(adapter, tmp_path / "kept", base=base, progress=False)
    trained = load_file(adapter / "adapter_model.safetensors")[f"base_model.model.{head}"]
    kept = all_tensors(tmp_path / "kept")
    assert torch.equal(kept[head], trained.to(kept[head].dtype))


def with_tokenizer(directory: Path, source: Path, pad: str | None) -> int | None:
    """Save the tokenizer of another model beside it; the id that it pads with."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.pad_token = pad
    tokenizer.save_pretrained(directory)
    return tokenizer.pad_token_id


@pytest.mark.parametrize("family", ["open", "images"])
def test_the_padding_token_is_the_tokenizers(
    family: str, bases: dict[str, Path], tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lora = HEADS["images" if family == "images" else "classifier"][2]
    adapter = train(class_of(bases[family]), tmp_path / "adapter", task_type="SEQ_CLS", **lora)
    with caplog.at_level(logging.WARNING, logger="cogumi"):
        merge_adapter(adapter, tmp_path / "without", base=bases[family], progress=False)
    assert "has no pad_token_id" in caplog.text
    caplog.clear()
    known = AutoTokenizer.from_pretrained(tiny_model).convert_ids_to_tokens(PAD)
    assert with_tokenizer(adapter, tiny_model, known) == PAD
    with caplog.at_level(logging.WARNING, logger="cogumi"):
        merge_adapter(adapter, tmp_path / "with", base=bases[family], progress=False)
    assert "pad_token_id" not in caplog.text
    config = AutoConfig.from_pretrained(tmp_path / "with")
    assert config.get_text_config().pad_token_id == PAD
    model = getattr(transformers, config.architectures[0]).from_pretrained(tmp_path / "with")
    assert outputs(model).shape == (2, 3)  # a batch, which needs the token


@pytest.mark.parametrize("labels", [1, 3])
def test_logits_are_compared_with_the_live_classifier(labels: int, bases: dict[str, Path], tmp_path: Path) -> None:
    lora = {"target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": "SEQ_CLS"}
    adapter = train(class_of(bases["tied"], labels), tmp_path / "adapter", **lora)
    base = shutil.copytree(bases["tied"], tmp_path / "base")
    edit_config(Path(base), pad_token_id=PAD)
    report = merge_adapter(adapter, tmp_path / "out", base=base, verify="logits", progress=False)
    assert report.logits is not None
    assert report.logits.passed
    assert report.logits.base_distance > report.logits.bound  # else it would pass whatever is wrong


def test_a_head_of_a_class_that_transformers_lacks_is_refused(tmp_path: Path, golden: Golden) -> None:
    base = save_base(tmp_path / "base", transformers.Olmo2Config(**SIZES))
    adapter = train_adapter(base, tmp_path / "adapter", target_modules=["q_proj"])
    add_tensors(adapter, {"base_model.model.classifier.weight": torch.ones(3, 64)})
    edit_config(adapter, task_type="SEQ_CLS", modules_to_save=["classifier"])
    with golden.raises("merge", message="classifier.weight", fix="SEQ_CLS"):
        merge_adapter(adapter, tmp_path / "out", base=base, progress=False)
