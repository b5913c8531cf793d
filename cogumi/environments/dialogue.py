"""Turns between a policy and an environment that answers in text. What the model wrote is never tokenized again.

Each turn samples from the ids so far. The answer's ids are appended behind the ids that were sampled, with 0 in TRL 1.15's
`env_mask`: the loss and GSPO's N leave them out.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cogumi.core.errors import UsageError
from cogumi.data.encoding import special_texts
from cogumi.environments.episodes import PREFIX, SECONDS, TOKENS, TURNS, Episodes
from cogumi.patches import replaced
from cogumi.patches.trl_internals import GENERATE_TURN, logged_metrics, rollout_mode, tokenized_prompts

MARK = "@@@@"  # stands for a message in a rendered conversation


@dataclass
class Transcript:
    """One episode. completion, mask, logps: equally long; mask 1 where the model wrote. cut: by which budget, or ""."""

    environment: Any
    prompt: list[int]
    completion: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    messages: list[dict[str, str]] = field(default_factory=list)
    cut: str = ""

    def append(self, ids: list[int], logps: list[float] | None, learned: int) -> None:
        self.completion += ids
        self.mask += [learned] * len(ids)
        self.logps += logps if logps is not None else [0.0] * len(ids)


class Dialogue(Episodes):
    """The episodes of an environment that has `respond`."""

    def __init__(
        self,
        task: Any,
        seconds: float | None,
        record_of: Callable[[Mapping[str, Any]], dict[str, Any]],
        visible: Callable[[str], str],
        context: int | None,
    ) -> None:
        """visible: what of a message the environment is given, without its thought. context: of the model, in tokens."""
        super().__init__(task, seconds, record_of)
        self.visible, self.context = visible, context
        self.environment = self.timed_class(task.environment)
        self.pool: list[Any] = []  # of environments, which are used again
        self.environments: list[Any] = []  # of the rollout under way, one for each completion
        self.episodes: list[Transcript] = []

    def trainer_arguments(self) -> dict[str, Any]:
        return {}  # TRL asks an environment that it makes for a template with tools

    def own_reward(self) -> Callable[..., Any]:
        """A reward function under the environment's name, which has `get_reward`."""

        def get_reward(**_: Any) -> list[float | None]:
            return [each.get_reward() for each in self.environments]

        get_reward.__name__ = self.environment.__name__
        return get_reward

    def attach(self, trainer: Any) -> None:
        super().attach(trainer)
        self.special = special_texts(trainer.processing_class)
        trainer.rollout_func = self.play

    def measure_rollout(self, make: Callable[[Any], Any], inputs: Any) -> Any:
        def begin_and_make(rows: Any) -> Any:
            while len(self.pool) < len(rows):
                self.pool.append(self.environment())
            self.environments = self.pool[: len(rows)]
            return make([begin_episode(*each) for each in zip(self.environments, rows, strict=True)])

        return super().measure_rollout(begin_and_make, inputs)

    def count_generated(self, generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        prompt_ids, completion_ids, masks, completions, *more = generate(*args, **kwargs)
        self.log(completion_ids, masks, [each.cut for each in self.episodes])
        turns = sum(len(each.messages) + 1 for each in self.episodes) / 2 / max(len(self.episodes), 1)
        logged_metrics(self.trainer, rollout_mode(self.trainer))[f"{PREFIX}turns"].append(turns)
        if isinstance(completions[0], list):  # messages, of which TRL made one
            completions = [each.messages for each in self.episodes]
        return prompt_ids, completion_ids, masks, completions, *more

    def play(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """TRL's `rollout_func`: every episode to its end, or to what its budgets allow."""
        ids = tokenized_prompts(trainer, prompts)
        self.episodes = [Transcript(*each) for each in zip(self.environments, ids, strict=True)]
        mode, sampled, turn = rollout_mode(trainer), False, 0
        group = trainer.num_generations if mode == "train" else trainer.num_generations_eval
        going = list(self.episodes)
        while going:
            longest = max(self.room(each) for each in going)
            written, logps = self.sample(trainer, going, longest, group if turn == 0 else 1)
            sampled |= logps is not None
            for at, episode in enumerate(going):
                room = self.room(episode)
                kept = logps[at][:room] if logps is not None else None
                self.take_turn(trainer, episode, written[at][:room], kept, turn, isinstance(prompts[0], str))
            going = [each for each in going if each.mask[-1:] == [0]]  # those that were answered
            turn += 1
        return {
            "prompt_ids": [each.prompt for each in self.episodes],
            "completion_ids": [each.completion for each in self.episodes],
            "logprobs": [each.logps for each in self.episodes] if sampled else None,
            "env_mask": [each.mask for each in self.episodes],
        }

    def room(self, episode: Transcript) -> int:
        """Tokens that an episode may still have."""
        limit = self.trainer.max_completion_length - len(episode.completion)
        if self.context is not None:
            limit = min(limit, self.context - len(episode.prompt) - len(episode.completion))
        return max(limit, 1)

    def sample(self, trainer: Any, going: list[Transcript], longest: int, group: int) -> tuple[Any, Any]:
        """(ids, log-probabilities or None) of the next message of each."""
        histories = [each.prompt + each.completion for each in going]
        generate = getattr(trainer, GENERATE_TURN)
        if trainer.use_vllm:
            limited = replaced(trainer.vllm_generation, {"max_completion_length": longest})
        else:
            limited = replaced(trainer.generation_config, {"max_new_tokens": longest})
        with limited:
            return generate(histories, None, {}, group)  # type: ignore[no-any-return]

    def take_turn(
        self, trainer: Any, episode: Transcript, ids: list[int], logps: list[float] | None, turn: int, plain: bool
    ) -> None:
        """Take in what the model wrote, and the environment's answer where there is one and it fits."""
        room = self.room(episode)
        episode.append(ids, logps, 1)
        text = trainer.processing_class.decode(ids, skip_special_tokens=True)
        episode.messages.append({"role": "assistant", "content": text})
        answer = self.answer_of(episode, text)
        if len(ids) >= room and (not ids or ids[-1] not in trainer.eos_token_ids):
            episode.cut = TOKENS
        elif answer is None:
            return
        elif self.turns is not None and turn >= self.turns:
            episode.cut = TURNS
        elif self.is_over():
            episode.cut = SECONDS
        else:
            said = answer_ids(trainer, answer, ids, plain, self.special)
            if len(said) >= self.room(episode):
                episode.cut = TOKENS
                return
            episode.append(said, None, 0)
            episode.messages.append({"role": "user", "content": answer})

    def answer_of(self, episode: Transcript, text: str) -> str | None:
        """What the environment answers. Raises RuntimeError where that is no text."""
        answer = episode.environment.respond(self.visible(text))
        if answer is None:
            return None
        if not isinstance(answer, str):
            what = f"respond returned {type(answer).__name__}, and an answer is text, or None at the end"
            raise RuntimeError(f"cogumi.environment: {self.task.name}: {what}")
        return answer.encode(errors="replace").decode()  # half a surrogate pair is no text to a tokenizer


def begin_episode(environment: Any, row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with what `reset` says behind its prompt, as TRL adds it for environments with tools."""
    said, prompt = environment.reset(**row), row["prompt"]
    if said is None:
        return dict(row)
    if isinstance(prompt, str):
        return {**row, "prompt": prompt + said}
    return {**row, "prompt": [*prompt[:-1], {**prompt[-1], "content": prompt[-1]["content"] + said}]}


def answer_ids(trainer: Any, answer: str, written: list[int], plain: bool, special: Sequence[str]) -> list[int]:
    """The ids between what the model wrote and its next message. plain: of a prompt that is text, without a chat template.

    special: what the tokenizer reads as control tokens. Those that an answer spells out become text, so an environment
    cannot end a turn by what it quotes.
    """
    tokenizer = trainer.processing_class
    if plain:
        return list(tokenizer(answer, add_special_tokens=False, split_special_tokens=True)["input_ids"])
    shown = MARK if any(each in answer for each in special) else answer
    conversation = [("user", "."), ("assistant", MARK), ("user", shown)]
    text = tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in conversation],
        add_generation_prompt=True,
        tokenize=False,
        chat_template=trainer.chat_template,
        **trainer.chat_template_kwargs,
    )
    _, found, behind = text.partition(MARK)
    if not found:
        raise UsageError("the chat template does not show what the assistant said", key="train.chat_template_path")

    def encode(part: str, **more: Any) -> list[int]:
        return list(tokenizer(part, add_special_tokens=False, **more)["input_ids"])

    if shown is MARK:
        before, _, after = behind.partition(MARK)
        ids = [*encode(before), *encode(answer, split_special_tokens=True), *encode(after)]
    else:
        ids = encode(behind)
    # The template ends the assistant's turn. Where the model did so itself, the token is there already.
    return ids[1:] if written and ids and written[-1] == ids[0] else ids
