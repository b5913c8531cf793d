"""Turns between a policy and an environment that answers in text. The model's text is never tokenized again.

Each turn samples from the ids so far. The answer's ids are appended to the sampled ids, with 0 in TRL 1.15's `env_mask`:
the loss and GSPO's N leave them out.
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
    """One episode. completion, mask and logps have equal lengths; mask is 1 for the model's ids. cut: the budget, or ""."""

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
        """Prepare the episodes. visible: removes the thought of a message. context: of the model, in tokens."""
        super().__init__(task, seconds, record_of)
        self.visible, self.context = visible, context
        self.environment = self.timed_class(task.environment)
        self.pool: list[Any] = []  # of environments, which are reused
        self.environments: list[Any] = []  # of the current rollout, one per completion
        self.episodes: list[Transcript] = []

    def trainer_arguments(self) -> dict[str, Any]:
        return {}  # TRL asks an environment that it makes for a template with tools

    def own_reward(self) -> Callable[..., Any]:
        """Return a reward function with the environment's name that calls `get_reward`."""

        def get_reward(completions: Sequence[Any], **_: Any) -> list[float | None]:
            scores = [environment.get_reward() for environment in self.environments]
            return scores or [None] * len(completions)  # a trial, before the first rollout

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
            return make(list(map(begin_episode, self.environments, rows)))

        return super().measure_rollout(begin_and_make, inputs)

    def count_generated(self, generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        prompt_ids, completion_ids, masks, completions, *more = generate(*args, **kwargs)
        self.log(completion_ids, masks, [episode.cut for episode in self.episodes])
        turns = sum(len(episode.messages) + 1 for episode in self.episodes) / 2 / max(len(self.episodes), 1)
        logged_metrics(self.trainer, rollout_mode(self.trainer))[f"{PREFIX}turns"].append(turns)
        if isinstance(completions[0], list):  # messages, of which TRL made one
            completions = [episode.messages for episode in self.episodes]
        return prompt_ids, completion_ids, masks, completions, *more

    def play(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Play every episode to its end or to its budgets: TRL's `rollout_func`."""
        self.episodes = list(map(Transcript, self.environments, tokenized_prompts(trainer, prompts)))
        has_logps, turn = False, 0
        is_train = rollout_mode(trainer) == "train"
        group = trainer.num_generations if is_train else trainer.num_generations_eval
        active = list(self.episodes)
        while active:
            longest = max(map(self.room, active))
            written, logps = self.sample(active, longest, group if turn == 0 else 1)
            has_logps |= logps is not None
            for index, episode in enumerate(active):
                room = self.room(episode)
                turn_logps = logps[index][:room] if logps is not None else None
                self.take_turn(episode, written[index][:room], turn_logps, turn, isinstance(prompts[0], str))
            active = [episode for episode in active if episode.mask[-1:] == [0]]  # those that were answered
            turn += 1
        return {
            "prompt_ids": [episode.prompt for episode in self.episodes],
            "completion_ids": [episode.completion for episode in self.episodes],
            "logprobs": [episode.logps for episode in self.episodes] if has_logps else None,
            "env_mask": [episode.mask for episode in self.episodes],
        }

    def room(self, episode: Transcript) -> int:
        """Return the number of tokens that an episode may still have."""
        limit = self.trainer.max_completion_length - len(episode.completion)
        if self.context is not None:
            limit = min(limit, self.context - len(episode.prompt) - len(episode.completion))
        return max(limit, 1)

    def sample(self, episodes: list[Transcript], longest: int, group: int) -> tuple[Any, Any]:
        """Sample the next message of each episode: (ids, log-probabilities or None)."""
        histories = [episode.prompt + episode.completion for episode in episodes]
        trainer = self.trainer
        generate = getattr(trainer, GENERATE_TURN)
        if trainer.use_vllm:
            limited = replaced(trainer.vllm_generation, {"max_completion_length": longest})
        else:
            limited = replaced(trainer.generation_config, {"max_new_tokens": longest})
        with limited:
            return generate(histories, None, {}, group)  # type: ignore[no-any-return]

    def take_turn(self, episode: Transcript, ids: list[int], logps: list[float] | None, turn: int, plain: bool) -> None:
        """Append the model's ids, and the environment's answer if there is one and it fits."""
        trainer, room = self.trainer, self.room(episode)
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
            reply = answer_ids(trainer, answer, ids, plain, self.special)
            if len(reply) >= self.room(episode):
                episode.cut = TOKENS
                return
            episode.append(reply, None, 0)
            episode.messages.append({"role": "user", "content": answer})

    def answer_of(self, episode: Transcript, text: str) -> str | None:
        """Return the environment's answer. Raises RuntimeError if it is no text."""
        answer = episode.environment.respond(self.visible(text))
        if answer is None:
            return None
        if not isinstance(answer, str):
            problem = f"respond returned {type(answer).__name__}, and an answer is text, or None at the end"
            raise RuntimeError(f"cogumi.environment: {self.task.name}: {problem}")
        return answer.encode(errors="replace").decode()  # a tokenizer refuses unpaired surrogates


def begin_episode(environment: Any, row: Mapping[str, Any]) -> dict[str, Any]:
    """Add the text of `reset` to the prompt of a row, as TRL does for environments with tools."""
    text, prompt = environment.reset(**row), row["prompt"]
    if text is None:
        return dict(row)
    if isinstance(prompt, str):
        return {**row, "prompt": prompt + text}
    return {**row, "prompt": [*prompt[:-1], {**prompt[-1], "content": prompt[-1]["content"] + text}]}


def answer_ids(trainer: Any, answer: str, written: list[int], plain: bool, special: Sequence[str]) -> list[int]:
    """Return the ids between the model's ids (`written`) and its next message. plain: without a chat template.

    Control tokens (`special`) in an answer stay text, so an environment cannot end a turn by what it quotes.
    """
    tokenizer = trainer.processing_class
    if plain:
        return list(tokenizer(answer, add_special_tokens=False, split_special_tokens=True)["input_ids"])
    shown = MARK if any(text in answer for text in special) else answer
    conversation = [("user", "."), ("assistant", MARK), ("user", shown)]
    text = tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in conversation],
        add_generation_prompt=True,
        tokenize=False,
        chat_template=trainer.chat_template,
        **trainer.chat_template_kwargs,
    )
    _, mark, behind = text.partition(MARK)
    if not mark:
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
