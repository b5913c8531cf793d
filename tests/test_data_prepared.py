"""From files to arrow files: the examples that the tokenizing function makes, every row accounted for, cached and constant."""

import os
import shutil
import signal
import subprocess
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import prepared_process
import pyarrow as pa
import pytest
from golden import Golden

from cogumi.core.durability import lock_directory
from cogumi.core.errors import UsageError
from cogumi.data import cache as module
from cogumi.data import sources as reading
from cogumi.data.cache import Data, Prepared, Selection, Source, prepare, tokenizer_identity
from cogumi.data.encoding import ID_LISTS, MASK_LISTS
from cogumi.data.fim import FimConfig
from cogumi.data.rows import Chunk, Dropped, count_dropped, excerpt_of
from cogumi.data.source_files import files_identity
from tests.fim_examples import tokenize_for_sft


def words(rows: pl.DataFrame, first_row: int) -> Chunk:
    """A token a word, its length; rows with "bad" in them and empty ones make none."""
    dropped: dict[str, Dropped] = {}
    ids: list[list[int]] = []
    for row, text in enumerate(rows["text"], first_row):
        reasons = {"null": text is None, "bad": "bad" in (text or ""), "longer than 9 tokens": len(text or "") > 99}
        if any(reasons.values()):
            count_dropped(dropped, next(reason for reason, applies in reasons.items() if applies), row, str(text)[:80])
        else:
            ids.append([len(word) for word in text.split()])
    masks = [[0] * (len(token_ids) - 1) + [1] for token_ids in ids]
    table = pa.table({"input_ids": pa.array(ids, ID_LISTS), "completion_mask": pa.array(masks, MASK_LISTS)})
    return Chunk(table, dropped)


def source(path: Path, texts: list[str | None], weight: float = 1.0, tokenize: Any = words) -> Source:
    pl.DataFrame({"other": range(len(texts)), "code": texts}, schema_overrides={"code": pl.String}).write_parquet(path)
    return Source(path.name, [path], {"text": "code"}, tokenize, files_identity([path]), "words", weight)


def run(sources: list[Source], tmp_path: Path, **selection: Any) -> Prepared:
    return prepare(sources, Selection(**selection), {}, cache_dir=tmp_path / "cache")


def numbered(count: int, offset: int = 0) -> list[str]:
    """Different texts of three tokens, one for each digit."""
    return [" ".join("x" * (int(digit) + 1) for digit in f"{i:03}") for i in range(offset, offset + count)]


def texts_of(data: Data | None) -> list[list[int]]:
    assert data is not None
    return [list(token_ids) for token_ids in data.dataset["input_ids"]]


def set_of(data: Data | None) -> set[tuple[int, ...]]:
    return set(map(tuple, texts_of(data)))


def expected(texts: list[str]) -> list[list[int]]:
    return [[len(word) for word in text.split()] for text in texts]


def test_every_row_becomes_what_it_would_alone(tmp_path):
    texts = numbered(40)
    made = run([source(tmp_path / "rows.parquet", texts)], tmp_path)
    assert texts_of(made.train) == expected(texts)  # in the order of the file
    assert made.held_out is None
    assert made.train.report() == "rows.parquet: 40 rows, 40 used"
    assert made.train.learned == 40
    assert made.train.lengths == {3: 40}


