"""report.html: one file with the facts of a run, at whatever stage it is, that holds no script, no link out and no secret."""

import importlib
import json
import os
import re
import shutil
from base64 import b64decode
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from finished_runs import HUB_TOKEN, FinishedRun

import cogumi
from cogumi.core.errors import UsageError
from cogumi.core.run_directory import append_jsonl, read_json, read_jsonl, write_json
from cogumi.forecast.preflight_report import Line, PreflightReport
from cogumi.methods.preview import Preview, Shares
from cogumi.notebook import completions, figures
from cogumi.notebook.figures import format_number
from cogumi.notebook.html_components import LOOKS, render_html, style
from cogumi.notebook.panel import write_report
from tests.test_notebook_figures import contrast, words_in

SECRET = HUB_TOKEN
OF_ENVIRONMENT = "a-key&that<looks>like-nothing"
HOSTILE = "</script><script>alert(1)</script><img src=http://evil.example/x onerror=alert(2)>\"'&lt;"
VOID = {"meta", "img", "br", "hr", "link", "input"}


@pytest.fixture
def finished(finished_sft: FinishedRun) -> Path:
    """A real run that came to its end, with samples on the way, which no test changes."""
    assert (finished_sft.home / "merged").is_dir()
    return finished_sft.home


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of it, to be changed."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


