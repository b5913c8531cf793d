"""A GSPO trainer samples alike with transformers' generate and with vLLM in its process: the same assertions for both.

Each engine plays the roles of tests/sampler_scenarios.py in processes of their own, on the small base and on a tiny model
that calls a tool. Exact log-probabilities are those of the trainer's weights in float64.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sampler_scenarios as scenarios
from filelock import FileLock
from finished_runs import shared_by_workers
from sampler_scenarios import CONTEXT, CONTROLS, ENDS, LENGTH, MARK, PROMPTS
from test_tool_environment import taught  # noqa: F401
from transformers import AutoTokenizer

from cogumi.data.chat import visible_text
from cogumi.models.completion import cut_at_stop

Seen = dict[str, Any]
pytestmark = pytest.mark.slow("trainers in processes of their own: 25 s for each of two")
without_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="`make test-vllm` installs it")
ENGINES = ["transformers", pytest.param("vllm", marks=without_vllm)]
# In float32. vLLM and transformers multiply in another order; 2e-5 was the most that either was away.
EQUAL = 1e-4


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = shared_by_workers(tmp_path_factory) / "sampler-base"
    with FileLock(f"{place}.lock"):
        if not place.exists():
            scenarios.write_base(place)
    return place


@pytest.fixture(scope="module")
def play(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Callable[..., Seen]:
    """What an engine was seen to do in a role, which is played once for all workers."""
    home = shared_by_workers(tmp_path_factory)

    def played(engine: str, role: str, model: Path = base, cwd: Path = home) -> Seen:
        # vLLM's engine is started once in a process; of transformers' roles one process plays all with the same model.
        roles = [role] if engine == "vllm" or role == "tools" else [role for role in scenarios.ROLES if role != "tools"]
        file = home / f"sampled-{engine}-{roles[0]}.json"
        with FileLock(f"{file}.lock"):
            if not file.exists():
                words = [sys.executable, scenarios.__file__, engine, str(model), str(file), *roles]
                paths = {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
                done = subprocess.run(
                    words, cwd=cwd, env=os.environ | paths, capture_output=True, text=True, timeout=500
                )
                assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
        return json.loads(file.read_text())[role]

    return played


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def ends(play: Callable[..., Seen], engine: str) -> Seen:
    return play(engine, "ends")


@pytest.fixture
def cuts(play: Callable[..., Seen], engine: str) -> Seen:
    return play(engine, "cuts")


@pytest.fixture
def turns(play: Callable[..., Seen], engine: str) -> Seen:
    return play(engine, "turns")


@pytest.fixture
def tools(play: Callable[..., Seen], engine: str, taught: Path) -> Seen:  # noqa: F811
    return play(engine, "tools", taught / "runs/own/calls/merged", taught)


# ------------------------------------------------------------------------------------------------- where completions end


@pytest.mark.parametrize("case", ["text", "both", "token in a text"])
def test_a_completion_ends_at_the_first_stop_text(ends: Seen, case: str) -> None:
    seen = ends[f"stop: {case}"]
    stopped = [any(stop in text for stop in seen["stops"]) for text in seen["texts"]]
    assert sum(stopped) > 2
    for before in seen["before"]:  # nothing stands behind the token that holds it
        assert not any(stop in before for stop in seen["stops"])
    assert all(len(ids) == LENGTH or stop or ids[-1] in ENDS for ids, stop in zip(seen["ids"], stopped, strict=True))
    check_lengths(seen, [stop or ids[-1] in ENDS for ids, stop in zip(seen["ids"], stopped, strict=True)])
    if (
        case != "token in a text"
    ):  # TRL takes control tokens out of a text, so that a reward is given the rest of such a stop
        check_rewarded(seen)
    assert all(all(learned) for learned in seen["learned"])


@pytest.mark.parametrize("case", ["token", "both", "masked"])
def test_a_completion_ends_at_a_stop_token(ends: Seen, case: str) -> None:
    seen = ends[f"stop: {case}"]
    assert sum(ids[-1] == MARK for ids in seen["ids"]) > 2
    assert not any(MARK in ids[:-1] for ids in seen["ids"])
    check_rewarded(seen)
    if case == "both":
        return
    ended = [ids[-1] in (MARK, *ENDS) for ids in seen["ids"]]
    assert not all(ended)
    check_lengths(seen, ended)
    kept_rows = [
        end or case == "token" for end in ended
    ]  # train.mask_truncated_completions leaves the others out of the loss
    assert [set(learned) for learned in seen["learned"]] == [{int(each)} for each in kept_rows]


def check_lengths(seen: Seen, ended: list[bool]) -> None:
    """What TRL logs of the lengths, of completions of which these came to their end."""
    lengths = [len(ids) for ids, end in zip(seen["ids"], ended, strict=True) if end]
    assert seen["logged"]["clipped_ratio"] == pytest.approx(1 - len(lengths) / len(ended))
    assert seen["logged"]["mean_terminated_length"] == pytest.approx(sum(lengths) / max(1, len(lengths)))
    assert seen["logged"]["max_terminated_length"] == max(lengths, default=0)


def check_rewarded(seen: Seen) -> None:
    """A reward was given each text up to the stop, and without control tokens."""
    texts = [cut_at_stop(text, seen["stops"]) for text in seen["texts"]]
    assert seen["rewarded"] == [text.replace(CONTROLS[MARK], "") for text in texts]


def test_stop_texts_and_masking_what_did_not_end_contradict(ends: Seen) -> None:
    assert "train.mask_truncated_completions: TRL would mask completions that end at 'e' too" in ends["refused"]


def test_every_end_token_ends_a_completion(ends: Seen) -> None:
    """Of the base's tokenizer, of its generation_config.json, and of the run's own tokenizer."""
    seen = ends["ends"]
    last = [ids[-1] for ids in seen["ids"]]
    assert all(last.count(end) for end in ENDS[1:])
    assert not any(end in ids[:-1] for ids in seen["ids"] for end in ENDS)
    check_lengths(seen, [end in ENDS for end in last])
    assert seen["difference"] < EQUAL
    assert any(ids == [ENDS[0]] for ids in ends["first"]["ids"])


def test_a_completion_is_no_longer_than_asked(ends: Seen) -> None:
    short = ends["short"]["ids"]
    assert max(map(len, short)) == 5
    assert all(len(ids) == 5 or ids[-1] in ENDS for ids in short)
    check_lengths(ends["short"], [ids[-1] in ENDS for ids in short])
    assert max(len(ids) for ids in ends["first"]["ids"]) == LENGTH


def test_a_prompt_may_fill_the_context_up_to_the_completion(ends: Seen) -> None:
    assert max(map(len, ends["near"])) == LENGTH
    assert all(len(ids) == LENGTH or ids[-1] in ENDS for ids in ends["near"])


# ---------------------------------------------------------------------------------------- from what tokens are sampled


@pytest.mark.parametrize("case", ["greedy", "cold"])
def test_cold_samples_are_the_most_probable_tokens(ends: Seen, case: str) -> None:
    """Greedy: train.top_k 1. Cold: a temperature of 0.01, at which ties within 0.2 of a logit are drawn for."""
    assert ends[case]["missed"] == 0
    assert len({tuple(ids) for ids in ends[case]["ids"]}) > 4


@without_vllm
def test_greedy_episodes_of_both_engines_are_the_same(play: Callable[..., Seen], taught: Path) -> None:  # noqa: F811
    caller = taught / "runs/own/calls/merged"
    ours, theirs = (play(engine, "ends")["greedy"] for engine in ("transformers", "vllm"))
    assert ours["ids"] == theirs["ids"]
    assert ours["prompts"] == theirs["prompts"]
    ours, theirs = (play(engine, "turns")["greedy"] for engine in ("transformers", "vllm"))
    assert all(ours[name] == theirs[name] for name in ("ids", "learned", "heard", "cut"))
    ours, theirs = (play(engine, "tools", caller, taught)["greedy"] for engine in ("transformers", "vllm"))
    assert all(ours[name] == theirs[name] for name in ("prompts", "ids", "learned", "heard", "opened", "rewards"))
    names = [name for name in ours["logged"] if name.startswith(("episodes/", "tools/", "completions/"))]
    timed = ("episodes/environment_seconds", "episodes/environment_share")
    assert all(ours["logged"][name] == theirs["logged"][name] for name in names if name not in timed)


def test_the_samplers_log_probabilities_are_at_its_temperature(ends: Seen) -> None:
    first = ends["first"]
    assert first["difference"] < EQUAL
    assert first["off_temperature"] > 0.1  # nor are they at another one
    assert first["ratio"] < EQUAL
    assert first["unscored"] == 0


def test_a_seed_gives_the_same_rollouts_and_another_one_others(ends: Seen, turns: Seen, cuts: Seen) -> None:
    assert ends["first"] == turns["first"]  # in two trainers
    assert ends["first"]["ids"] != cuts["first"]["ids"]


@pytest.mark.parametrize("name", ["top_p", "top_k", "min_p"])
def test_no_token_is_sampled_outside_of_the_cut(cuts: Seen, engine: str, name: str) -> None:
    seen = cuts[name]
    assert seen["outside"] == 0
    assert seen["outside_without"] > 10
    if engine == "transformers":  # whose log-probabilities are of the whole distribution
        assert not any(seen["refused"].values())
        return
    message = f"train.{name} "
    assert seen["refused"]["True"].startswith(message)
    assert seen["refused"]["True"].endswith("set train.vllm_importance_sampling_correction: false")
    assert seen["refused"]["rollout"].endswith("set cogumi.behaviour_logps: trainer")
    assert seen["refused"]["False"] == ""


# ---------------------------------------------------------------------------------------------------- thoughts and turns


@pytest.mark.parametrize("flag", [True, False])
def test_thoughts_are_rendered_and_graded_alike(cuts: Seen, base: Path, flag: bool) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base)
    seen = cuts[f"thinking: {flag}"]
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS * 2]
    rendered = tokenizer.apply_chat_template(chats, add_generation_prompt=True, enable_thinking=flag, return_dict=False)
    assert seen["prompts"] == rendered
    assert [CONTROLS[3] in tokenizer.decode(ids) for ids in seen["prompts"]] == [not flag] * len(seen["prompts"])
    assert sum(CONTROLS[3] in text for text in seen["texts"]) > 2
    assert seen["rewarded"] == [visible_text(text, "tags") or "" for text in seen["texts"]]
    assert len({*seen["rewarded"]}) > 1


@pytest.mark.parametrize("case", ["greedy", "free", "turns", "tokens", "context"])
def test_dialogues_keep_what_was_sampled_and_its_log_probabilities(turns: Seen, case: str) -> None:
    seen, said = turns[case], turns["said"]
    assert case == "greedy" or seen["difference"] < EQUAL  # vLLM's are of what top-k leaves
    for ids, learned, cut in zip(seen["ids"], seen["learned"], seen["cut"], strict=True):
        outside = [token for token, one in zip(ids, learned, strict=True) if not one]
        answers = len(outside) // len(said)
        assert outside == said * answers
        assert answers <= (1 if case == "turns" else 2)
        assert len(ids) <= (16 if case == "tokens" else 72)
        assert cut in ("", "tokens", "turns" if case == "turns" else "tokens")
    if case == "context":
        totals = [len(prompt) + len(ids) for prompt, ids in zip(seen["prompts"], seen["ids"], strict=True)]
        assert max(totals) <= CONTEXT
        assert "tokens" in seen["cut"]
    if case in ("turns", "free"):
        assert any(0 in learned for learned in seen["learned"])
    if case == "turns":
        assert "turns" in seen["cut"]


@pytest.mark.parametrize("case", ["greedy", "free", "tokens"])
def test_a_tool_is_called_and_what_it_says_is_outside_of_the_loss(tools: Seen, case: str) -> None:
    seen = tools[case]
    assert case == "greedy" or seen["difference"] < EQUAL
    logged, opened = seen["logged"], seen["opened"]
    assert logged["tools/call_frequency"] == pytest.approx(sum(map(len, opened)) / len(opened))
    assert seen["rewards"] == [1 / len(boxes) if 4 in boxes else 0.0 for boxes in opened]
    assert all(len(boxes) <= 1 for boxes in opened)  # train.max_tool_calling_iterations
    for heard, boxes in zip(seen["heard"], opened, strict=True):
        assert ("tool_response_start" in heard) == (bool(boxes) and bool(heard))
        assert "open(box" not in heard  # the call is the model's own, and is learned
    if case == "free":
        assert len({tuple(boxes) for boxes in opened}) > 2
        assert max(seen["rewards"]) == 1
        assert sum("prize" in heard or "empty" in heard for heard in seen["heard"]) == sum(map(len, opened))
        assert logged["episodes/cut_by_turns"] > 0
    outside = sum(each.count(0) for each in seen["learned"])
    assert logged["episodes/masked_share"] == pytest.approx(outside / sum(map(len, seen["ids"])))


# ------------------------------------------------------------------------------------------------------- the head's dtype


def test_a_head_in_float32_brings_sampler_and_trainer_no_further_apart(play: Callable[..., Seen], engine: str) -> None:
    plain, wide = play(engine, "head"), play(engine, "wide head")
    assert 0 < wide["mean"] <= plain["mean"]
    if engine == "vllm":
        assert (plain["dtype"], wide["dtype"]) == ("torch.bfloat16", "torch.float32")
        assert max(wide["logged"]) <= max(plain["logged"])