def test_fim_in_batches_is_fim_at_once(tmp_path, sources, tiny_model, monkeypatch):
    """The examples of many small batches are those of the whole frame, dropped rows or not."""
    from transformers import AutoTokenizer

    tokenizer, config = AutoTokenizer.from_pretrained(tiny_model), FimConfig(fim_rate=0.9, max_length=256)
    monkeypatch.setattr(reading, "BATCH_BYTES", 20_000)

    def tokenize(rows: pl.DataFrame, first_row: int) -> Chunk:
        data = tokenize_for_sft(rows, tokenizer, config, first_row=first_row)
        return Chunk(data.dataset.data.table, {reason: Dropped(n, first_row, "") for reason, n in data.dropped.items()})

    one = source(tmp_path / "code.parquet", [*sources, None], tokenize=tokenize)
    made = run([replace(one, columns={"source": "code"})], tmp_path)
    whole = tokenize_for_sft(pl.DataFrame({"source": [*sources, None]}), tokenizer, config)
    assert made.train.dataset.data.column("input_ids").num_chunks > 3
    assert made.train.dataset["input_ids"][:] == whole.dataset["input_ids"][:]
    assert made.train.dataset["completion_mask"][:] == whole.dataset["completion_mask"][:]
    assert {reason: each.count for reason, each in made.train.dropped.items()} == whole.dropped
    assert made.train.learned == sum(map(sum, whole.dataset["completion_mask"]))


def test_dropped_rows_are_named_by_their_place_in_the_source(tmp_path):
    texts: list[str | None] = [*numbered(50), "bad one", None, "bad two", "long " * 30]
    one = source(tmp_path / "rows.parquet", texts)
    whole = run([one], tmp_path)
    assert whole.train.dropped == {
        "bad": Dropped(2, 51, "bad one"),
        "null": Dropped(1, 52, "None"),
        "longer than 9 tokens": Dropped(1, 54, ("long " * 16).strip()),
    }
    assert whole.train.total == 54 == len(whole.train.dataset) + 4
    # With only some of the rows chosen the place is still that in the file.
    some = run([one], tmp_path, max_rows=40, seed=3)
    for dropped in some.train.dropped.values():
        assert (texts[dropped.row - 1] or "None").startswith(dropped.excerpt)
    assert some.train.note == "40 of 54 rows chosen"


def test_bad_rows_fail_names_them_and_long_rows_are_not_bad(tmp_path):
    long = source(tmp_path / "long.parquet", [*numbered(5), "long " * 30])
    assert prepare([long], Selection(), {}, bad_rows="fail", cache_dir=tmp_path / "cache").train.total == 6
    one = source(tmp_path / "rows.parquet", [*numbered(5), "bad one", None])
    for _ in range(2):  # prepared, then from the cache
        with pytest.raises(UsageError) as caught:
            prepare([one], Selection(), {}, bad_rows="fail", cache_dir=tmp_path / "cache")
        assert str(caught.value) == (
            "rows.parquet: 2 bad rows, 1 of them bad; the first is row 6: bad one; repair them, or drop them with "
            "data.bad_rows: drop"
        )


def test_held_out_rows_are_never_trained_on_wherever_they_stand(tmp_path):
    texts = numbered(60)
    doubled = [*texts, *texts[::-1], *texts[10:20]]
    made = run([source(tmp_path / "rows.parquet", doubled)], tmp_path, eval_rows=8)
    held_out, trained = set_of(made.held_out), set_of(made.train)
    assert len(held_out) == 8 == len(texts_of(made.held_out))
    assert not held_out & trained
    assert held_out | trained == {tuple(each) for each in expected(texts)}
    equal = made.train.dropped["equal to a held-out row"]
    assert equal.count == 130 - 8 - len(texts_of(made.train))
    assert f"{equal.count} equal to a held-out row" in made.train.report()
    # Another order of the same rows has the same rows held out.
    again = run([source(tmp_path / "turned.parquet", doubled[::-1])], tmp_path, eval_rows=8)
    assert set_of(again.held_out) == held_out


def test_duplicates_are_counted_and_dropped_on_request(tmp_path):
    texts = numbered(30)
    one = source(tmp_path / "rows.parquet", [*texts, *texts[:12], texts[0], None, None])
    kept = run([one], tmp_path)
    assert kept.train.duplicates == 13
    assert "13 equal to an earlier row are kept (data.deduplicate: true drops them)" in kept.train.report()
    assert len(kept.train.dataset) == 43
    dropped = run([one], tmp_path, deduplicate=True)
    assert texts_of(dropped.train) == expected(texts)  # the first of each; nulls are no copies
    assert dropped.train.dropped["equal to an earlier row"] == Dropped(13, 31, texts[0])
    assert dropped.train.dropped["null"].count == 2
    assert "kept" not in dropped.train.report()


