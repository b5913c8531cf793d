"""The golden texts keep to the tests that say them."""

import golden as golden_texts
import pytest


def test_every_entry_has_its_test(request: pytest.FixtureRequest) -> None:
    lost = [
        f"tests/golden/{command}.txt: {test}"
        for command, texts in golden_texts.STORED.items()
        for test in texts
        if golden_texts.gone(test, request.config)
    ]
    assert not lost, "the tests of these entries are gone; `make golden` rewrites the files"
