"""Supervised fine-tuning: TRL's SFTTrainer on tokenized examples."""

import copy
import logging
from itertools import accumulate, pairwise
from typing import Any

import pyarrow.compute as pc
import torch

from cogumi.config.schema import RunConfig
from cogumi.core.errors import UsageError
from cogumi.core.formatting import one_line
from cogumi.core.run_directory import DECISIONS, SETTINGS, read_section, write_section
from cogumi.data import packing
from cogumi.patches import unsloth_rl
from cogumi.patches.trl_internals import wrap_method
from cogumi.stack.ranks import Ranks
from cogumi.telemetry.recorder import preserve_rng_and_mode, set_status

log = logging.getLogger("cogumi")
PACKING = "packing"  # of decisions.json: whether rows are packed, why, and what a step is then
CLOSE = 0.1  # of the examples asked for: how far from them a step of whole rows may be without a warning


def arguments(run: RunConfig) -> dict[str, Any]:
    """SFTConfig arguments. Raises UsageError for settings that would quietly train on something else."""
    length: int | None = run.train.get("max_length")
    default: int | None = run.setting("max_length")
    if run.data.format == "fim":
        if run.train.get("completion_only_loss") is False or run.train.get("assistant_only_loss"):
            learned = "of a fill-in-the-middle example the middle is learned, and of a plain row (data.fim.fim_rate) everything"
            raise UsageError(learned, key="train.completion_only_loss", fix="drop it")
        budget = run.data.fim.max_length
        if length is not None and length < budget:
            message = f"train.max_length {length} would cut examples that data.fim.max_length {budget} lets through"
            raise UsageError(message, fix=f"set data.fim.max_length to {length}, which drops and counts them")
        # The data's own budget has already dropped, and counted, what is too long.
        default = budget if run.train.get("packing") else None
    for key in ("completion_only_loss", "assistant_only_loss") if run.data.format == "text" else ():
        if run.train.get(key):
            raise UsageError("of data.format: text every token is learned", key=f"train.{key}", fix="drop it")
    # What is learned is in the examples, and so is the chat template: TRL gets ids and masks.
    ours = {"completion_only_loss": True, "assistant_only_loss": False, "chat_template_path": None}
    return {**run.train, **ours, "max_length": length or default}


def build_trainer(run: RunConfig, ranks: Ranks | None = None, **common: Any) -> Any:
    import trl  # looked up here: unsloth may have put its own trainer on the module

    examples = common["args"].per_device_train_batch_size * common["args"].gradient_accumulation_steps
    if run.train.get("packing") or run.train.get("padding_free"):
        common |= pack_datasets(run, ranks or Ranks(), **common)
    # TRL warns of packing with any attention but flash attention. Whether this model keeps examples apart was measured.
    trl_log = logging.getLogger("trl.trainer.sft_trainer")
    trl_log.addFilter(lambda record: "supported Flash Attention variant" not in record.getMessage())
    trainer: Any = trl.SFTTrainer(**common)
    trainer.examples_per_step = examples  # of a process, however many share a row
    end_to_end = common["args"].packing and getattr(trainer.data_collator, "padding_free", False)
    if end_to_end and not unsloth_rl.is_in_place():
        trainer.data_collator = packing.row_collator(trainer.model, trainer.data_collator)
    refuse_other_labels(trainer, common["train_dataset"])
    weigh_held_out_loss(trainer)
    return trainer


