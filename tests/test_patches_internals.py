"""The private names of other packages that cogumi uses: they are where they were, and stand in cogumi/patches alone."""

import ast
import functools
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
import trl
from peft.tuners.lora.layer import ParamWrapper
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, Trainer
from transformers.quantizers.base import HfQuantizer
from trl import GRPOTrainer

from cogumi.patches import replaced, torch_internals, trl_internals

PACKAGE = Path(torch_internals.__file__).parents[1]


# ------------------------------------------------------------------------------------------------------ only in patches

UPSTREAM = (GRPOTrainer, trl.DPOTrainer, trl.SFTTrainer, PreTrainedConfig, transformers.PreTrainedModel, nn.Module)
# Of other packages than those of the training stack, and of the standard library; aten's are names of operators.
ALLOWED = {
    "os._exit",
    "sys._getframe",
    "sys._current_frames",
    "distribution._path",
    "aten._local_scalar_dense",
    "aten._grouped_mm",
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and len(name) > 1


def own_names(trees: list[ast.AST]) -> set[str]:
    """What cogumi itself defines: functions, classes, variables, parameters, attributes of its own objects."""
    found = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                found.add(name)
    return found


def foreign_names(tree: ast.AST, own: set[str], strings: set[str]) -> Iterator[str]:
    """Private attributes that are not of cogumi, imports of private modules and names, strings that spell a method."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name) if is_private(name) and name not in own:
                yield ast.unparse(node)
            case ast.Import(names=names) if any(is_private(part) for name in names for part in name.name.split(".")):
                yield ast.unparse(node)
            case ast.ImportFrom(module=str(module), names=names) if module.partition(".")[0] != "cogumi":
                if any(map(is_private, [*module.split("."), *(alias.name for alias in names)])):
                    yield ast.unparse(node)
            case ast.Constant(value=str(text)) if is_private(text) and text in strings:
                yield repr(text)


def test_no_file_outside_patches_uses_a_private_name_of_another_package() -> None:
    files = [path for path in PACKAGE.rglob("*.py") if path.parent.name not in ("patches", "pretraining")]
    trees = {path: ast.parse(path.read_text()) for path in files}
    own = own_names(list(trees.values()))
    strings = {name for cls in UPSTREAM for name in dir(cls) if is_private(name)} | vars(trl.trainer.utils).keys()
    collected = {
        f"{path.relative_to(PACKAGE)}: {name}"
        for path, tree in trees.items()
        for name in foreign_names(tree, own, strings)
        if name not in ALLOWED
    }
    assert collected == set(), (
        "give it a name in cogumi/patches/trl_internals.py or torch_internals.py, and a test here"
    )


@pytest.mark.parametrize(
    "line",
    [
        "trainer._step",
        "self.trainer._metrics",
        'getattr(model, "_supports_sdpa")',
        "import torch._dynamo",
        "from torch._subclasses.fake_tensor import FakeTensorMode",
        "from trl.trainer.utils import _ChunkedLogProbFunction",
        'vars(trainer)["_compute_loss"]',
    ],
)
def test_the_search_finds_each_way_to_use_one(line: str) -> None:
    strings = {name for cls in UPSTREAM for name in dir(cls)}
    assert len(list(foreign_names(ast.parse(line), {"_own"}, strings))) == 1
    assert list(foreign_names(ast.parse("self._own; '_ids'; from cogumi.x import _own"), {"_own"}, strings)) == []


# --------------------------------------------------------------------------------------------------- upstream has not moved

IMAGES = (
    "pixel_values image_grid_thw num_images pixel_attention_mask spatial_shapes num_tiles image_sizes token_type_ids "
    "mm_token_type_ids image_position_ids"
)
METHODS = [
    (Trainer, trl_internals.SAVE_CHECKPOINT, "model trial"),
    (Trainer, trl_internals.LOAD_BEST_MODEL, ""),
    (Trainer, trl_internals.LOAD_CHECKPOINT, "resume_from_checkpoint model"),
    (Trainer, trl_internals.LOAD_OPTIMIZER, "checkpoint"),
    (Trainer, trl_internals.LOAD_RNG_STATE, "checkpoint"),
    (Trainer, trl_internals.OUTPUT_DIRECTORY, "trial"),
    (
        Trainer,
        trl_internals.RUN_EPOCH,
        "model epoch train_dataloader steps_in_epoch num_update_steps_per_epoch trial ignore_keys_for_eval start_time "
        "resume_from_checkpoint epochs_trained steps_trained_in_current_epoch",
    ),
    (
        Trainer,
        trl_internals.LOG_EVALUATE_SAVE,
        "tr_loss grad_norm model trial epoch ignore_keys_for_eval start_time learning_rate",
    ),
    (Trainer, trl_internals.PUSH_CHECKPOINT, "checkpoint_folder"),
    (Trainer, trl_internals.MOVE_MODEL, "model device"),
    (GRPOTrainer, trl_internals.TRAIN_SAMPLER, "dataset"),
    (GRPOTrainer, trl_internals.MAKE_ROLLOUT, "inputs"),
    (GRPOTrainer, trl_internals.GENERATE, "prompts"),
    (GRPOTrainer, trl_internals.CALCULATE_REWARDS, "inputs prompts completions completion_ids_list"),
    (GRPOTrainer, trl_internals.GENERATE_TURN, "prompt_ids images multimodal_fields num_generations has_tool_images"),
    (
        GRPOTrainer,
        trl_internals.TOKEN_LOGPS,
        f"model input_ids attention_mask logits_to_keep batch_size compute_entropy compute_aux_loss {IMAGES}",
    ),
    (GRPOTrainer, trl_internals.INNER_LOSS, "model inputs"),
    (trl.DPOTrainer, trl_internals.PREPARE_DATASET, "dataset processing_class args dataset_name"),
    (GRPOTrainer, "_tokenize_prompts", "prompts"),
    (Trainer, "_prepare_inputs", "inputs"),
    (Trainer, "_save_rng_state", "output_dir"),
    (transformers.GenerationMixin, trl_internals.STOPPING_CRITERIA, "generation_config stopping_criteria tokenizer"),
    (Trainer, "_save_scaler", "output_dir"),
]


@pytest.mark.parametrize(("owner", "name", "parameters"), METHODS, ids=lambda each: getattr(each, "__name__", each))
def test_the_methods_take_what_they_took(owner: type, name: str, parameters: str) -> None:
    assert list(inspect.signature(getattr(owner, name)).parameters) == ["self", *parameters.split()]


@pytest.mark.parametrize(
    ("where", "how"),
    [
        (Trainer._save_checkpoint, "self._get_output_dir(trial=trial)"),
        (Trainer._save_checkpoint, "self._save_rng_state(output_dir)"),
        (Trainer._save_checkpoint, "self._push_from_checkpoint("),
        (Trainer.train, "self._load_from_checkpoint("),
        (Trainer._inner_training_loop, "self._run_epoch(\n                model=model,\n                epoch=epoch,"),
        (Trainer._inner_training_loop, "self._globalstep_last_logged = self.state.global_step"),
        (Trainer._run_epoch, "self.optimizer.step()"),
        (Trainer._run_epoch, "self._maybe_log_save_evaluate(\n                        self._tr_loss,"),
        (GRPOTrainer._generate, "self._generate_single_turn("),
        (transformers.GenerationMixin.generate, "self._get_stopping_criteria("),
        (GRPOTrainer._generate_and_score_completions, "self._generate("),
        (GRPOTrainer._prepare_inputs, "self._generate_and_score_completions("),
        (GRPOTrainer.training_step, "self._step += 1"),
        (GRPOTrainer._prepare_inputs, "self._buffered_inputs[self._step % self.args.steps_per_generation]"),
        (GRPOTrainer._compute_loss, "self._get_per_token_logps_and_entropies("),
        (HfQuantizer.preprocess_model, "self._process_model_before_weight_loading(model"),
        (nn.Module.__call__, "self._compiled_call_impl"),
        (nn.Module.__call__, "self._call_impl"),
        (nn.Module.__getstate__, '"_compiled_call_impl"'),  # so that a copy has none
        (ParamWrapper.__init__, "self._did_swap_in_out_features ="),
    ],
)
def test_the_callers_still_call_them(where: Callable[..., Any], how: str) -> None:
    assert how in inspect.getsource(where)


def test_trls_head_kernel_still_multiplies_by_that_function() -> None:
    source = (Path(trl.__file__).parent / "kernels" / "chunked_logprob.py").read_text()
    function = next(
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name == trl_internals.KERNEL_PRODUCT
    )
    assert len(function.args.args) == 3


def test_a_grpo_trainer_keeps_its_rollouts_and_logs_there(make_trainer: Callable[..., Any]) -> None:
    trainer = make_trainer(max_steps=1, gradient_accumulation_steps=1)
    seen: list[tuple[str, Any]] = []

    def note(name: str, make: Callable[[Any], Any], inputs: Any) -> Any:
        seen.append((name, make(inputs)))
        return seen[-1][1]

    assert trl_internals.makes_rollouts(trainer)
    assert trl_internals.rollout_position(trainer) == (0, None)
    for name in ("first", "second"):
        trl_internals.observe_rollouts(trainer, functools.partial(note, name))
    trainer.train()
    assert [name for name, _ in seen] == ["first", "second"], "once a rollout, the later one around the earlier"
    assert seen[0][1] is seen[1][1]
    position, rollout = trl_internals.rollout_position(trainer)
    assert position == 1
    assert len(rollout) == trainer.args.steps_per_generation
    logs = trl_internals.logged_completions(trainer)
    assert set(logs["rewards"]) == {"letters"}
    assert len(logs["prompt"]) == len(logs["completion"]) == 8
    logged = {key for row in trainer.state.log_history for key in row}
    assert "completions/clipped_ratio" in logged
    assert "completions/mean_terminated_length" in logged
    for mode in ("train", "eval"):
        trl_internals.logged_metrics(trainer, mode)["of ours"].append(1.0)
    assert trl_internals.rollout_mode(trainer) == "train"
    trainer.log({})
    assert trainer.state.log_history[-1]["of ours"] == 1.0
    trl_internals.set_rollout_position(trainer, 0, None)
    assert trl_internals.rollout_position(trainer) == (0, None)
    ids = trl_internals.tokenized_prompts(trainer, ["a b", "c"])
    assert ids == [trainer.processing_class(text)["input_ids"] for text in ("a b", "c")]


def test_methods_are_replaced_for_a_block_and_the_instances_own_comes_back() -> None:
    class Owner:
        def method(self) -> str:
            return "of the class"

    owner: Any = Owner()
    with replaced(owner, {"method": lambda: "of the block"}):
        assert owner.method() == "of the block"
    assert vars(owner) == {}
    owner.method = own = lambda: "of the instance"
    with pytest.raises(ZeroDivisionError), replaced(owner, {"method": lambda: "of the block"}):
        raise ZeroDivisionError
    assert owner.method is own
    trl_internals.wrap_method(owner, "method", lambda original, word="": f"{original()}, wrapped {word}")
    assert owner.method("twice") == "of the instance, wrapped twice"


def test_a_loaded_model_says_what_it_is(tiny_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model, attn_implementation="eager")
    assert trl_internals.attention_of(model.config) == "eager"
    kinds, kernels = trl_internals.supported_attention(model)
    assert kinds == {"flash", "flex", "sdpa"}
    assert isinstance(kernels, tuple)
    assert trl_internals.commit_of(model.config) is None
    trl_internals.record_commit(model.config, "someone/never-downloaded", None)
    assert trl_internals.commit_of(model.config) is None


def test_what_a_class_allows_to_be_missing_is_no_missing_tensor(tiny_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    model._keys_to_ignore_on_load_missing = {r"allowed\.\d+"}
    actual = SimpleNamespace(missing_keys={"allowed.3", "other.3"}, unexpected_keys={"model.rotary_emb.inv_freq"})
    trl_internals.drop_ignored_keys(model, actual)
    assert (actual.missing_keys, actual.unexpected_keys) == ({"other.3"}, set())