class Page(HTMLParser):
    """A page as a browser takes it in: elements, what they refer to, the text under each heading."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.sections: dict[str, str] = {"": ""}
        self.heading = ""
        self.unbalanced: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "h2":
            self.heading = ""
        self.handle_data(dict(attrs).get("aria-label") or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "img":
            image = b64decode((dict(attrs)["src"] or "").partition(",")[2]).decode()
            self.handle_data(f"{dict(attrs)['alt']}: {words_in(image)}")  # what is said of a picture, and what is in it

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.unbalanced.append(tag)

    def handle_data(self, data: str) -> None:
        if "h2" in self.open:
            self.heading = data
        if "style" not in self.open:
            self.sections[self.heading] = self.sections.get(self.heading, "") + data

    @property
    def text(self) -> str:
        return "".join(self.sections.values())


def page_of(run: Path) -> Page:
    return Page(write_report(run).read_text(encoding="utf-8"))


def check_self_contained(page: Page) -> None:
    """Well-formed, with nothing that runs and nothing that is fetched."""
    assert not page.unbalanced
    assert not page.open
    for tag, attributes in page.tags:
        assert tag not in ("script", "link", "iframe", "object"), tag
        assert not [name for name in attributes if name.startswith("on")]
        for name in ("src", "href", "xlink:href", "action"):
            inside = "data:image/svg+xml;base64," if tag == "img" else "#"
            assert (attributes.get(name) or inside).startswith(inside), (tag, attributes)
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    targets = [attributes["href"] for tag, attributes in page.tags if tag == "a"]
    assert targets
    assert {str(target)[1:] for target in targets} <= set(ids)


def test_a_finished_run_is_all_there(run: Path) -> None:
    path = write_report(run)
    assert path == run / "report.html"
    assert path.stat().st_size < 1_500_000
    page = page_of(run)
    check_self_contained(page)
    text = path.read_text()
    assert not re.search(r"@import|url\(\s*['\"]?(?!#)", text)
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text
    assert ("html", {"lang": "en"}) in page.tags
    assert [tag for tag, _ in page.tags].count("h1") == 1
    assert {tag for tag, _ in page.tags if re.fullmatch(r"h\d", tag)} <= {"h1", "h2", "h4"}
    images = [attributes["alt"] or "" for tag, attributes in page.tags if tag == "img"]
    assert len(images) > 3 + 3  # curves; lengths; change by layer, of attention and the rest
    assert all(len(alternative) > 30 for alternative in images)
    assert all("scope" in attributes for tag, attributes in page.tags if tag == "th")
    headings = "Verdict, What it was, Flags, Curves, Completions, What broke, Data, Memory, Merge, Checkpoints"
    assert list(page.sections)[1:] == [*headings.split(", "), "Log", "Configuration"]

    verdict = read_json(run / "verdict.json")
    assert verdict["passed"] == page.sections[""].lstrip().startswith("run: passed")
    for check in verdict["checks"]:
        assert check["figure"] in page.sections["Verdict"]
    assert "cogumi compare base RUN_DIR --panel" in page.sections["What broke"]
    said = page.sections["What it was"]
    came_to = read_json(run / "metrics.json")
    for fact in ("sft, LoRA", "6 of 6", f"{came_to['tokens']:,}", f"${came_to['cost']:.2f}", "no GPU"):
        assert fact in said, fact
    for flag in read_json(run / "flags.json")["flags"]:
        assert flag["name"] in page.sections["Flags"]
    loss = [row["loss"] for row in read_jsonl(run / "metrics.jsonl") if "loss" in row]
    assert f"loss from {format_number(loss[0])} to {format_number(loss[-1])}" in page.sections["Curves"]
    assert "before the training" in page.sections["Completions"]
    assert "after step 6" in page.sections["Completions"]
    for row in read_jsonl(run / "samples.jsonl"):
        assert row["completion"] in page.sections["Completions"] or row["step"] not in (0, 6)
        assert row["middle"] in page.sections["Completions"]
    assert "elements read back" in page.sections["Merge"]
    assert "q_proj" in page.sections["Merge"]
    assert "checkpoint-6" in page.sections["Checkpoints"]
    assert "is saved and verified" in page.sections["Log"]
    assert "max_steps: 6" in page.sections["Configuration"]


@pytest.mark.parametrize(
    ("which", "method", "curve"),
    [
        ("finished_dpo", "dpo, LoRA", "rewards/margins"),
        ("finished_gspo", "gspo, LoRA", "reward"),
        ("finished_qlora", "sft, LoRA", "loss"),
    ],
)
def test_the_other_methods_are_told_with_their_own_figures(
    which: str, method: str, curve: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    left: FinishedRun = request.getfixturevalue(which)
    run = Path(shutil.copytree(left.home, tmp_path / "run"))
    page = page_of(run)
    check_self_contained(page)
    assert method in page.sections["What it was"]
    for check in read_json(run / "verdict.json")["checks"]:
        assert check["figure"] in page.sections["Verdict"]
    values = left.result.series(curve)
    assert f"from {format_number(values[0])} to {format_number(values[-1])}" in page.sections["Curves"]


def test_no_secret_is_in_it(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", OF_ENVIRONMENT)
    long = "x" * 5990 + OF_ENVIRONMENT  # cut in the middle of it
    for step in (0, 6):
        append_jsonl(run / "samples.jsonl", {"step": step, "prompt": long, "completion": long})
    with (run / "run.log").open("a") as log:
        log.write(f"2026-11-22 18:39:13,856 INFO asked with {SECRET} and {OF_ENVIRONMENT}\n")
    status = read_json(run / "status.json")
    write_json(run / "status.json", {**status, "reason": f"no answer from https://me:{'pass' * 3}@host with {SECRET}"})
    append_jsonl(run / "samples.jsonl", {"step": 6, "prompt": "the key?", "completion": OF_ENVIRONMENT})
    append_jsonl(run / "samples.jsonl", {"step": 0, "prompt": "the key?", "completion": "a-key&that"})
    text = write_report(run).read_text()
    page = Page(text)
    assert "asked with <redacted> and <redacted>" in page.sections["Log"]
    assert "the key?" in page.text
    for hidden in (SECRET, "s3cret", OF_ENVIRONMENT, "looks&gt;like", "xa-key", "that&lt;", "passpass"):
        assert hidden not in text
        assert hidden not in page.text


def test_what_a_model_writes_is_only_text(run: Path) -> None:
    for step, completion in ((0, "before"), (6, HOSTILE)):
        sample = {"step": step, "prompt": HOSTILE, "completion": completion, "answer": HOSTILE}
        append_jsonl(run / "samples.jsonl", sample)
    shown = [{"prompt": HOSTILE, "completion": HOSTILE, "reward": 0.5}]
    append_jsonl(run / "rollouts.jsonl", {"step": 1, "reward": [0.5], "shown": shown})
    with (run / "run.log").open("a") as log:
        log.write(f"2026-11-22 18:39:13,856 WARNING {HOSTILE}\n")
    with (run / "config.yaml").open("a") as config:
        config.write(f"# {HOSTILE}\n")
    page = page_of(run)
    check_self_contained(page)
    assert page.text.count(HOSTILE) >= 6


def test_rewards_and_sampled_completions_of_a_gspo_run(run: Path) -> None:
    rows = [{"step": n, "reward": [0.1 * n, 0.2 * n], "shown": [{"prompt": "p", "completion": f"c{n}", "reward": 0.1 * n}]}
            for n in range(1, 5)]  # fmt: skip
    for row in rows:
        append_jsonl(run / "rollouts.jsonl", row)
    page = page_of(run)
    assert "mean reward 0.15 in the first quarter of the steps, 0.6 in the last" in page.sections["Rewards"]
    shown = page.sections["Completions"]
    assert "c1" in shown
    assert "c4" in shown
    assert "c2" not in shown


def test_red_flags_and_failed_checks_are_said_first(run: Path) -> None:
    flag = {"evidence": "loss 9", "cause": "rate too high", "knob": "train.learning_rate"}
    red = {"name": "loss trend", "level": "red", **flag}
    gone = {"name": "gradient norm", "level": "red", **flag}
    found = {"step": 6, "time": 0.0, "flags": [red], "was_red": [{"step": 2, **red}, {"step": 3, **gone}]}
    write_json(run / "flags.json", found)
    write_json(run / "verdict.json", {**read_json(run / "verdict.json"), "passed": True})
    page = page_of(run)
    assert "finished, RED: loss trend" in page.sections[""]
    said = page.sections["Flags"]
    was_red = "⚑2 red at step 3: gradient norm"
    for words in ("RED loss trend", "loss 9", "rate too high", "train.learning_rate", was_red):
        assert words in said
    assert "⚑1 red at step 2: loss trend" in page.sections["Curves"]

    checks = [{"name": n, "figure": "f", "requirement": "r", "passed": n == "good"} for n in ("good", "bad")]
    write_json(run / "verdict.json", {"passed": False, "checks": checks, "flags": [], "was_red": []})
    page = page_of(run)
    assert "FAIL (finished)" in page.sections[""]
    assert page.sections["Verdict"].index("bad") < page.sections["Verdict"].index("good")
    assert "1 of 2 checks are met, but loss trend is RED" in page.sections["Verdict"]


@pytest.mark.parametrize("state", ["starting", "running", "died", "refused", "failed", "bare"])
def test_a_run_at_any_stage(state: str, run: Path, tmp_path: Path) -> None:
    for name in ("verdict.json", "DONE", "metrics.json", "start.json"):
        (run / name).unlink(missing_ok=True)
    status = read_json(run / "status.json")
    if state in ("refused", "starting", "bare"):
        run = tmp_path / state
        run.mkdir()
    if state == "failed":
        with (run / "run.log").open("a") as log:
            log.write("2026-11-22 18:39:13,856 ERROR it failed\nTraceback (most recent call last):\n")
            log.write('  File "x.py", line 1, in <module>\n    boom()\nValueError: <boom>\n')
    died = {"pid": 2**22 - 3, "began": 1.0, "state": "running", "stage": "train"}
    changes = {
        "bare": {"state": "finished"}, "failed": {"state": "failed", "reason": "ValueError: <boom>"}, "died": died,
        "running": {**died, "pid": os.getpid(), "began": psutil.Process().create_time()},
    }  # fmt: skip
    if state == "refused":
        start = {"pid": 1, "host": status["host"], "began": 1.0, "time": 1.0, "refused": "no such key"}
        write_json(run / "start.json", start)
    elif state == "starting":
        (run / "status.json").touch()
    else:
        write_json(run / "status.json", {**status, **changes[state]})
    page = page_of(run)
    check_self_contained(page)
    expected = {
        "starting": "starting", "running": "It is still at work", "died": "disappeared without an exit record",
        "refused": "no such key", "failed": "ValueError: <boom>", "bare": "finished",
    }  # fmt: skip
    assert expected[state] in page.sections[""]
    assert "There is no verdict" in page.sections["Verdict"]
    if state == "failed":
        assert 'File "x.py", line 1, in <module>\n    boom()\nValueError: <boom>' in page.sections["Log"]
    if state == "bare":
        for section in ("Curves", "Completions", "Data", "Memory", "Merge", "Checkpoints", "Configuration"):
            assert re.search(r"\bno(thing|t)?\b", page.sections[section], re.IGNORECASE), section


def test_any_file_may_be_missing(finished: Path, tmp_path: Path) -> None:
    drawn = ("metrics.jsonl", "merged", "decisions.json")  # without them a page takes a tenth of the time
    for name in drawn:
        check_self_contained(page_of(without(finished, tmp_path / name, name)))
    files = [path.name for path in finished.iterdir() if path.name not in ("status.json", "tensorboard", *drawn)]
    assert len(files) > 10
    for name in files:
        check_self_contained(page_of(without(finished, tmp_path / name, name, *drawn)))


def without(finished: Path, run: Path, *names: str) -> Path:
    shutil.copytree(finished, run, ignore=lambda directory, _: names if Path(directory) == finished else ())
    return run


def test_a_long_run_stays_one_small_file(run: Path) -> None:
    keys = ("loss", "reward", "reward_std", "grad_norm", "entropy", "learning_rate", "policy/kl_new_old",
            "policy/clipped_ratio_fraction", "perf/tokens_per_second")  # fmt: skip
    rows = ({"step": n, **dict.fromkeys(keys, n * 7919 % 1009 / 1009)} for n in range(20_000))
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with (run / "run.log").open("a") as log:
        log.writelines(f"2026-11-22 18:39:13,856 INFO decision {n}\n" for n in range(20_000))
    path = write_report(run)
    assert path.stat().st_size < 1_500_000
    assert "the last 300 lines of run.log" in path.read_text()


def test_where_there_is_no_run_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="no run there"):
        write_report(tmp_path / "empty")
    assert not list((tmp_path / "empty").iterdir())


def test_it_is_written_from_a_terminal_and_from_a_run(
    run: Path,
    command_line: Callable[..., tuple[int, str, str]],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = sorted(path.name for path in run.iterdir())
    assert cogumi.attach(run).report() == run / "report.html"
    assert before == sorted(path.name for path in run.iterdir())  # the run had left one: it is replaced
    status, shown, _ = command_line("report", run)
    assert (status, "report.html: one file" in shown) == (0, True)
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.chdir(elsewhere)
    status, shown, _ = command_line("report", run, "--out", ".")
    assert (status, shown.partition(":")[0], os.listdir(elsewhere)) == (0, "report.html", ["report.html"])
    status, shown, wrong = command_line("report", f"{run}x")
    assert (status, shown) == (2, "")
    assert "no run there; there is" in wrong


# -------------------------------------------------------------------------------------------------------------- pieces


def blended(colour: str, page: str) -> str:
    """`#rrggbbaa` over the colour of a page."""
    share = int(colour[7:9], 16) / 255
    parts = [(int(colour[n : n + 2], 16), int(page[n : n + 2], 16)) for n in (1, 3, 5)]
    return "#" + "".join(f"{round(share * over + (1 - share) * under):02x}" for over, under in parts)


def test_text_reads_on_every_background_and_every_edge_on_the_page() -> None:
    report = Path(figures.__file__).with_name("report.css").read_text()
    pages = re.findall(r"--page: (#\w{6}); --ink: (#\w{6})", report)
    assert len(pages) >= 3
    sheet = style() + " ".join(LOOKS.values())
    backgrounds = re.findall(r"background: (#[0-9A-F]{8})\b", sheet)
    assert len(backgrounds) >= 2
    edges = re.findall(r"(?:border-color|border-bottom)[^#;]*(#[0-9A-F]{6})\b", sheet)
    assert len(edges) >= 6
    for page, ink in pages:
        assert contrast(page, ink) >= 4.5
        for background in backgrounds:
            assert contrast(blended(background, page), ink) >= 4.5
        for edge in edges:
            assert contrast(edge, page) >= 3


def preview_of(*examples: list[tuple[str, str]]) -> Preview:
    shares = Shares("rows.jsonl", 10_000, 9_000, {"longer than 24 tokens": 999, HOSTILE: 1}, 3, 0, 250_000, 100_000)
    return Preview(shares, None, (HOSTILE,), ((0, 9, 8_000), (10, 19, 1_000)), tuple(map(tuple, examples)), 24)


def test_a_preview_tells_tokens_apart_by_words_and_underlines_too() -> None:
    actual = preview_of(
        [("context", "Say\n\thi  <b>"), ("learned", f"hi {HOSTILE}\n")],
        [("context", "x"), ("learned", "y"), ("rejected", "z")],
    )
    html = render_html(actual)
    page = Page(html)
    assert not page.unbalanced
    assert "Say\n\thi  <b>learnedhi " + HOSTILE in page.text  # whitespace kept, markup escaped
    kinds = [attributes["class"] for _, attributes in page.tags if attributes.get("class") in ("learned", "rejected")]
    assert kinds == ["learned", "rejected", "learned", "learned", "rejected"]  # the legend first
    assert html.count(">rejected</small>") == 2  # in the legend, and where it stands
    looks = dict(re.findall(r'class="(learned|rejected)" style="[^"]*border-bottom: \d+px (\w+)', html))
    assert looks == {"learned": "solid", "rejected": "double"}
    for fact in ("10,000", "90.0%", "dropped: longer than 24 tokens", "10.0%", "< 0.1%", "40.0%"):
        assert fact in page.text, fact
    assert "max_length 24" in page.text
    assert "rejected" not in Page(render_html(preview_of([("context", "x")]))).text
    prompts = Preview(Shares("p", 1, 1, {}, 0, 0, 0, 0), None, (), (), ((("context", "x"),),))
    assert "<img" not in render_html(prompts)  # whose lengths are not known


def test_a_notebook_draws_the_reports_of_public_functions() -> None:
    """They have no HTML of their own: IPython is told the names of their classes, whose modules it then finds."""
    from IPython.core.formatters import DisplayFormatter

    shell = SimpleNamespace(display_formatter=DisplayFormatter())
    cogumi._draw_reports(shell)
    for name, module in cogumi._REPORTS.items():
        assert getattr(importlib.import_module(module), name).__module__ == module
    drawn, _ = shell.display_formatter.format(PreflightReport("a T4", (Line("stack", "all pinned"),), {}))
    assert "all pinned" in drawn["text/html"]


def test_a_preflight_says_its_states_in_words() -> None:
    lines = (
        Line("stack", "all pinned"),
        Line("time", HOSTILE, "unknown"),
        Line("data", "few", "yellow", "take more"),
        Line("memory", "too much", "red", "set train.x: 1"),
    )
    page = Page(render_html(PreflightReport("a T4", lines, {})))
    assert not page.unbalanced
    for fact in ("RED: it does not fit", "Planned for: a T4", "ok", "?", "note", "set train.x: 1", HOSTILE):
        assert fact in page.text, fact


def test_completions_of_several_runs_side_by_side(finished: Path, run: Path, tmp_path: Path) -> None:
    text = (run / "samples.jsonl").read_text()
    (run / "samples.jsonl").write_text(text.replace('"completion": "', '"completion": "changed'))
    html = completions.side_by_side({"base": finished, "after rl": run})._repr_html_()
    page = Page(html)
    assert not page.unbalanced
    assert "base, before the training" in page.text
    assert "base, after step 6" in page.text
    assert "after rl, after step 6" in page.text
    assert page.text.count("changed") == 4
    assert "what would be right" in page.text
    assert str(completions.side_by_side([finished, run])).count(">Prompt</h4>") == 4

    other = tmp_path / "other"
    other.mkdir()
    append_jsonl(other / "samples.jsonl", {"step": 1, "prompt": "something else", "completion": "x"})
    with pytest.raises(UsageError, match="no prompt was completed in all of them"):
        completions.side_by_side([run, other])
    with pytest.raises(UsageError, match="no completions there yet"):
        completions.side_by_side(tmp_path)


def test_completions_of_white_space_are_told_in_words(run: Path) -> None:
    for step, completion in ((0, " " * 64 + "\n\n"), (9, "\n\t")):
        append_jsonl(run / "samples.jsonl", {"step": step, "prompt": "def f():", "completion": completion})
    shown = [{"prompt": "p", "completion": "\n", "reward": 0.5}]
    append_jsonl(run / "rollouts.jsonl", {"step": 1, "reward": [0.5], "shown": shown})
    said = page_of(run).sections["Completions"]
    for words in ("(only white space, of length 66)", "of length 2", "of length 1"):
        assert words in said


def test_every_row_of_the_data_is_accounted_for_in_decisions_json(finished: Path) -> None:
    parsed = read_json(finished / "decisions.json")["data"]
    assert parsed["max_length"] == 160
    for part in (parsed["train"], parsed["held_out"]):
        assert part["rows"] == part["examples"] + sum(part["dropped"].values())
        assert sum(count for *_, count in part["lengths"]) == part["examples"]
    assert parsed["held_out"]["rows"] == 8
    assert 0 < parsed["train"]["learned"] < parsed["train"]["tokens"]
