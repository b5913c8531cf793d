"""Compare merged models with what their adapters' models answered where they were trained.

The other checks of a merge read the adapter as the installed libraries do, whose reading of a file can change. A witness
does not: it holds tokens and the logits that the live model and its base gave for them, or an owner's prompts and answers.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from cogumi.core.errors import UsageError, best_effort
from cogumi.core.formatting import one_line
from cogumi.merge.adapter_files import Adapter
from cogumi.merge.bases import Base
from cogumi.merge.logits import (
    PROMPT_TOKENS,
    SCALE_ERROR,
    Loader,
    NotCompared,
    Reference,
    loaded,
    loader_of,
    measure_directory,
    prompt_tokens,
    record_logits,
    rms,
    rounding_bound,
    run_model,
    tokenizer_of,
    trained_tokens,
)
from cogumi.models.quantized_bases import quantization_of

WITNESS_NAME = "cogumi-witness.logits"  # safetensors by another name: some loaders take every such file for weights
COLUMNS = 128  # of the vocabulary, for 128 tokens: 66 KB in bfloat16
# Of the adapter's movement that a merged model makes at least, where training ran on a quantized base, whose logits are others.
# SmolLM2-135M in NF4: 0.67 for the right merge, 0.04 to 0.11 for scrambled ones, -0.64 for a reversed one.
FOLLOWED = 0.3
# Nothing is told where quantization moved the base's own logits this many times as far as the adapter does: 2.2 times in the case
# above, 3.8 times for a small random mixture of experts, whose right merge goes 0.08 of the way.
UNTOLD = 3.0
# Rounding of the weights shifts all logits alike, and so the movement's size: by at most 0.3 of the distance in 400 comparisons
# of right merges, of small and large updates.
ALONG = 0.5


@dataclass(frozen=True)
class WitnessCheck:
    """Comparison of a merged model with the logits that were recorded in training.

    trained_with: versions, dtype and quantization. followed: the share of the adapter's movement that the merged model makes.
    measured, bound: the rms distance from the trained model, and the largest; bound is None where the base was quantized in
    training, when `followed` tells the direction alone. scale_bound: the largest |followed - 1|; None where not judged.
    """

    trained_with: str
    followed: float
    measured: float
    bound: float | None
    scale_bound: float | None

    @property
    def passed(self) -> bool:
        if self.bound is None:
            return self.followed >= FOLLOWED
        return self.measured <= self.bound and (self.scale_bound is None or abs(self.followed - 1) <= self.scale_bound)

    def __str__(self) -> str:
        verdict = "agrees with" if self.passed else "DIFFERS FROM"
        figure = f"the merged model goes {self.followed:.1%} of the adapter's way"
        figure += f" (+- {self.scale_bound:.1%} allowed)" if self.scale_bound is not None else ""
        if self.bound is not None:
            figure += f" and ends {self.measured:.3g} rms from it, allowed {self.bound:.3g}"
        line = f"witness {verdict} the trained model ({self.trained_with}): {figure}"
        return line if self.passed else f"{line}; if the adapter was trained further since, delete {WITNESS_NAME}"


def write_witness(adapter: Path, live: Any, tokenizer: Any) -> None:
    """Record logits of a trained PEFT model, and of its base, in its adapter's directory.

    The tokens are a built-in text and the tokens that the adapter trains one by one: nothing of the training data.
    """
    reference = None
    with best_effort("record the logits of the trained model for later merges"):  # the adapter itself was paid for
        tokens = prompt_tokens(tokenizer, live.config.get_text_config(), trained_tokens([adapter]), rows=1)
        reference = record_logits(live, tokens)
    if reference is None:
        return
    size = reference.live.shape[-1]
    columns = torch.randperm(size, generator=torch.Generator().manual_seed(0))[:COLUMNS].sort().values
    tensors = {"input_ids": reference.input_ids, "columns": columns}
    tensors |= {name: getattr(reference, name)[..., columns].contiguous() for name in ("live", "base")}
    quantized = quantization_of(live.config)
    versions = ", ".join(f"{name} {version(name)}" for name in ("cogumi", "peft", "transformers"))
    dtype = str(live.dtype).removeprefix("torch.")
    facts = {"trained_with": f"{versions}, {quantized or dtype}", "dtype": dtype, "quantized": str(quantized or "")}
    save_file(tensors, adapter / WITNESS_NAME, metadata=facts)


def witness_bytes(model: Any) -> int:
    """Return the bytes of the record of a model, without its header."""
    config = model.config.get_text_config()
    tokens = min(PROMPT_TOKENS, getattr(config, "max_position_embeddings", PROMPT_TOKENS))
    columns = min(COLUMNS, config.vocab_size)
    return tokens * columns * 2 * model.dtype.itemsize + 8 * (tokens + columns)


def read_witness(adapter: Path) -> tuple[Reference, dict[str, str]] | None:
    """Return what was recorded beside an adapter; None without it. Raises UsageError where it cannot be read."""
    path = adapter / WITNESS_NAME
    if not path.is_file():
        return None
    try:
        with safe_open(path, "pt") as file:
            facts = file.metadata()
            tensors = {name: file.get_tensor(name) for name in ("input_ids", "live", "base", "columns")}
        return Reference(getattr(torch, facts["dtype"]), **tensors), facts
    except (SafetensorError, KeyError, TypeError, AttributeError) as error:
        fix = "fetch it again with the adapter, or delete it to merge without it"
        raise UsageError(f"{path} is damaged: {one_line(error)}", fix=fix) from error


def check_witness(adapter: Adapter, base: Base, merged: Path, retained: float | None = None) -> WitnessCheck | None:
    """Run a merged directory on the recorded tokens; None without a record. retained: see compare_logits. Raises NotCompared."""
    witness = read_witness(adapter.path)
    if witness is None:
        return None
    reference, facts = witness
    loader = loader_of([adapter.directory], merged)
    if loader.dtype != torch.float32 or measure_directory(base.path)[1] == torch.float32:
        loader = replace(loader, dtype=reference.dtype)  # else merged in float32, for what 16 bits would round away
    start, moved = reference.base, rms(reference.live, reference.base)
    quantized = facts["quantized"] or base.trained_on  # in memory, or on the disk
    if quantized:
        with loaded(base.path, loader, merged, reference.live.numel()) as model:
            start = run_model(model, reference.input_ids)[..., reference.columns]
        del model  # before the next one is loaded
        if (noise := rms(start, reference.base)) > UNTOLD * moved:
            raise NotCompared(f"quantization moved the base's logits by {noise:.3g}, the adapter by {moved:.3g}")
    with loaded(merged, loader, merged, reference.live.numel()) as model:
        logits = run_model(model, reference.input_ids)[..., reference.columns]
    measured = rms(reference.live, logits)
    bound = scale_bound = None
    if not quantized:
        bound = rounding_bound(model, reference.live, reference.dtype, measure_directory(merged)[1])
        if moved > bound:
            lost = 0.0 if retained is None else max(0.0, 1 - retained)
            scale_bound = SCALE_ERROR + lost + ALONG * measured / moved
    return WitnessCheck(facts["trained_with"], reference.followed(logits, start), measured, bound, scale_bound)


@dataclass(frozen=True)
class Answer:
    """A prompt, as text or as a chat's messages, and the model's greedy answer."""

    prompt: str | list[dict[str, Any]]
    answer: str

    def text(self, tokenizer: Any) -> str:
        """Return the prompt as the model reads it."""
        if isinstance(self.prompt, str):
            return self.prompt
        return str(tokenizer.apply_chat_template(self.prompt, tokenize=False, add_generation_prompt=True))


@dataclass(frozen=True)
class AnswerCheck:
    """Greedy answers of a merged model beside their owner's.

    answers: how many there are. by_base: how many the base gives as well. differs: the first that the merged model does not
    give, else "".
    """

    answers: int
    by_base: int
    differs: str

    @property
    def passed(self) -> bool:
        return not self.differs

    def __str__(self) -> str:
        verdict = f"DIFFERS: {self.differs}" if self.differs else "agrees"
        return f"witness {verdict} ({self.answers} greedy answers, of which the base alone gives {self.by_base})"


def read_answers(path: Path, key: str = "--witness") -> list[Answer]:
    """Read JSON lines of {"prompt": text or messages, "answer": text}. Raises UsageError with the line and `key`."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {one_line(error)}", key=key, fix="name a file of JSON lines") from None
    answers = []
    for number, line in enumerate(lines, start=1):
        fix = 'write lines such as {"prompt": "2+2=", "answer": " 4"}; a list of messages is a chat'
        try:
            row = json.loads(line)
            prompt, answer = row["prompt"], row["answer"]
        except (ValueError, KeyError, TypeError) as error:
            problem = f"{path}, line {number}: {type(error).__name__}: {one_line(error)}"
            raise UsageError(problem, key=key, fix=fix) from None
        if not isinstance(prompt, str | list) or not prompt or not isinstance(answer, str) or not answer:
            raise UsageError(f"{path}, line {number}: prompt or answer is empty", key=key, fix=fix)
        answers.append(Answer(prompt, answer))
    if not answers:
        raise UsageError(f"{path} holds no prompt", key=key, fix="name a file of JSON lines")
    return answers