def test_a_mix_has_the_shares_asked_for_and_repeats_nobody(tmp_path):
    a = source(tmp_path / "a.parquet", numbered(900), weight=9)
    b = source(tmp_path / "b.parquet", numbered(100, 900), weight=1)

    made = run([a, b], tmp_path, eval_rows=20)
    assert made.sources == [
        "a.parquet: 882 of 900 rows (98%), 18 held out",
        "b.parquet: 98 of 100 rows (98%), 2 held out",
    ]
    assert len(made.train.dataset) == 980
    assert len(set_of(made.train) | set_of(made.held_out)) == 1000
    for some, shares in (({"max_rows": 50}, (45, 5)), ({"fraction": 0.1}, (90, 10))):
        used = [line.split(" of ")[0] for line in run([a, b], tmp_path, **some).sources]
        assert used == [f"a.parquet: {shares[0]}", f"b.parquet: {shares[1]}"]


def test_equal_rows_of_two_sources_do_not_straddle_either(tmp_path, golden: Golden):
    a, b = source(tmp_path / "a.parquet", numbered(40)), source(tmp_path / "b.parquet", numbered(60, 20)[::-1])
    made = run([a, b], tmp_path, eval_rows=10)
    held_out = set_of(made.held_out)
    assert len(held_out) == 10
    assert not held_out & set_of(made.train)
    assert made.train.dropped["equal to a held-out row"].count > 0
    once = run([a, b], tmp_path, eval_rows=10, deduplicate=True)
    assert set_of(once.held_out) == held_out
    assert len(set_of(once.train)) == len(texts_of(once.train))
    assert not set_of(once.train) & held_out
    with golden.raises("data", place="c.parquet", message="9 to earlier ones"):
        run([a, source(tmp_path / "c.parquet", numbered(9))], tmp_path, deduplicate=True)


def test_nothing_usable_is_said_and_not_kept(tmp_path, golden: Golden):
    with golden.raises("data", message="rows.parquet: 2 rows, 0 used"):
        run([source(tmp_path / "rows.parquet", ["bad", None])], tmp_path)
    with golden.raises("data", place="rows.parquet", message="of its 3 rows 3 are held out"):
        run([source(tmp_path / "rows.parquet", numbered(3))], tmp_path, eval_rows=3)
    with golden.raises("data", place="rows.parquet"):
        run([source(tmp_path / "rows.parquet", [])], tmp_path)
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_same_data_is_prepared_once(tmp_path, caplog):
    one = source(tmp_path / "rows.parquet", numbered(20))
    first = run([one], tmp_path, eval_rows=2)

    def refuse(rows: pl.DataFrame, first_row: int) -> Chunk:
        raise AssertionError("prepared again")

    caplog.set_level("INFO")
    again = run([replace(one, tokenize=refuse)], tmp_path, eval_rows=2)
    assert texts_of(again.train) == texts_of(first.train)
    assert texts_of(again.held_out) == texts_of(first.held_out)
    assert (again.train.report(), again.train.lengths) == (first.train.report(), first.train.lengths)
    assert f"prepared data from cache {first.directory}" in caplog.text


