"""Adapters on models that continue no text: encoders, encoder-decoders, images and sound, and models without a head."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from builders import (
    EXPERTS,
    FUSED,
    INPUT_IDS,
    SIZES,
    add_tensors,
    all_tensors,
    check_close,
    check_loads,
    load,
    rms,
    save_base,
    train,
)
from peft import PeftModel
from transformers import (
    AutoModel,
    BartConfig,
    BertConfig,
    CLIPConfig,
    EncodecConfig,
    LlamaConfig,
    MusicgenConfig,
    MusicgenDecoderConfig,
    Qwen3MoeConfig,
    RobertaConfig,
    SwitchTransformersConfig,
    T5Config,
    ViTConfig,
    Wav2Vec2BertConfig,
    Wav2Vec2BertModel,
    Wav2Vec2Config,
    WhisperConfig,
)

from cogumi.core.errors import UsageError
from cogumi.merge import merge_adapter
from cogumi.merge.certificate import certify

HALVES: dict[str, Any] = {"d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 256, "pad_token_id": 0}
HALVES |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96}
SIGHT: dict[str, Any] = {"image_size": 28, "patch_size": 14}
SOUND: dict[str, Any] = {"conv_dim": [16, 16], "conv_stride": [5, 2], "conv_kernel": [10, 3]}
SOUND |= {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}
T5_SIZES: dict[str, Any] = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 1, "num_heads": 4, "vocab_size": 256}
T5_SIZES |= {"decoder_start_token_id": 0}
T5 = T5Config(**T5_SIZES)
MODELS: dict[str, Any] = {
    "BertForMaskedLM": BertConfig(**SIZES),
    "BertForQuestionAnswering": BertConfig(**SIZES),
    "BertModel": BertConfig(**SIZES),
    "LlamaModel": LlamaConfig(**SIZES),
    "T5ForConditionalGeneration": T5,
    "BartForConditionalGeneration": BartConfig(**HALVES, max_position_embeddings=128),
    "WhisperForConditionalGeneration": WhisperConfig(
        **HALVES, num_mel_bins=8, max_source_positions=12, decoder_start_token_id=1, bos_token_id=1, eos_token_id=2
    ),
    "ViTForImageClassification": ViTConfig(**SIZES | SIGHT),
    "Wav2Vec2ForCTC": Wav2Vec2Config(**SIZES | SOUND),
}
OTHER_INPUTS: dict[str, dict[str, torch.Tensor]] = {
    "WhisperForConditionalGeneration": {"input_features": torch.arange(2 * 8 * 24).reshape(2, 8, 24).sin()},
    "ViTForImageClassification": {"pixel_values": torch.arange(2 * 3 * 28 * 28).reshape(2, 3, 28, 28).sin()},
    "Wav2Vec2ForCTC": {"input_values": torch.arange(2 * 800).reshape(2, 800).sin()},
}
TOWER: dict[str, Any] = {name: SIZES[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads")}
TOWER["num_hidden_layers"] = 1
CODEC = EncodecConfig(
    num_filters=4, hidden_size=32, codebook_dim=32, codebook_size=64, upsampling_ratios=[4, 2], target_bandwidths=[1.5]
)  # fmt: skip
SINGER = MusicgenDecoderConfig(**TOWER, ffn_dim=96, vocab_size=64, num_codebooks=2, pad_token_id=64, bos_token_id=64)
# Models that the comparison's tokens are not enough for, or too many, and what it says.
NOT_RUN: dict[str, tuple[Any, str]] = {
    "CLIPModel": (
        CLIPConfig(text_config=TOWER, vision_config=TOWER | SIGHT),
        "CLIPModel with the adapter does not run",
    ),
    "RobertaForMaskedLM": (RobertaConfig(**SIZES), "RobertaForMaskedLM with the adapter does not run"),
    "MusicgenForConditionalGeneration": (
        MusicgenConfig(text_encoder=T5.to_dict(), audio_encoder=CODEC.to_dict(), decoder=SINGER.to_dict()),
        "MusicgenForConditionalGeneration has several vocabularies",
    ),
}
ATTENTION = {"T5ForConditionalGeneration": ["q"], "ViTForImageClassification": ["q_proj", "fc1"]}
FEW = ("BertForMaskedLM", "BertModel", "T5ForConditionalGeneration", "Wav2Vec2ForCTC", "bert-whole-head", "bart-head")
# A head that is tied, alone, with its bias, and the embedding that it is tied to.
UNTIED: dict[str, tuple[str, dict[str, Any]]] = {
    "bert-embedding": ("BertForMaskedLM", {"target_modules": ["word_embeddings"]}),
    "bert-head": ("BertForMaskedLM", {"target_modules": ["predictions.decoder"]}),
    "bert-whole-head": ("BertForMaskedLM", {"modules_to_save": ["predictions.decoder"]}),
    "bert-embedding-and-biases": ("BertForMaskedLM", {"target_modules": ["word_embeddings"], "bias": "all"}),
    "bart-head": ("BartForConditionalGeneration", {"target_modules": ["lm_head"]}),
    "bart-whole-head": ("BartForConditionalGeneration", {"modules_to_save": ["lm_head"]}),
    "t5-head": ("T5ForConditionalGeneration", {"target_modules": ["lm_head"]}),
}


def save_model(name: str, path: Path) -> Path:
    torch.manual_seed(0)
    model = getattr(transformers, name)(MODELS[name] if name in MODELS else NOT_RUN[name][0])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(path)
    return path


def attention_of(name: str) -> list[str]:
    return ATTENTION.get(name, ["query"] if "Bert" in name else ["q_proj", "v_proj"])


def most_in_sweep(cases: dict[str, Any]) -> list[Any]:
    return [pytest.param(case, marks=[] if case in FEW else pytest.mark.sweep) for case in cases]


def output(model: Any) -> torch.Tensor:
    """The first thing that a model returns: logits, or its last hidden state."""
    inputs = dict(OTHER_INPUTS.get(type(model).__name__, {"input_ids": INPUT_IDS}))
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = INPUT_IDS[:, :8]
    with torch.inference_mode():
        return model.eval()(**inputs)[0].double()


def check(base: Path, adapter: Path, out: Path) -> None:
    live = PeftModel.from_pretrained(load(base), str(adapter)).get_base_model()
    expected = output(live)
    merge_adapter(adapter, out, base=base, progress=False)
    check_close(rms(output(load(out)) - expected), rms(expected - output(load(base))))
    check_loads(out)


SWITCH = SwitchTransformersConfig(**T5_SIZES, num_sparse_encoder_layers=0, num_sparse_decoder_layers=0)


@pytest.mark.parametrize("config", [T5, SWITCH], ids=["t5", "switch"])
def test_a_head_whose_scale_hangs_on_the_tie(config: Any, tmp_path: Path) -> None:
    """A config of transformers 4 names the tie, and no scale; T5's takes an untied head for one without the scale."""
    base = tmp_path / "base"
    getattr(transformers, type(config).__name__.replace("Config", "ForConditionalGeneration"))(config).save_pretrained(
        base
    )
    entries = json.loads((base / "config.json").read_text())
    entries = {
        key: value for key, value in entries.items() if key not in ("scale_decoder_outputs", "tie_word_embeddings")
    }
    (base / "config.json").write_text(json.dumps(entries))
    adapter = train(load(base), tmp_path / "adapter", target_modules=["lm_head"], task_type=None)
    check(base, adapter, tmp_path / "out")


