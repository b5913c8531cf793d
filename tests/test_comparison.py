"""Models side by side: the scores by hand, the completions by transformers' own generate, and what is refused."""

import re
from html import unescape

import pytest

from cogumi.core.errors import UsageError
from cogumi.methods.preview import Comparison, compare_models
from cogumi.models.loading import load_model, load_tokenizer, read_base
from cogumi.notebook import completions


def test_scores_leave_out_the_white_space_around_a_text() -> None:
    actual = Comparison(["a", "b"], ["x = 1", "y"], {"m": ["x = 1\n", "yes "]})
    assert actual.exact("m") == 0.5
    assert actual.similarity("m") == pytest.approx((1 + 1 / 3) / 2)  # two of three letters are inserted


def test_the_rows_that_are_shown_are_spread_and_never_chosen_by_what_was_written() -> None:
    def rows(prompts: int, count: int) -> list[int]:
        return list(Comparison(["?"] * prompts, ["!"] * prompts, {}).shown(count))

    assert rows(200, 5) == [0, 40, 80, 120, 160]
    assert rows(9, 4) == [0, 2, 4, 6]
    assert rows(3, 5) == [0, 1, 2]


def test_a_model_completes_greedily_what_its_chat_template_makes_of_a_prompt() -> None:
    actual = compare_models({"base": "cogumi:small-base"}, "smoke/chat-gspo", rows=3)
    path = read_base("cogumi:small-base").name
    model, tokenizer = load_model(path), load_tokenizer(path)
    for asked, written in zip(actual.prompts, actual.written["base"], strict=True):
        message = [{"role": "user", "content": asked}]
        ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        out = model.generate(**ids.to(model.device), do_sample=False, max_new_tokens=24)
        assert tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True) == written


def test_the_table_marks_each_answer_right_or_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    written = {"SFT": ["b = 1", "a < c"], "GSPO": ["b = 1", "b < c\n"]}
    actual = Comparison(["Rename a to b:", "the second"], ["b = 1", "b < c"], written)
    monkeypatch.setattr("cogumi.methods.preview.compare_models", lambda *_: actual)
    html = completions.compare(dict.fromkeys(written, "anywhere"), "any")._repr_html_()
    rows = [
        [
            unescape(" ".join(re.sub("<[^>]*>", " ", cell).split()))
            for cell in re.findall("<t[dh].*?</t[dh]>", row, re.DOTALL)
        ]
        for row in re.findall("<tr.*?</tr>", html, re.DOTALL)
    ]
    assert rows == [
        ["asked", "SFT", "GSPO", "right"],
        ["exactly right", "50.0%", "100.0%", ""],
        ["mean edit similarity", "0.90", "1.00", ""],
        ["Rename a to b:", "b = 1 right", "b = 1 right", "b = 1"],
        ["the second", "a < c wrong", "b < c right", "b < c"],
    ]


def test_rows_without_an_answer_are_refused() -> None:
    with pytest.raises(UsageError, match=r"data\.source: held-out rows have no column answer or middle; compare"):
        compare_models({"base": "cogumi:small-base"}, "smoke/chat-sft")
    with pytest.raises(UsageError, match="no rows are held out"):
        compare_models({"base": "cogumi:small-base"}, "smoke/chat-gspo", data__eval_rows=0)
