"""What an error of the user carries, and the line that it is."""

import pickle
from pathlib import Path

import pytest

from cogumi.config.schema import load_config
from cogumi.core.errors import RefusedAtSetup, UsageError


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (UsageError("broken"), "broken"),
        (UsageError("broken", fix="repair it"), "broken; repair it"),
        (UsageError("no model", key="model.name", fix="name one"), "model.name: no model; name one"),
        (UsageError("is empty", place=Path("a/b.yaml")), "a/b.yaml: is empty"),
        (UsageError("no", place="b.yaml:3", key="train.lr", fix="drop it"), "b.yaml:3: train.lr: no; drop it"),
        (UsageError("train.lr = 0: too low", key="train.lr", place="b.yaml:3"), "b.yaml:3: train.lr = 0: too low"),
        (UsageError("unknown key `train.lr`", key="train.lr"), "unknown key `train.lr`"),
        (UsageError("training was refused", key="train"), "train: training was refused"),
    ],
)
def test_place_key_message_and_fix_are_one_line(error: UsageError, line: str) -> None:
    assert str(error) == line
    for same in (RefusedAtSetup.like(error), pickle.loads(pickle.dumps(error))):  # as from another process
        assert str(same) == line
        assert vars(same) == vars(error)


def test_many_names_are_listed_in_part_and_counted(tmp_path: Path) -> None:
    for number in range(14):
        (tmp_path / f"config-{number:02}.yaml").touch()
    with pytest.raises(UsageError) as refused:
        load_config(tmp_path / "mine.yaml")
    assert refused.value.place == str(tmp_path / "mine.yaml")
    assert refused.value.fix == f"there are {', '.join(f'config-{n:02}.yaml' for n in range(12))} and 2 more"
    with pytest.raises(UsageError) as refused:
        load_config(tmp_path / "nowhere" / "mine.yaml")
    assert "`cogumi cp`" in refused.value.fix