def test_biases_of_other_names_that_an_older_peft_trained(tmp_path: Path) -> None:
    """Up to 0.20 bias="all" was every parameter with the word in its name; the installed one trains `.bias` alone."""
    base = save_model("T5ForConditionalGeneration", tmp_path / "base")
    adapter = train(load(base), tmp_path / "adapter", target_modules=["q"], bias="all", task_type=None)
    name = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    trained = all_tensors(base)[name] + 1
    add_tensors(adapter, {f"base_model.model.{name}": trained})
    merge_adapter(adapter, tmp_path / "out", base=base, progress=False)
    assert torch.equal(all_tensors(tmp_path / "out")[name], trained)


@pytest.mark.parametrize("name", most_in_sweep(MODELS))
def test_a_model_of_another_task(name: str, tmp_path: Path) -> None:
    base, out = save_model(name, tmp_path / "base"), tmp_path / "out"
    adapter = train(load(base), tmp_path / "adapter", target_modules=attention_of(name), task_type=None)
    check(base, adapter, out)
    if name in OTHER_INPUTS:
        with pytest.raises(UsageError, match=f"{name} takes {next(iter(OTHER_INPUTS[name]))}"):
            merge_adapter(adapter, tmp_path / "again", base=base, verify="logits", progress=False)
    else:
        report = merge_adapter(adapter, tmp_path / "again", base=base, verify="logits", progress=False)
        assert report.logits is not None
        assert report.logits.scale_bound is not None
    steps = {step.name: step.passed for step in certify(adapter, out, base=str(base)).steps}
    assert steps["adapter's file, merged files"] is True
    assert steps.get("adapter on its base, merged model") is (None if name in OTHER_INPUTS else True)