def encode_answer(tokenizer: Any, answer: Answer) -> tuple[torch.Tensor, int]:
    """Return token ids [1, length] of prompt and answer, and the length of the prompt."""
    text, special = answer.text(tokenizer), isinstance(answer.prompt, str)  # a chat template writes its own
    start, full = (without_end(tokenizer, part, special) for part in (text, text + answer.answer))
    if full[: len(start)] != start:  # a token spans both
        full = start + tokenizer(answer.answer, add_special_tokens=False)["input_ids"]
    return torch.tensor([full]), len(start)


def without_end(tokenizer: Any, text: str, special: bool) -> list[int]:
    """Return a text's token ids without the end of sequence that some tokenizers add. special: with those at its beginning."""
    ids = list(tokenizer(text, add_special_tokens=special)["input_ids"])
    if special and ids[-1:] == [tokenizer.eos_token_id] and not text.endswith(str(tokenizer.eos_token)):
        ids.pop()
    return ids


def given_by(model: Any, tokenizer: Any, answers: Sequence[Answer], stored: torch.dtype) -> list[str]:
    """Return, for each answer, where a model's greedy one departs from it; "" where it does not.

    A token that is within rounding of the most likely one counts as it: the owner's engine rounds in another order.
    """
    departures = []
    for answer in answers:
        tokens, start = encode_answer(tokenizer, answer)
        if int(tokens.max()) >= model.get_input_embeddings().weight.shape[0]:
            departures.append("its vocabulary is smaller")  # a base, before the adapter's new tokens
            continue
        logits = run_model(model, tokens)[0, start - 1 : -1].float()
        expected = tokens[0, start:]
        if not len(expected):
            raise UsageError(f"the answer {answer.answer!r} has no tokens", fix="leave it out")
        margin = math.sqrt(2) * rounding_bound(model, logits[None], torch.bfloat16, stored)
        behind = logits.max(dim=-1).values - logits.gather(1, expected[:, None])[:, 0]
        wrong = (behind > margin).nonzero().flatten().tolist()
        text = ""
        if wrong:
            at = wrong[0]
            begun = tokenizer.decode(expected[:at])
            other, right = (tokenizer.decode([int(token)]) for token in (logits[at].argmax(), expected[at]))
            text = f"after {begun!r} it says {other!r}, not {right!r}"
        departures.append(text)
    return departures


