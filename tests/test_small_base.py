"""The small base that ships with the package: what its card says is so, and what it was trained on leaves the tasks out."""

import importlib
import json
import math
import sys
import sysconfig
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import pre_tokenizers

from cogumi.models.loading import SMALL_BASE, load_model, load_tokenizer, read_base

PATH = Path(read_base(SMALL_BASE).name)
PRETRAINING = Path(__file__).parents[1] / "cogumi/models/small-base/pretraining"
sys.path.insert(0, str(PRETRAINING))
train: Any = importlib.import_module("train")
FIGURES = json.loads((PRETRAINING / "training.json").read_text())


def test_it_is_small_and_complete() -> None:
    model, tokenizer = load_model(str(PATH)), load_tokenizer(str(PATH))
    assert sum(p.numel() for p in model.parameters()) == FIGURES["parameters"] <= 8_000_000
    assert sum(file.stat().st_size for file in PATH.iterdir()) <= 16_000_000
    assert (len(tokenizer), model.config.max_position_embeddings) == (train.VOCABULARY, train.CONTEXT)


@pytest.mark.skipif(
    FIGURES["python"] != ".".join(map(str, __import__("sys").version_info[:3])), reason="another library"
)
def test_its_loss_on_the_standard_library_is_that_of_its_curve() -> None:
    """In bfloat16 weights, as shipped; the curve was measured in float32."""
    tokenizer = load_tokenizer(str(PATH))
    blocks = train.encode(tokenizer, train.standard_library())[: train.EVALUATED]
    assert train.evaluate(load_model(str(PATH)), blocks) == pytest.approx(FIGURES["curve"][-1]["held_out"], abs=0.01)
    assert FIGURES["curve"][-1]["held_out"] < 0.3 * math.log(train.VOCABULARY)


def test_a_name_is_the_same_tokens_wherever_it_stands() -> None:
    tokenizer = load_tokenizer(str(PATH))
    name = tokenizer("wobble")["input_ids"]
    for before, after in (("x = ", ""), ("(", ")"), ("a.", "[0]"), ("\n    ", " += 1")):
        actual = tokenizer(before + "wobble" + after)["input_ids"]
        assert any(actual[at : at + len(name)] == name for at in range(len(actual)))
    assert isinstance(tokenizer.backend_tokenizer.pre_tokenizer, pre_tokenizers.ByteLevel)  # GPT-2's, for other engines


def test_the_chat_template_learns_the_answer_alone() -> None:
    tokenizer = load_tokenizer(str(PATH))
    messages = [{"role": "user", "content": "Rename a to b:\na = 1"}, {"role": "assistant", "content": "b = 1"}]
    made = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    learned = [token for token, mask in zip(made["input_ids"], made["assistant_masks"], strict=True) if mask]
    assert tokenizer.decode(learned) == "b = 1<|endoftext|>"
    asked = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(made["input_ids"]) == asked + "b = 1<|endoftext|>"


def test_the_text_leaves_out_the_standard_library_and_tests(tmp_path: Path) -> None:
    held_out = set(map(train.digest, train.standard_library()))
    library = (Path(sysconfig.get_paths()["stdlib"]) / "textwrap.py").read_text()
    own = "def area(width, height):\n    size = width * height\n    return size\n"
    with zipfile.ZipFile(tmp_path / "some-1-py3-none-any.whl", "w") as archive:
        archive.writestr("some/textwrap.py", library + "\n\n" + own)
        archive.writestr("some/tests/test_own.py", own.replace("area", "test_area"))
    assert [source for _, source in train.packages(tmp_path, held_out)] == [own]
    assert [source for _, source in train.packages(tmp_path, set())] != [own]  # the library's would have been taken


def test_a_long_docstring_is_cut_to_its_first_line() -> None:
    long = 'def f(x):\n    """Say "what".\n\n    And how.\n    """\n    y = x\n    return y\n'
    assert train.shorten_docstring(long) == 'def f(x):\n    """Say what."""\n    y = x\n    return y\n'
    assert train.shorten_docstring(long.replace("    y = x\n    return y\n", "")) == ""


@pytest.mark.slow("trains the recipe for some steps")
def test_the_recipe_trains(monkeypatch: pytest.MonkeyPatch, sources: list[str]) -> None:
    tokenizer = load_tokenizer(str(PATH))
    # One layer and short rows: on a CPU without a fast product in bfloat16 the whole takes over ten minutes.
    monkeypatch.setattr(train, "LAYERS", 1)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))  # traced, without a C++ compiler
    blocks = train.encode(tokenizer, [*sources])[:, :64]
    before = train.evaluate(train.make_model(tokenizer), blocks[:8])
    torch.manual_seed(0)
    (last,) = train.train(model := train.make_model(tokenizer), blocks[8:], blocks[:8], steps=20)
    assert last["held_out"] == train.evaluate(model, blocks[:8]) < before - 1
