"""Documents for continued pretraining: all tokens learned, long ones in pieces, the same tokens as TRL's own trainer."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from datasets import Dataset
from golden import Golden
from trl import SFTConfig, SFTTrainer

import cogumi
from cogumi.config.schema import load_config
from cogumi.core.errors import UsageError
from cogumi.data.source_files import find_files
from cogumi.data.sources import batches, column_names
from cogumi.forecast.data_sample import sample_data
from cogumi.methods.examples import prepare_examples
from cogumi.methods.preparation import load_run_tokenizer
from cogumi.methods.sft import arguments
from cogumi.models.loading import load_tokenizer, read_base

SHORT = ["def f():\n    return 1\n", "A line of text.", "  indented, with a tab\tand ünïcode"]


def config(base: Path, source: Path, **data: Any) -> dict[str, Any]:
    return {
        "model": {"name": str(base)},
        "data": {"source": str(source), "format": "text", "eval_rows": 0, **data},
        "train": {"max_length": 32, "max_steps": 2, "per_device_train_batch_size": 2},
        "cogumi": {"method": "sft", "run_dir": str(source.parent / "run"), "merge": False},
    }


def prepared(values: dict[str, Any]) -> Any:
    run = load_config(values)
    return prepare_examples(run, load_run_tokenizer(run, read_base(run.model.name)))


def write_lines(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_short_documents_are_the_tokens_and_labels_of_trls_own_trainer(tiny_model: Path, tmp_path: Path) -> None:
    dataset = prepared(config(tiny_model, write_lines(tmp_path / "texts.jsonl", SHORT))).train.dataset
    args = SFTConfig(str(tmp_path / "trl"), max_length=32, report_to=[], bf16=False, use_cpu=True)
    rows = Dataset.from_list([{"text": text} for text in SHORT])
    trainer = SFTTrainer(str(tiny_model), args, train_dataset=rows, processing_class=load_tokenizer(str(tiny_model)))
    batch = trainer.data_collator(list(trainer.train_dataset))
    expected = [[token for token in row.tolist() if token != -100] for row in batch["labels"]]
    assert sorted(row["input_ids"] for row in dataset) == sorted(expected)
    assert all(mask for row in dataset for mask in row["completion_mask"])


def test_an_empty_document_is_not_held_out(tiny_model: Path, tmp_path: Path) -> None:
    for number in range(6):
        texts = [f"Document {number}.", *SHORT, *["", "  \n"] * 5]
        parts = prepared(config(tiny_model, write_lines(tmp_path / f"texts-{number}.jsonl", texts), eval_rows=2))
        assert (parts.held_out.total, dict(parts.held_out.dropped)) == (2, {})


def test_a_long_document_is_cut_and_every_token_is_predicted_once(tiny_model: Path, tmp_path: Path) -> None:
    text = "".join(f"value_{number} = {number}\n" for number in range(40))
    data = prepared(config(tiny_model, write_lines(tmp_path / "texts.jsonl", [text]))).train
    tokenizer = load_tokenizer(str(tiny_model))
    whole = tokenizer(text + tokenizer.eos_token)["input_ids"]
    pieces = [row["input_ids"] for row in data.dataset]
    assert max(map(len, pieces)) == 32
    assert pieces[0] + [token for piece in pieces[1:] for token in piece[1:]] == whole
    masks = [row["completion_mask"] for row in data.dataset]
    assert sum(sum(mask[1:]) for mask in masks) == len(whole) - 1
    assert data.total == 1
    assert data.extra_examples == len(pieces) - 1
    assert not data.truncated


def test_pieces_of_one_document_are_never_on_both_sides(tiny_model: Path, tmp_path: Path) -> None:
    texts = [f"document {number} " + "word " * 100 + f"end {number}" for number in range(20)]
    parts = prepared(config(tiny_model, write_lines(tmp_path / "texts.jsonl", texts), eval_rows=4))
    tokenizer = load_tokenizer(str(tiny_model))

    def documents(data: Any) -> list[str]:
        text = tokenizer.decode(
            [token for row in data.dataset for token in np.extract(row["completion_mask"], row["input_ids"])]
        )
        return [piece for piece in text.split(tokenizer.eos_token) if piece]

    assert len(parts.held_out.dataset) > 4 == len(documents(parts.held_out))
    assert sorted(documents(parts.train) + documents(parts.held_out)) == sorted(texts)


def test_text_files_are_one_document_each(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pages"
    (folder / "more").mkdir(parents=True)
    (folder / "testing.md").write_text("a page on tests, which is no split\n\nof two paragraphs")
    (folder / "more" / "b.txt").write_bytes(b"\xef\xbb\xbfwith a mark")
    with gzip.open(folder / "c.txt.gz", "wt") as file:
        file.write("packed")
    (folder / "empty.txt").write_text(" \n")
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    files = find_files(folder)
    assert column_names(files) == ["text"]
    assert list(pl.concat(batches(files[:1], ["text"]))["text"]) == ["packed"]
    data = prepared(config(tiny_model, folder)).train
    tokenizer = load_tokenizer(str(tiny_model))
    texts = {tokenizer.decode(row["input_ids"], skip_special_tokens=True) for row in data.dataset}
    assert texts == {"a page on tests, which is no split\n\nof two paragraphs", "with a mark", "packed"}
    assert {reason: drop.count for reason, drop in data.dropped.items()} == {"empty": 1, "not UTF-8": 1}
    run = load_config(config(tiny_model, folder))
    assert sample_data(run, tokenizer).rows == 5


def test_a_readme_beside_data_is_no_data(tmp_path: Path) -> None:
    write_lines(tmp_path / "data.jsonl", SHORT)
    (tmp_path / "README.md").write_text("about the data")
    assert [file.name for file in find_files(tmp_path)] == ["data.jsonl"]


@pytest.mark.parametrize("column", ["text", "body"])
def test_a_column_of_a_table_is_documents(column: str, tiny_model: Path, tmp_path: Path) -> None:
    pl.DataFrame({column: SHORT, "id": [1, 2, 3]}).write_parquet(tmp_path / "texts.parquet")
    columns = {} if column == "text" else {"columns": {"text": "body"}}
    assert len(prepared(config(tiny_model, tmp_path / "texts.parquet", **columns)).train.dataset) == 3


def test_what_a_text_ignores_or_cannot_be_is_refused(tiny_model: Path, tmp_path: Path, golden: Golden) -> None:
    values = config(tiny_model, write_lines(tmp_path / "texts.jsonl", SHORT))
    with golden.raises("data", key="data.overlong"):
        load_config(values, data__overlong="truncate")
    with golden.raises("data", key="cogumi.thinking"):
        load_config(values, cogumi__thinking=True)
    with golden.raises("data", key="train.completion_only_loss"):
        arguments(load_config(values, train__completion_only_loss=True))
    dpo = values | {"train": {"max_steps": 1}, "cogumi": values["cogumi"] | {"method": "dpo"}}
    with pytest.raises(UsageError, match=r"text is not for cogumi\.method: dpo"):
        prepared(dpo)


def test_packed_pieces_are_trained_on_and_shown(tiny_model: Path, tmp_path: Path) -> None:
    texts = [f"x_{number} = " + "1 + " * number + "0\n" for number in range(40)]
    values = config(tiny_model, write_lines(tmp_path / "texts.jsonl", texts), eval_rows=2)
    shown = cogumi.preview(values, examples=1)
    assert shown.train.rows == 38
    assert shown.train.extra_examples > 0
    assert [kind for kind, _ in shown.examples[0]][-1] == "learned"
    values["train"] |= {"packing": True}
    cogumi.train(values)
    assert (tmp_path / "run" / "DONE").exists()