def answers_of(directory: Path, loader: Loader, tokenizer: Any, answers: Sequence[Answer], size: Path) -> list[str]:
    """Load a model and return given_by. size: the directory whose size is planned with. Raises NotCompared."""
    longest = max(encode_answer(tokenizer, answer)[0].numel() for answer in answers)
    with loaded(directory, loader, size, longest * len(tokenizer)) as model:
        return given_by(model, tokenizer, answers, measure_directory(size)[1])


def check_answers(answers: Sequence[Answer], adapters: Sequence[Path], base: Path, merged: Path) -> AnswerCheck:
    """Compare a merged model's greedy answers with their owner's. Raises NotCompared, UsageError where they prove nothing."""
    tokenizer, loader = tokenizer_of(merged), loader_of(adapters, merged)
    if tokenizer is None:
        raise UsageError("the merged model has no tokenizer to read prompts with", fix="save it beside the adapter")
    by_base, departures = (answers_of(path, loader, tokenizer, answers, merged) for path in (base, merged))
    if not any(by_base):
        fix = "take prompts that the adapter answers in another way than its base"
        raise UsageError("the base alone gives all of these answers", fix=fix)
    differs = next((f"answer {n}: {text}" for n, text in enumerate(departures, start=1) if text), "")
    return AnswerCheck(len(answers), sum(not text for text in by_base), differs)
