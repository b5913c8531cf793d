"""The table of docs/measured.md agrees with `cogumi preflight` of each row."""

import pytest
from big_models import FORMATS, PAGE, row

QUICK = {("Llama-3.1-8B", "load_in_4bit"), ("Llama-3.1-8B", "GPTQ"), ("gpt-oss-20b", "load_in_4bit")}
CASES = [(model, kind) for model, formats in FORMATS.items() for kind in formats]


@pytest.mark.slow("a step of a released model's shapes")
@pytest.mark.parametrize(
    ("model", "kind"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.sweep) for case in CASES],
)
def test_a_row_is_what_preflight_says(model: str, kind: str) -> None:
    assert row(model, kind) in PAGE.read_text(encoding="utf-8").splitlines()


def test_the_page_has_each_row_once() -> None:
    written = [
        line.split(" | ")[:2] for line in PAGE.read_text(encoding="utf-8").splitlines() if line.count(" | ") == 6
    ]
    assert written[0] == ["| model", "format"]
    assert written[1:] == [[f"| {model}", kind] for model, kind in CASES]