@pytest.mark.parametrize("name", NOT_RUN)
def test_a_model_that_does_not_run_on_the_prompt_is_said_not_to(name: str, tmp_path: Path) -> None:
    base, out = save_model(name, tmp_path / "base"), tmp_path / "out"
    adapter = train(load(base), tmp_path / "adapter", target_modules=["q_proj", "query"], task_type=None)
    with pytest.raises(UsageError, match=NOT_RUN[name][1]):
        merge_adapter(adapter, out, base=base, verify="logits", progress=False)
    merge_adapter(adapter, out, base=base, progress=False)
    steps = {step.name: step for step in certify(adapter, out, base=str(base)).steps}
    assert steps["adapter's file, merged files"].passed is True
    assert steps["adapter on its base, merged model"].passed is None
    assert NOT_RUN[name][1] in steps["adapter on its base, merged model"].figure


@pytest.mark.parametrize("case", most_in_sweep(UNTIED))
def test_a_tied_head_that_is_no_longer_its_embedding(case: str, tmp_path: Path) -> None:
    """Every tie of the model ends with tie_word_embeddings=false: of BERT's biases and of BART's two embeddings, too."""
    name, lora = UNTIED[case]
    base = save_model(name, tmp_path / "base")
    lora = {"target_modules": attention_of(name), "task_type": None} | lora
    adapter = train(load(base), tmp_path / "adapter", **lora)
    check(base, adapter, tmp_path / "out")


def test_experts_of_an_adapter_on_a_model_without_its_head(tmp_path: Path) -> None:
    """As embedding models are trained: the names of the adapter have no `model.` before them, those of the base have."""
    config = Qwen3MoeConfig(**SIZES, head_dim=16, **EXPERTS, architectures=["Qwen3MoeForCausalLM"])
    base = save_base(tmp_path / "base", config)
    live = AutoModel.from_pretrained(base, dtype=torch.float32)
    before = output(live)
    lora = {"target_modules": ["q_proj"], "target_parameters": FUSED, "task_type": "FEATURE_EXTRACTION"}
    adapter = train(live, tmp_path / "adapter", **lora)
    report = merge_adapter(adapter, tmp_path / "out", base=base, dtype="float32", verify="logits", progress=False)
    assert report.logits is not None
    merged = AutoModel.from_pretrained(tmp_path / "out", dtype=torch.float32)
    check_close(rms(output(merged) - output(live)), rms(output(live) - before))


def test_a_model_without_a_vocabulary(tmp_path: Path) -> None:
    sizes = SIZES | SOUND | {"vocab_size": None, "feature_projection_input_dim": 8, "num_hidden_layers": 1}
    config = Wav2Vec2BertConfig(**sizes, architectures=["Wav2Vec2BertModel"], position_embeddings_type=None)
    base = tmp_path / "base"
    Wav2Vec2BertModel(config).save_pretrained(base)
    adapter = train(load(base), tmp_path / "adapter", target_modules=["linear_q", "linear_out"], task_type=None)
    assert merge_adapter(adapter, tmp_path / "out", base=base, progress=False).tensors_merged == 2