def weigh_held_out_loss(trainer: Any) -> None:
    """Make `eval_loss` the sum over learned tokens divided by their number; transformers averages the means of batches."""
    sums = [0.0, 0.0]  # of the loss, of the tokens

    def step(original: Any, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        learned = int(learned_labels(inputs).sum())
        output = original(model, inputs, *args, **kwargs)
        if learned and output[0] is not None:
            sums[:] = sums[0] + float(output[0]) * learned, sums[1] + learned
        return output

    def loop(original: Any, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        sums[:] = 0.0, 0.0
        output = original(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        loss, tokens = trainer.accelerator.reduce(torch.tensor(sums, device=trainer.accelerator.device), "sum").tolist()
        if tokens:
            output.metrics[f"{metric_key_prefix}_loss"] = loss / tokens
        return output

    wrap_method(trainer, "prediction_step", step)
    wrap_method(trainer, "evaluation_loop", loop)


def learned_labels(batch: dict[str, Any]) -> torch.Tensor:
    """Mark the labels of a batch that are learned: nothing predicts the first token of an example."""
    labels = batch["labels"]
    starts = batch["position_ids"] == 0 if "position_ids" in batch else torch.arange(labels.shape[1]) == 0
    return (labels != -100) & ~starts.to(labels.device)


def is_packing_chosen(run: RunConfig) -> bool:
    """Return whether the run chose packing: rows are then as long as the longest example, not `train.max_length`."""
    return any(choice["key"] == "train.packing" for choice in read_section(run.run_dir / DECISIONS, SETTINGS))


def decide_packing(run: RunConfig, model: Any, args: Any, train_dataset: Any, tokenizer: Any) -> dict[str, Any]:
    """Measure whether rows may be packed; a resumed run keeps its first decision."""
    if args.packing and args.packing_strategy == "wrapped":
        log.warning("packing: `wrapped` cuts examples and lets them read each other; `bfd` does neither")
        return {"safe": None}
    decided: dict[str, Any] = read_section(run.run_dir / DECISIONS, PACKING)
    if decided:
        log.info("packing: %s, as when the run began", "on" if decided["safe"] else "off")
        return decided
    documents = [train_dataset[i]["input_ids"] for i in range(min(packing.PROBED_DOCUMENTS, len(train_dataset)))]
    log.info("packing: comparing the logits of packed examples with those of separate ones ...")
    set_status(run.run_dir, "running", stage="packing")
    try:
        with preserve_rng_and_mode(model):
            distance, bound = packing.probe_packing(model.eval(), documents, tokenizer.pad_token_id)
    except Exception as error:  # noqa: BLE001  unpacked it may train
        log.warning("packing off: this model does not take packed rows: %s", one_line(error))
        return {"safe": False, "error": one_line(error)}
    safe = distance <= bound  # NaN is not safe
    if not safe:
        log.warning("packing off: this model's logits differ by %.2g with the examples packed beside, where rounding explains "
                    "%.1e: examples would read each other", distance, bound)  # fmt: skip
    else:
        message = "packing: packed logits differ from separate ones by %.1e (rounding explains %.1e)"
        log.info(message, distance, bound)
    return {"safe": safe, "distance": distance, "bound": bound}


def pack_datasets(run: RunConfig, ranks: Ranks, **common: Any) -> dict[str, Any]:
    """Pack the data sets, and set as many rows a step in the trainer's `args` as hold the examples asked for.

    ranks: the processes of the training, of which the first measures whether rows may be packed. common: SFTTrainer's.
    """
    from trl import pack_dataset

    args, train_dataset, place = copy.copy(common["args"]), common["train_dataset"], run.run_dir / DECISIONS
    model, tokenizer = common["model"], common["processing_class"]
    decided = ranks.decide(lambda: decide_packing(run, model, args, train_dataset, tokenizer))
    write_section(place, PACKING, decided)
    if decided["safe"] is False:
        args.packing = args.padding_free = False
        args.max_length = arguments(run.model_copy(update={"train": run.train | {"packing": False}}))["max_length"]
    if not args.packing:  # of padding_free alone batches stay as they are
        return {"args": args}
    labelled, length = packing.with_labels(train_dataset), args.max_length
    if is_packing_chosen(run):
        length = pc.max(pc.list_value_length(labelled.data.column("input_ids"))).as_py()
    packed = pack_dataset(labelled, length, args.packing_strategy)
    examples_per_row = len(train_dataset) / len(packed)
    tokens = pc.sum(pc.list_value_length(packed.data.column("input_ids"))).as_py()
    efficiency = tokens / (len(packed) * length)  # the share of the slots of full rows that holds a token
    at_once, accumulated = args.per_device_train_batch_size, args.gradient_accumulation_steps
    requested = at_once * accumulated
    at_once, accumulated = packing.rows_per_step(examples_per_row, at_once, accumulated)
    args.per_device_train_batch_size, args.gradient_accumulation_steps = at_once, accumulated
    args.dataset_kwargs = {**(args.dataset_kwargs or {}), "skip_prepare_dataset": True}
    args.eval_packing = False  # the held-out loss is that of an unpacked run
    rows = at_once * accumulated
    per_step = rows * examples_per_row
    log.info("packing: %d examples in %d rows of %d tokens, %.1f %% of the slots used",
             len(train_dataset), len(packed), length, 100 * efficiency)  # fmt: skip
    log.info("packing: asked %d examples a step; %.1f examples a row, %d rows a step (%d x %d accumulated) = %.1f examples",
             requested, examples_per_row, rows, at_once, accumulated, per_step)  # fmt: skip
    if abs(per_step - requested) > CLOSE * requested:
        log.warning("packing: a step of %.1f examples is not the %d that were asked for, in rows of %d tokens; shorten "
                    "train.max_length, or set train.packing: false", per_step, requested, length)  # fmt: skip
    figures = {"examples": len(train_dataset), "rows": len(packed), "efficiency": efficiency}
    of_step = {"asked_per_step": requested, "rows_per_step": rows, "examples_per_step": per_step}
    write_section(place, PACKING, decided | figures | of_step)
    held_out = common["eval_dataset"]
    held_out = None if held_out is None else packing.with_labels(held_out)
    return {"args": args, "train_dataset": packed, "eval_dataset": held_out}


def refuse_other_labels(trainer: Any, dataset: Any) -> None:
    """Raise RuntimeError unless the trainer learns exactly the tokens the data says.

    TRL 1.15 ignores `completion_mask` without `completion_only_loss`. A trainer that unsloth generated may prepare the
    data itself. Either would train on the prompts without a warning. Nothing predicts the first token of an example.
    """
    expected, learned = [], []
    for i in range(min(4, len(dataset))):
        expected.append(count_learned(dataset[i]))
        batch = trainer.data_collator([trainer.train_dataset[i]])
        learned.append(int(learned_labels(batch).sum()))
    if learned != expected:
        difference = f"learn {learned} tokens of the first examples, of which {expected} are to be learned"
        raise RuntimeError(f"{type(trainer).__name__} would {difference}")


def count_learned(row: dict[str, Any]) -> int:
    """Count the tokens to be predicted of an example, or of the examples of a packed row."""
    learned = row["completion_mask"] if "completion_mask" in row else [label != -100 for label in row["labels"]]
    ends = list(accumulate(row.get("seq_lengths") or [len(learned)], initial=0))
    return sum(sum(learned[start + 1 : end]) for start, end in pairwise(ends))
