"""Training is refused where the chat template ends an answer with a token at which no generation stops."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from cogumi.config.schema import load_config
from cogumi.core.errors import UsageError
from cogumi.methods.examples import prepare_examples
from cogumi.methods.preparation import load_run_tokenizer
from cogumi.models.loading import read_base
from tests.builders import run_config
from tests.chat_tokenizers import ask, chat_tokenizer, say, tiny_for

ROWS = [{"messages": [ask(f"q{n}"), say("a")]} for n in range(4)]
TEXT = [{"prompt": f"q{n}", "completion": "a"} for n in range(4)]


def prepare(
    tmp_path: Path,
    eos: str,
    stops: list[str] | None,
    rows: list[Any] = ROWS,
    format: str = "chat",
    *,
    end: str | None = None,
    method: Any = "sft",
    **train: Any,
) -> Any:
    """stops: of generation_config.json; None: there is no such file, and config.json has the tokenizer's token.

    end: what the chat template ends a turn with; None: Qwen3's template.
    """
    tokenizer, home, source = chat_tokenizer("qwen3"), tmp_path / "base", tmp_path / "rows.jsonl"
    tokenizer.eos_token = eos
    if end is not None:
        turns = f"{{% for m in messages %}}{{{{ m.role }}}}: {{{{ m.content }}}}{end}\n{{% endfor %}}"
        tokenizer.chat_template = turns + "{% if add_generation_prompt %}assistant: {% endif %}"
    tokenizer.save_pretrained(home)
    tiny_for(tokenizer).save_pretrained(home)
    file = home / "generation_config.json"
    file.unlink(missing_ok=True)
    if stops is not None:
        file.write_text(json.dumps({"eos_token_id": tokenizer.convert_tokens_to_ids(stops)}))
    source.write_text("\n".join(map(json.dumps, rows)))
    data = {"format": format, "eval_rows": 0}
    run = load_config(run_config(method, home, source, tmp_path / "run", data_section=data, train=train))
    return prepare_examples(run, load_run_tokenizer(run, read_base(str(home))), AutoConfig.from_pretrained(home))


@pytest.mark.parametrize("stops", [None, ["<|endoftext|>"]])
def test_an_end_of_turn_at_which_nothing_stops_is_refused(tmp_path: Path, stops: list[str] | None) -> None:
    message = r"ends an answer with <\|im_end\|>, and generation stops at <\|endoftext\|>"
    with pytest.raises(UsageError, match=message) as refused:
        prepare(tmp_path, "<|endoftext|>", stops)
    assert refused.value.key == "train.eos_token"
    assert refused.value.fix == "set train.eos_token: '<|im_end|>'"


def test_the_advice_is_followed(tmp_path: Path) -> None:
    assert len(prepare(tmp_path, "<|endoftext|>", ["<|endoftext|>"], eos_token="<|im_end|>").train.dataset) == 4


@pytest.mark.parametrize("stops", [["<|im_end|>", "<|endoftext|>"], None])
def test_one_of_several_ends_is_enough(tmp_path: Path, stops: list[str] | None) -> None:
    eos = "<|im_end|>" if stops is None else "<|endoftext|>"
    assert len(prepare(tmp_path, eos, stops).train.dataset) == 4


PAIRS = [{"prompt": [ask(f"q{n}")], "chosen": [say("a")], "rejected": [say("b")]} for n in range(4)]


@pytest.mark.parametrize(("rows", "format", "method"), [(ROWS, "chat", "sft"), (PAIRS, "preference", "dpo")])
def test_a_template_that_ends_no_answer_is_refused(tmp_path: Path, rows: list[Any], format: str, method: Any) -> None:
    with pytest.raises(UsageError, match="ends an answer with no token") as refused:
        prepare(tmp_path, "<|endoftext|>", None, rows, format, end="", method=method)
    assert refused.value.key == "train.chat_template_path"
    assert len(prepare(tmp_path, "<|im_end|>", None, rows, format, end="<|im_end|>", method=method).train.dataset) == 4


def test_a_second_end_token_upon_the_first_stops_it(tmp_path: Path) -> None:
    """Command-A ends with <|END_RESPONSE|><|END_OF_TURN_TOKEN|>, and stops at the second."""
    ends = "</think><|im_end|>"
    assert len(prepare(tmp_path, "<|im_end|>", None, end=ends).train.dataset) == 4
    with pytest.raises(UsageError, match="ends an answer with </think>, and generation stops at"):
        prepare(tmp_path, "<|im_end|>", None, end=ends.replace("<|im", "\n<|im"))


def test_text_ends_with_the_tokenizers_end_token(tmp_path: Path) -> None:
    assert len(prepare(tmp_path, "<|endoftext|>", None, TEXT, "prompt_completion").train.dataset) == 4
