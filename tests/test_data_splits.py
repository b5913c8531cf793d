"""Which files of a directory, a pattern or a hub layout are trained on, and what is evaluated."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from golden import Golden

from cogumi.config.schema import load_config
from cogumi.core.errors import UsageError
from cogumi.data.source_files import describe_left_out, find_files, locate
from cogumi.methods.examples import Examples, prepare_examples
from tests.builders import run_config
from tests.chat_tokenizers import chat_tokenizer


def write(path: Path, numbers: range) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"prompt": f"question {n}", "completion": f"answer {n}"} for n in numbers]
    if path.suffix == ".parquet":
        pl.DataFrame(rows).write_parquet(path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_all(home: Path, names: Sequence[str], rows: int = 1) -> None:
    for name in names:
        write(home / name, range(rows))


def names(source: Path | str, **options: Any) -> list[str]:
    return sorted(file.name for file in locate(str(source), **options)[1])


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["train.jsonl", "validation.jsonl"], ["train.jsonl"]),
        (["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet", "data/test-00000-of-00001.parquet"],
         ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet"]),
        (["train/a.jsonl", "dev/b.jsonl"], ["a.jsonl"]),
        (["my_train.jsonl", "my_VAL.jsonl", "my_test.jsonl"], ["my_train.jsonl"]),
        (["test-0.jsonl", "test-1.jsonl"], ["test-0.jsonl", "test-1.jsonl"]),
        (["train_a.jsonl", "train_b.jsonl", "test.jsonl"], ["train_a.jsonl", "train_b.jsonl"]),
        (["train-00000-of-00002-abc.parquet", "train-00001-of-00002-def.parquet"],
         ["train-00000-of-00002-abc.parquet", "train-00001-of-00002-def.parquet"]),
        (["train.jsonl", ".ipynb_checkpoints/train-checkpoint.jsonl", "__MACOSX/train.jsonl"], ["train.jsonl"]),
        (["a.jsonl", "latest.jsonl", "training_free.jsonl.bak"], ["a.jsonl", "latest.jsonl"]),
        (["train.json", "test.json", "dataset_info.json"], ["train.json"]),
        (["train.jsonl", "holdout.jsonl", "held_out_2.jsonl", "devset.jsonl"], ["train.jsonl"]),
        (["trainset.jsonl", "testset.jsonl", "heldout/a.jsonl"], ["trainset.jsonl"]),
        (["asset.jsonl", "trains.jsonl", "evaluations.jsonl"], ["asset.jsonl", "evaluations.jsonl", "trains.jsonl"]),
    ],
)  # fmt: skip
def test_a_directory_is_read_as_its_names_say(tmp_path: Path, files: list[str], expected: list[str]) -> None:
    write_all(tmp_path, files)
    assert names(tmp_path) == expected


@pytest.mark.parametrize("card", [False, True])
def test_files_that_are_left_out_are_reported(tmp_path: Path, card: bool) -> None:
    home, hidden_files = tmp_path / "data", [".ipynb_checkpoints/train.jsonl", "._b.jsonl"]
    write_all(home, ["a/train.jsonl", "a/validation.jsonl", "more.csv", "x.json", *hidden_files], rows=9)
    if card:
        files = "data_files: [{split: train, path: a/train.jsonl}]"
        (home / "README.md").write_text(f"---\nconfigs:\n- {{config_name: default, {files}}}\n---\n")
    examples = examples_of(tmp_path, home)
    assert len(examples.train.dataset) == 9
    others = "a/validation.jsonl (another split), more.csv (only .jsonl is read), x.json (only .jsonl is read)"
    hidden = "._b.jsonl (hidden), .ipynb_checkpoints/train.jsonl (hidden)"
    assert examples.sources[0].startswith(f"{home}: 5 files are left out: {hidden}, {others}; data.split")


@pytest.mark.parametrize(
    "files",
    [
        ["data/train_sft-00000-of-00001.parquet", "data/train_gen-00000-of-00001.parquet"],
        ["data/train_sft-00000-of-00001.parquet", "data/train_gen-00000-of-00001.parquet", "data/test-00000-of-00001.parquet"],
        ["train_sft.jsonl", "train_gen.jsonl", "test_sft.jsonl", "test_gen.jsonl"],
        ["train_sft.jsonl", "train_gen.jsonl", "test_sft.jsonl"],
        ["train.jsonl", "train_gen.jsonl", "test.jsonl"],
        ["sft/prefs_train.jsonl", "sft/gen_train.jsonl", "sft/prefs_test.jsonl", "sft/gen_test.jsonl"],
    ],
)  # fmt: skip
def test_two_splits_to_train_on_are_refused(tmp_path: Path, files: list[str]) -> None:
    write_all(tmp_path, files)
    with pytest.raises(UsageError, match=r"not clear what to train on: \w*gen\w*[-\d.].*a pattern, such as .*/NAME\*"):
        find_files(tmp_path)
    assert len(names(f"{tmp_path}/**/{Path(files[0]).name}")) == 1


@pytest.mark.parametrize(
    "files", [["train.jsonl", "extra.jsonl", "test.jsonl"], ["test.jsonl", "validation.jsonl"], ["train_test.jsonl", "a.jsonl"]]
)  # fmt: skip
def test_a_layout_that_may_mean_two_things_is_refused(tmp_path: Path, golden: Golden, files: list[str]) -> None:
    write_all(tmp_path, files)
    with golden.raises("data", place=str(tmp_path)):
        find_files(tmp_path)
    assert names(f"{tmp_path}/*.jsonl") == sorted(files)


def test_a_data_set_card_says_what_the_files_are(tmp_path: Path) -> None:
    write_all(tmp_path, ["good.jsonl", "held.jsonl"])
    files = "data_files: [{split: train, path: good.jsonl}, {split: test, path: held.jsonl}]"
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n- {{config_name: default, {files}}}\n---\nAbout\n")
    assert names(tmp_path) == ["good.jsonl"]
    assert names(tmp_path, split="test") == ["held.jsonl"]


def test_a_pattern_leaves_out_what_holds_no_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_all(tmp_path, ["train.jsonl", "test.jsonl"])
    (tmp_path / "README.md").write_text("about")
    assert names(f"{tmp_path}/*") == ["test.jsonl", "train.jsonl"]
    assert "several splits, which are all used: test, train" in caplog.text


def test_a_home_directory_is_found_as_the_shell_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "rows.jsonl", range(1))
    assert names("~/rows.jsonl") == ["rows.jsonl"]
    with pytest.raises(UsageError, match="braces are expanded by a shell only"):
        find_files(tmp_path / "{a,b}.jsonl")


def examples_of(home: Path, source: Path | None = None, **data: Any) -> Examples:
    data = {"format": "prompt_completion", **data}
    source = None if "mix" in data else source or home / "train.jsonl"
    config = run_config("sft", home, source, home / "run", data_section=data)
    return prepare_examples(load_config(config), chat_tokenizer("qwen3"))


def test_a_file_of_ones_own_is_evaluated_and_not_trained_on(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", range(100))
    write(tmp_path / "own.jsonl", range(90, 130))
    examples = examples_of(tmp_path, eval_source=str(tmp_path / "own.jsonl"))
    assert examples.held_out is not None
    assert (len(examples.train.dataset), len(examples.held_out.dataset)) == (90, 40)
    assert examples.train.dropped["equal to a held-out row"].count == 10
    assert examples.held_out.report().startswith(f"{tmp_path}/own.jsonl (data.eval_source): 40 rows, 40 used")
    assert examples.train.report().startswith(f"{tmp_path}/train.jsonl: 100 rows, 90 used")
    fewer = examples_of(tmp_path, eval_source=str(tmp_path / "own.jsonl"), eval_rows=5)
    assert fewer.held_out is not None
    assert len(fewer.held_out.dataset) == 5
    assert fewer.train.duplicates == 0  # rows of that file which are not used are no copies


def test_what_cannot_be_evaluated_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", range(10))
    with pytest.raises(UsageError, match="no file"):
        examples_of(tmp_path, eval_source=str(tmp_path))
    with pytest.raises(UsageError, match=r"data\.eval_rows: 0 would be ignored"):
        examples_of(tmp_path, eval_source="x.jsonl", eval_rows=0)


def write_lines(path: Path, lines: list[str]) -> str:
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def test_dropped_rows_of_an_eval_source_have_their_own_numbers(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", range(10))
    good, empty = '{"prompt": "evq", "completion": "eva"}', '{"prompt": "x", "completion": " "}'
    null = '{"prompt": null, "completion": null}'
    own = write_lines(tmp_path / "own.jsonl", [empty, good, null, null])
    examples = examples_of(tmp_path, eval_source=own)
    assert examples.held_out is not None
    assert [line.partition(" (data.eval_source): ")[2] for line in examples.held_out.examples_dropped()] == [
        "1 with an empty answer, the first is row 1: x |",
        "2 null, the first is row 3: null | null",
    ]
    assert examples.train.note == ""  # nothing of the training file is left out
    with pytest.raises(UsageError, match=r"own\.jsonl \(data\.eval_source\): 3 bad rows, 1 of them with an empty"):
        examples_of(tmp_path, eval_source=own, bad_rows="fail")
    for lines in ([empty], [null], [empty, null]):
        own = write_lines(tmp_path / "bad.jsonl", lines)
        with pytest.raises(UsageError, match=rf"\(data\.eval_source\): {len(lines)} rows, 0 used; dropped 1"):
            examples_of(tmp_path, eval_source=own)


def test_a_bad_row_that_the_default_holds_out_is_counted(tmp_path: Path) -> None:
    bad = [f'{{"prompt": "q{n}", "completion": " "}}' for n in range(49)]
    write_lines(tmp_path / "train.jsonl", [*bad, '{"prompt": "p", "completion": "c"}'])
    examples = examples_of(tmp_path)
    assert examples.held_out is None
    assert examples.train.dropped["with an empty answer"].count == 49
    assert examples.train.total == 50


def test_rows_of_a_mixture_are_named_with_their_file(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", range(10))
    bad = write_lines(tmp_path / "b.jsonl", ['{"prompt": "p", "completion": "c"}', '{"prompt": "x", "completion": ""}'])
    mix = [{"source": str(tmp_path / "train.jsonl")}, {"source": bad}]
    (line,) = examples_of(tmp_path, mix=mix).train.examples_dropped()
    assert f"the first is row 2 of {bad}: x" in line


def test_the_training_file_as_its_own_eval_source_is_refused_with_a_fix(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", range(10))
    with pytest.raises(UsageError, match=r"10 are equal to held-out rows.*give other rows as data\.eval_source"):
        examples_of(tmp_path, eval_source=str(tmp_path / "train.jsonl"))


def test_the_question_of_a_single_row_is_not_shared(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", range(1))
    assert examples_of(tmp_path, eval_rows=0).train.sharing == 0


def test_a_missing_part_of_a_table_is_refused(tmp_path: Path) -> None:
    parts = ["train-00000-of-00002-ab.jsonl", "train-00001-of-00002-cd.jsonl"]
    write_all(tmp_path / "data", [*parts, "test-00000-of-00002.jsonl"])
    assert names(tmp_path) == parts
    (tmp_path / "data" / parts[0]).unlink()
    with pytest.raises(UsageError, match=r"only 1 of 2 files train-\*-of-00002 are here") as caught:
        names(tmp_path)
    assert "by a pattern" in str(caught.value.fix)
    assert names(f"{tmp_path}/data/train-*") == parts[1:]


def test_directories_behind_links_are_read_once(tmp_path: Path) -> None:
    write_all(tmp_path, ["home/a.jsonl", "other/b.jsonl"])
    (tmp_path / "home/more").symlink_to(tmp_path / "other")
    (tmp_path / "other/back").symlink_to(tmp_path / "home/more")
    assert names(tmp_path / "home") == ["a.jsonl", "b.jsonl"]


def test_files_that_are_not_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "data-00000-of-00001.arrow").write_bytes(b"x")
    with pytest.raises(UsageError, match=r"nor a \.csv, \.txt or \.md, but data-00000-of-00001\.arrow"):
        find_files(tmp_path)
    write_all(tmp_path, ["a.jsonl"])
    (tmp_path / "b.jsonl.xz").write_bytes(b"x")
    (line,) = describe_left_out(str(tmp_path), find_files(tmp_path))
    assert "2 files are left out: b.jsonl.xz (only .jsonl is read), data-00000-of-00001.arrow" in line


def test_a_card_with_directories_says_what_its_subsets_are(tmp_path: Path) -> None:
    write_all(tmp_path, ["en/train.jsonl", "fr/other.jsonl"])
    subsets = ", ".join(f"{{config_name: {name}, data_dir: {name}}}" for name in ("en", "fr"))
    (tmp_path / "README.md").write_text(f"---\nconfigs: [{subsets}]\n---\nAbout\n")
    assert names(tmp_path, subset="fr") == ["other.jsonl"]
    with pytest.raises(UsageError, match=r"data\.subset names one of several"):
        names(tmp_path)
