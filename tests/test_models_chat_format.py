"""Chat templates for base models, and what the tiny random models of real architectures are."""

from pathlib import Path

import pytest
from golden import Golden
from transformers import AutoConfig, AutoTokenizer

from cogumi.core.errors import UsageError
from cogumi.models.loading import load_model, read_base, use_chat_template, use_end_token
from cogumi.models.small_base import KINDS, PREFIX

TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}, {"role": "user", "content": "so?"}]


def test_the_tulu_format_learns_the_turns_of_the_assistant_and_their_end(tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    use_chat_template(tokenizer, "cogumi:tulu")
    text = tokenizer.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True)
    assert text == "<|user|>\nhi\n<|assistant|>\nyo<|endoftext|>\n<|user|>\nso?\n<|assistant|>\n"
    actual = tokenizer.apply_chat_template(TALK, return_dict=True, return_assistant_tokens_mask=True)
    learned = [i for i, mask in zip(actual["input_ids"], actual["assistant_masks"], strict=True) if mask]
    assert tokenizer.decode(learned) == "yo<|endoftext|>"


def test_a_template_of_a_file_or_of_another_model(tiny_model: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    (tmp_path / "mine.jinja").write_text("{{ messages[0]['content'] }}!")
    use_chat_template(tokenizer, str(tmp_path / "mine.jinja"))
    assert tokenizer.apply_chat_template(TALK, tokenize=False) == "hi!"
    tokenizer.save_pretrained(tmp_path / "other")
    again = AutoTokenizer.from_pretrained(tiny_model)
    use_chat_template(again, str(tmp_path / "other"))
    assert again.chat_template == tokenizer.chat_template


def test_control_tokens_that_are_not_there_are_refused(tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    with pytest.raises(UsageError, match=r"<\|im_start\|>, <\|im_end\|>") as refused:
        use_chat_template(tokenizer, read_base("cogumi:random-qwen3").name)
    assert refused.value.key == "train.chat_template_path"
    assert tokenizer.chat_template is None


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("cogumi:alpaca", "no model with a tokenizer"),
        ("/no/such/place", "is no .jinja file, and no model with a tokenizer"),
        ("{tiny}", "has no chat template"),
    ],
)
def test_no_template_is_one_line(tiny_model: Path, name: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        use_chat_template(AutoTokenizer.from_pretrained(tiny_model), name.format(tiny=tiny_model))
    assert "\n" not in str(caught.value)


def test_another_end_token_must_be_a_token(tiny_model: Path, golden: Golden) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    use_end_token(tokenizer, "<pad>")
    assert tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<pad>")
    with golden.raises("models", key="train.eos_token", message="'<end>'"):
        use_end_token(tokenizer, "<end>")


@pytest.mark.parametrize("kind", KINDS)
def test_random_models_are_of_their_architecture(kind: str) -> None:
    path = read_base(PREFIX + kind).name
    model, tokenizer = load_model(path), AutoTokenizer.from_pretrained(path)
    assert AutoConfig.from_pretrained(path).model_type == KINDS[kind][0]
    assert model.config.model_type.removesuffix("_text") == KINDS[kind][0]  # out of a wrapper with towers
    assert model.get_input_embeddings().weight.shape[0] == len(tokenizer)
    assert tokenizer.eos_token == KINDS[kind][3]
    text = tokenizer.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True)
    for token in KINDS[kind][2]:  # each is one token
        assert len(tokenizer(token, add_special_tokens=False)["input_ids"]) == 1
    assert any(token in text for token in KINDS[kind][2])


def test_a_random_model_that_is_not_known(golden: Golden) -> None:
    with golden.raises("models", key="model.name", message="cogumi:random-gtp"):
        read_base("cogumi:random-gtp")
    with golden.raises("models", key="model.name", message="cogumi:smal-base", fix="cogumi:small-base"):
        read_base("cogumi:smal-base")


def test_a_run_that_goes_on_from_an_adapter_has_its_tokenizer(tiny_model: Path, tmp_path: Path, golden: Golden) -> None:
    """The base knows no template: the SFT run before was given one, and saved it."""
    from cogumi.config.schema import load_config
    from cogumi.data.templates import read_template
    from cogumi.methods.preparation import load_run_tokenizer

    base = {"model": {"name": str(tiny_model)}, "data": {"source": "x", "format": "chat"}, "cogumi": {"method": "sft"}}
    sft = load_run_tokenizer(load_config(base, train__chat_template_path="cogumi:tulu"), read_base(str(tiny_model)))
    sft.save_pretrained(tmp_path / "adapter")
    on = load_config(base, cogumi__method="gspo", model__adapter=str(tmp_path / "adapter"))
    assert load_run_tokenizer(on, read_base(str(tiny_model))).chat_template == sft.chat_template
    with golden.raises("models", key="data.format", fix="train.chat_template_path"):
        read_template(load_run_tokenizer(load_config(base), read_base(str(tiny_model))))
    with golden.raises("models", key="train.chat_template_path"):  # which is why
        load_config(base, cogumi__method="gspo", train__chat_template_path="cogumi:tulu")