def test_every_setting_has_a_key_of_its_own(tmp_path, tiny_model):
    """Whatever shapes the data is changed one at a time: no two keys are equal, and the same settings give the same one."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)

    def key(sources: list[Source] | None = None, parts: Any = None, **selection: Any) -> str:
        parts = {"tokenizer": tokenizer_identity(tokenizer)} if parts is None else parts
        return prepare([one] if sources is None else sources, Selection(**selection), parts, cache_dir=tmp_path).key

    one = source(tmp_path / "rows.parquet", numbered(20))
    keys = [key()]
    tokenizer(["a", "b c"], padding=True, truncation=True, max_length=4)  # leaves its mark on the backend
    assert key() == keys[0]
    keys += [key(eval_rows=2), key(max_rows=9), key(fraction=0.5), key(deduplicate=True), key(seed=1), key([one, one])]
    changes = [{"options": "other"}, {"columns": {"text": "code", "more": "other"}}, {"name": "other"}, {"weight": 2.0}]
    keys += [key([replace(one, **change)]) for change in changes]
    identity = files_identity([tmp_path / "rows.parquet"])
    os.utime(tmp_path / "rows.parquet", ns=(1, 1))
    assert files_identity([tmp_path / "rows.parquet"]) != identity
    keys.append(key([replace(one, identity=files_identity([tmp_path / "rows.parquet"]))]))
    other = AutoTokenizer.from_pretrained(tiny_model)
    other.add_tokens(["<new>"])
    keys.append(key(parts={"tokenizer": tokenizer_identity(other)}))
    parts = {"chat_template": "{{ messages }}", "pad_token": "<fim_middle>", "bos_token": "<fim_prefix>"}
    for name, value in (parts | {"add_bos_token": True}).items():
        setattr(other, name, value)
        keys.append(key(parts={"tokenizer": tokenizer_identity(other)}))
    keys.append(key(parts={"tokenizer": tokenizer_identity(tokenizer), "max_length": 5}))
    assert len(set(keys)) == len(keys)


def test_code_and_libraries_are_part_of_the_key(tmp_path, monkeypatch):
    one = source(tmp_path / "rows.parquet", numbered(20))
    keys = {run([one], tmp_path).key}
    known = module.code_and_libraries()
    for name in known:
        monkeypatch.setattr(module, "code_and_libraries", lambda name=name: {**known, name: "other"})
        keys.add(run([one], tmp_path).key)
    assert len(keys) == 1 + len(known) >= 6


PROCESS = textwrap.dedent(
    """
    import sys, time
    from pathlib import Path
    sys.path.insert(0, sys.argv[1] + "/tests")
    from test_data_prepared import words, Source, Selection, prepare
    path, home, seconds, log = Path(sys.argv[2]), Path(sys.argv[3]), float(sys.argv[4]), Path(sys.argv[5])
    def slow(rows, first_row):
        with log.open("a") as file:
            file.write("tokenized\\n")
        time.sleep(seconds)
        return words(rows, first_row)
    made = prepare([Source("rows", [path], {"text": "code"}, slow, "same", "")], Selection(), {}, cache_dir=home)
    print(len(made.train.dataset))
    """
)


def process(tmp_path: Path, seconds: float, environment: dict[str, str]) -> "subprocess.Popen[str]":
    root = str(Path(__file__).parents[1])
    arguments = [root, str(tmp_path / "rows.parquet"), str(tmp_path / "cache"), str(seconds), str(tmp_path / "log")]
    return subprocess.Popen(
        [*prepared_process.python(environment), "-c", PROCESS, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def wait_for_line(path: Path) -> None:
    for _ in range(600):
        if path.exists() and path.read_text():
            return
        time.sleep(0.05)
    raise AssertionError("nothing was tokenized")


def test_two_processes_prepare_once_and_a_killed_one_leaves_nothing(tmp_path, for_commands):
    source(tmp_path / "rows.parquet", numbered(20))
    killed = process(tmp_path, 600, for_commands)
    wait_for_line(tmp_path / "log")
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".unfinished"]
    (tmp_path / "log").unlink()

    both = [process(tmp_path, 1, for_commands) for _ in range(2)]
    outputs = [each.communicate(timeout=60) for each in both]
    assert [out for out, _ in outputs] == ["20\n", "20\n"], outputs
    assert (tmp_path / "log").read_text() == "tokenized\n"
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_leftovers_of_other_keys_are_swept_unless_somebody_writes_there(tmp_path):
    for name in ("dead", "alive"):
        (tmp_path / "cache" / f"{name}.unfinished").mkdir(parents=True)
    with lock_directory(tmp_path / "cache" / "alive.unfinished"):
        run([source(tmp_path / "rows.parquet", numbered(20))], tmp_path)
    assert sorted(path.name for path in (tmp_path / "cache").glob("*.unfinished")) == ["alive.unfinished"]


def test_a_function_that_loses_rows_is_found_out(tmp_path):
    def loses(rows: pl.DataFrame, first_row: int) -> Chunk:
        return Chunk(words(rows, first_row).table.slice(1))

    with pytest.raises(RuntimeError, match="20 rows became 19 examples and 0 dropped"):
        run([source(tmp_path / "rows.parquet", numbered(20), tokenize=loses)], tmp_path)


def test_lengths_of_pairs_and_quantiles(tmp_path):
    names = ("prompt_ids", "chosen_ids", "rejected_ids")

    def pairs(rows: pl.DataFrame, first_row: int) -> Chunk:
        return Chunk(pa.table({name: pa.array([list(range(n)) for n in rows[name]], ID_LISTS) for name in names}))

    rng = np.random.default_rng(0)
    frame = pl.DataFrame({name: rng.integers(1, 50, 200) for name in names})
    frame.write_parquet(tmp_path / "pairs.parquet")
    one = Source("p", [tmp_path / "pairs.parquet"], {name: name for name in frame.columns}, pairs, "", "")
    lengths = run([one], tmp_path).train.lengths
    true = np.sort(frame["prompt_ids"] + frame.select(pl.max_horizontal("chosen_ids", "rejected_ids")).to_series())
    assert lengths.total() == 200
    assert lengths.tokens == true.sum()
    for share in (0.01, 0.5, 0.9, 1.0):
        assert lengths.quantile(share) == true[int(np.ceil(share * 200)) - 1]
    buckets = lengths.buckets(16)
    assert len(buckets) <= 16
    assert all(count == ((first <= true) & (true <= last)).sum() for first, last, count in buckets)
    assert sum(count for _, _, count in buckets) == 200


def test_trl_maps_prepared_data_without_changing_it(tmp_path, tiny_model):
    """SFTTrainer takes the mapped file, shuffles it, and leaves the prepared files as they are."""
    import trl
    from torch.utils.data import RandomSampler
    from transformers import AutoModelForCausalLM, AutoTokenizer

    made = run([source(tmp_path / "rows.parquet", numbered(20))], tmp_path)
    before = (made.directory / "train.arrow").read_bytes()
    options = {"completion_only_loss": True, "max_length": None, "report_to": "none", "bf16": False}
    args = trl.SFTConfig(str(tmp_path / "out"), **options)
    model, tokenizer = (kind.from_pretrained(tiny_model) for kind in (AutoModelForCausalLM, AutoTokenizer))
    trainer = trl.SFTTrainer(model, args, train_dataset=made.train.dataset, processing_class=tokenizer)
    assert isinstance(trainer._get_train_sampler(), RandomSampler)
    rows = expected(numbered(20))
    assert trainer.train_dataset["input_ids"][:] == rows
    assert trainer.train_dataset["labels"][:] == [[-100, -100, ids[-1]] for ids in rows]
    assert (made.directory / "train.arrow").read_bytes() == before
    shutil.rmtree(made.directory)
    assert trainer.train_dataset[3]["input_ids"] == rows[3]  # mapped files outlive their names


def test_an_excerpt_is_at_most_eighty_characters() -> None:
    assert excerpt_of("x" * 80) == "x" * 80
    assert excerpt_of("x" * 81) == "x" * 79 + "…"
    assert excerpt_of("two\n  lines") == "two lines"
