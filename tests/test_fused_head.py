"""FusedLogProbFunction against dense logits in float64, against itself by its other path, and inside TRL."""

import ast
import inspect
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import trl
import trl.trainer.utils as trl_utils
from gspo_batches import grpo_trainer
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.fused_head import Allocations
from cogumi.patches import fused_head
from cogumi.patches.fused_head import OPTIONAL_OUTPUTS, FusedLogProbFunction
from cogumi.patches.unsloth_rl import parameters_by_function

ALL = ("log_probs", *OPTIONAL_OUTPUTS)
CHUNK = 8


class Case(NamedTuple):
    """One way to call the head. 13 tokens in chunks of 5: it does not divide."""

    temperature: float = 1.0
    softcap: float | None = None
    scale: float = 1.0
    bias: bool = False
    tokens: int = 13
    vocabulary: int = 37


CASES = [
    Case(),
    Case(temperature=0.7),
    Case(bias=True),
    Case(softcap=2.0),
    Case(scale=0.5),
    Case(temperature=0.7, softcap=2.0, scale=0.5, bias=True),
    Case(scale=0.0),
    Case(tokens=0),
    Case(tokens=1),
    Case(tokens=5, vocabulary=8),
    Case(tokens=6, vocabulary=9),
    Case(tokens=10, vocabulary=16),
]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small chunks, on one thread: threads that wait for each other on a busy machine make these tests 20x slower."""
    monkeypatch.setattr(fused_head, "CHUNK_ELEMENTS", 190)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tensors(case: Case, dtype: torch.dtype = torch.float64, width: int = 6) -> tuple[Tensor, Tensor, Any, Tensor]:
    """(hidden, weight, bias or None, targets), the targets covering the first and the last column."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(case.tokens, width, generator=generator).to(dtype)
    weight = torch.randn(case.vocabulary, width, generator=generator).to(dtype)
    bias = torch.randn(case.vocabulary, generator=generator).to(dtype) if case.bias else None
    targets = torch.randint(case.vocabulary, (case.tokens,), generator=generator)
    targets[: case.tokens // 2 : 2] = case.vocabulary - 1
    targets[1 : case.tokens // 2 : 2] = 0
    return hidden, weight, bias, targets


def fused(case: Case, hidden: Tensor, weight: Tensor, bias: Any, targets: Tensor, outputs: Any = ALL) -> Any:
    return FusedLogProbFunction.apply(
        hidden, weight, bias, targets, case.temperature, CHUNK, case.softcap, case.scale, outputs
    )


def dense(case: Case, hidden: Tensor, weight: Tensor, bias: Any, targets: Tensor) -> Any:
    """The five outputs from whole logits."""
    logits = torch.nn.functional.linear(hidden, weight, bias) * case.scale
    if case.softcap is not None:
        logits = case.softcap * torch.tanh(logits / case.softcap)
    logits = logits / case.temperature
    every = logits.log_softmax(-1)
    entropy = -(every.exp() * every).sum(-1)
    log_probs = every.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return log_probs, entropy, (2 * every).logsumexp(-1), logits.mean(-1), logits.argmax(-1) == targets


def gradients(head: Any, case: Case, trainable: bool, log_prob: float, entropy: float) -> list[Tensor]:
    """Gradients of a weighted sum of both differentiable outputs, to hidden and, if `trainable`, weight and bias."""
    hidden, weight, bias, targets = tensors(case)
    leaves = [hidden.requires_grad_()]
    if trainable:
        leaves += [each.requires_grad_() for each in (weight, bias) if each is not None]
    outputs = head(case, hidden, weight, bias, targets)
    per_token = torch.linspace(-1, 2, case.tokens, dtype=torch.float64)
    terms = [factor * (per_token * output).sum() for factor, output in zip((log_prob, entropy), outputs, strict=False)]
    # A weight of 0 leaves the output out of the graph, as an entropy that is only logged.
    return list(torch.autograd.grad(sum(t for t, f in zip(terms, (log_prob, entropy), strict=True) if f), leaves))


# -------------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_output_equals_the_dense_one(case: Case) -> None:  # reference 10
    inputs = tensors(case)
    for name, ours, expected in zip(ALL, fused(case, *inputs), dense(case, *inputs), strict=True):
        torch.testing.assert_close(
            ours, expected, rtol=1e-12, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("asked", [(), ("log_probs",), *(("log_probs", name) for name in OPTIONAL_OUTPUTS)], ids=str)
def test_only_what_is_asked_for_is_returned(asked: tuple[str, ...]) -> None:
    case = CASES[5]
    inputs = tensors(case)
    wanted = dense(case, *inputs)
    for name, ours, expected in zip(ALL, fused(case, *inputs, outputs=asked), wanted, strict=True):
        if name == "log_probs" or name in asked:
            torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
        else:
            assert ours is None


def test_top1_among_equal_logits_is_the_first() -> None:
    weight = torch.zeros(20, 3)
    weight[[4, 6, 15]] = 1.0  # two of the targets are not the first
    answer = fused(Case(), torch.ones(3, 3), weight, None, torch.tensor([4, 6, 15]))
    assert answer[4].tolist() == [True, False, False]


@pytest.mark.parametrize("softcap", [None, 30.0])
def test_extreme_logits_stay_finite(softcap: float | None) -> None:
    case = Case(softcap=softcap)
    weight = torch.linspace(-1e4, 1e4, 37).unsqueeze(1)
    hidden = torch.tensor([[1.0], [-1.0], [0.0]], requires_grad=True)
    targets = torch.tensor([36, 36, 0])
    log_probs, entropy, *rest = fused(case, hidden, weight, None, targets)
    expected = dense(case, hidden.double(), weight.double(), None, targets)
    torch.testing.assert_close(log_probs.double(), expected[0], rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(entropy.double(), expected[1].nan_to_num(), rtol=1e-6, atol=1e-5)
    (log_probs.sum() + entropy.sum()).backward()
    assert all(bool(each.isfinite().all()) for each in (hidden.grad, rest[0], rest[1]))


def test_large_logits_cost_no_digits() -> None:
    """Uniform over 37 at a logit of 4096: a log-sum-exp of 4099.6 minus a logit would lose three digits in fp32."""
    log_prob, entropy, *_ = fused(Case(), torch.full((1, 1), 4096.0), torch.ones(37, 1), None, torch.tensor([3]))
    assert log_prob.item() == pytest.approx(-math.log(37), abs=1e-6)
    assert entropy.item() == pytest.approx(math.log(37), abs=1e-6)


def test_bf16_inputs_are_summed_in_fp32() -> None:  # reference 12
    case = Case(tokens=30, vocabulary=1000)
    hidden, weight, _, targets = tensors(case, torch.bfloat16, width=64)
    hidden.requires_grad_()
    log_probs, *_ = fused(case, hidden, weight, None, targets)
    wide = hidden.detach().float().requires_grad_()
    expected = dense(case, wide, weight.float(), None, targets)[0]
    assert log_probs.dtype == torch.float32
    assert (log_probs - expected).abs().max() < 1e-5
    # The dense way in bf16 is three orders of magnitude away, so the line above does tell them apart.
    assert (dense(case, hidden, weight, None, targets)[0] - expected).abs().max() > 1e-2
    log_probs.sum().backward()
    expected.sum().backward()
    assert hidden.grad.dtype == torch.bfloat16
    assert torch.equal(hidden.grad, wide.grad.bfloat16()) or (hidden.grad - wide.grad).norm() < 4e-3 * wide.grad.norm()


@pytest.mark.parametrize("trainable", [False, True], ids=["frozen", "trainable"])
def test_autocast_rounds_nothing(trainable: bool) -> None:
    case = Case(tokens=16, vocabulary=300)
    hidden, weight, _, targets = tensors(case, torch.float32, width=32)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()][: 1 + trainable]
    answers = []
    for enabled in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            outputs = fused(case, hidden, weight if trainable else weight.detach(), None, targets)
            answers.append([*outputs, *torch.autograd.grad(outputs[0].sum() + outputs[1].sum(), leaves)])
    for inside, outside in zip(*answers, strict=True):
        assert torch.equal(inside, outside)


# ----------------------------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("weights", [(1.0, 0.0), (0.0, 1.0), (1.0, 0.3)], ids=["log_prob", "entropy", "both"])
@pytest.mark.parametrize("trainable", [False, True], ids=["frozen", "trainable"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_equal_the_dense_ones(case: Case, trainable: bool, weights: tuple[float, float]) -> None:
    ours = gradients(fused, case, trainable, *weights)
    expected = gradients(lambda *arguments: dense(*arguments)[:2], case, trainable, *weights)
    for mine, theirs in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)


def test_a_trainable_bf16_head_has_gradients_as_exact_as_dense_ones() -> None:
    case = Case(tokens=60, vocabulary=1000)
    hidden, weight, _, targets = tensors(case, torch.bfloat16, width=64)

    def off_by(head: Any) -> list[float]:
        leaves = [each.detach().clone().requires_grad_() for each in (hidden, weight)]
        log_probs = head(case, leaves[0], leaves[1], None, targets)[0]
        result = torch.autograd.grad((torch.linspace(-1, 2, case.tokens) * log_probs.float()).sum(), leaves)
        assert {each.dtype for each in result} == {torch.bfloat16}
        pairs = zip(result, expected, strict=True)
        return [((ours.double() - exact).norm() / exact.norm()).item() for ours, exact in pairs]

    wide = [each.double().requires_grad_() for each in (hidden, weight)]
    exact = dense(case, wide[0], wide[1], None, targets)[0]
    expected = torch.autograd.grad((torch.linspace(-1, 2, case.tokens).double() * exact).sum(), wide)
    ours, theirs = off_by(fused), off_by(dense)
    assert all(mine < 4e-3 for mine in ours), (ours, theirs)  # 2^-8: one rounding of a bf16 result
    assert all(mine <= other for mine, other in zip(ours, theirs, strict=True)), (ours, theirs)


def test_a_retained_graph_gives_the_same_gradient_twice() -> None:
    hidden, *others = tensors(Case())
    log_probs = fused(Case(), hidden.requires_grad_(), *others)[0]
    first, second = (torch.autograd.grad(log_probs.sum(), hidden, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_only_the_bias_is_trained() -> None:
    case = Case(bias=True)
    hidden, weight, bias, targets = tensors(case)
    ours, expected = (
        torch.autograd.grad(head(case, hidden, weight, bias.requires_grad_(), targets)[0].sum(), bias)[0]
        for head in (fused, dense)
    )
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("target", "bounds"), [(-100, r"\[-100, 0\]"), (37, r"\[0, 37\]")])
def test_targets_outside_the_vocabulary_are_named(target: int, bounds: str) -> None:
    with pytest.raises(ValueError, match=f"{bounds}, outside the vocabulary of 37"):
        fused(Case(), torch.ones(2, 6), torch.ones(37, 6), None, torch.tensor([0, target]))


# ---------------------------------------------------------------------------------------------------- memory and work

COST = Case(tokens=100, vocabulary=700)
WIDTH = 16
PROJECTION = 2 * COST.tokens * COST.vocabulary * WIDTH  # FLOP


@pytest.fixture
def _real_proportions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_head, "CHUNK_ELEMENTS", 32 * 64)


def spend(
    trainable: bool,
    outputs: tuple[str, ...] = ALL,
    entropy: float = 0.0,
    grad: bool = True,
    softcap: float | None = 9.0,
) -> Allocations:
    """What one forward and backward (or one forward under no_grad) allocates and multiplies."""
    hidden, weight, _, targets = tensors(COST, torch.float32, WIDTH)
    leaves = [hidden.requires_grad_(), weight.requires_grad_(trainable)]
    with Allocations(hidden, weight, targets) as spent, torch.set_grad_enabled(grad):
        answer = FusedLogProbFunction.apply(hidden, weight, None, targets, 0.7, 64, softcap, 1.0, outputs)
        if grad:
            loss = answer[0].sum() + (entropy * answer[1].sum() if "entropy" in outputs else 0)
            torch.autograd.grad(loss, leaves if trainable else leaves[:1])
    return spent


@pytest.mark.usefixtures("_real_proportions")
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("entropy", [0.0, 1.0])
@pytest.mark.parametrize("trainable", [False, True], ids=["frozen", "trainable"])
def test_no_tensor_is_tokens_by_vocabulary(trainable: bool, entropy: float, grad: bool) -> None:  # reference 11
    spent = spend(trainable, entropy=entropy, grad=grad)
    logits = COST.tokens * COST.vocabulary
    weight = COST.vocabulary * WIDTH if trainable else 0
    assert spent.largest <= max(32 * 64, weight)
    # Together: five chunks, the gradients, and a few numbers per token.
    assert spent.peak < 4 * logits * 0.45


def test_the_spy_sees_the_dense_logits() -> None:
    hidden, weight, _, targets = tensors(COST, torch.float32, WIDTH)
    with Allocations(hidden, weight, targets) as spent:
        logits = hidden @ weight.T
        assert spent.live == spent.peak == 4 * COST.tokens * COST.vocabulary
        del logits
        torch.ones(1)
    assert spent.live <= 4
    assert spent.largest == COST.tokens * COST.vocabulary
    assert spent.flops == PROJECTION


@pytest.mark.usefixtures("_real_proportions")
@pytest.mark.parametrize(
    ("projections", "how"),
    [
        (2, {"trainable": False}),
        (2, {"trainable": False, "softcap": None, "outputs": ("log_probs",)}),
        (4, {"trainable": False, "entropy": 1.0}),
        (4, {"trainable": True}),
        (4, {"trainable": True, "entropy": 1.0}),
        (1, {"trainable": False, "grad": False}),
        (1, {"trainable": True, "grad": False}),
    ],
    ids=str,
)
def test_number_of_projections(projections: int, how: dict[str, Any]) -> None:
    """A zero gradient to the entropy, the adaptive bonus at rest, costs no recomputation either (first row)."""
    assert spend(**how).flops == projections * PROJECTION


# ----------------------------------------------------------------------------------------------------- inside TRL 1.15


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """TRL's own kernel, put back afterwards; and no GPU, wherever the test runs."""
    monkeypatch.setattr(fused_head, "triton_device", lambda: None)
    fused_head.undo()
    before = trl_utils._ChunkedLogProbFunction
    yield before
    trl_utils._ChunkedLogProbFunction = before
    fused_head._replaced = fused_head._NOT_REPLACED


def test_apply_and_undo(kernel: Any) -> None:
    assert not fused_head.status().applied
    for _ in range(2):
        status = fused_head.apply()
        assert (status.name, status.applied) == ("fused_head", True)
        assert trl_utils._ChunkedLogProbFunction is FusedLogProbFunction
        assert fused_head.status() == status
    for _ in range(2):
        assert not fused_head.undo().applied
        assert trl_utils._ChunkedLogProbFunction is kernel
    assert fused_head.apply().applied


def test_a_gpu_that_runs_triton_keeps_trls_kernel(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_head, "triton_device", lambda: "CUDA")
    status = fused_head.apply()
    assert (status.applied, status.reason) == (False, "TRL's Triton kernel runs on this CUDA device")
    assert trl_utils._ChunkedLogProbFunction is kernel


@pytest.mark.parametrize(
    ("triton", "cuda", "hip", "xpu", "device"),
    [
        (True, True, None, False, "CUDA"),
        (True, True, "7.0", False, "ROCm"),
        (True, False, None, True, "XPU"),
        (True, False, None, False, None),
        (False, True, None, False, None),
    ],
)
def test_triton_device(
    triton: bool, cuda: bool, hip: str | None, xpu: bool, device: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if triton else None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: xpu)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert fused_head.triton_device() == device


class _Stranger:
    """Somebody else's kernel."""


@pytest.mark.usefixtures("kernel")
def test_somebody_elses_kernel_is_left_alone() -> None:
    trl_utils._ChunkedLogProbFunction = _Stranger
    with pytest.raises(RuntimeError, match=r"already replaced by .*_Stranger; undo that first"):
        fused_head.apply()
    assert trl_utils._ChunkedLogProbFunction is _Stranger


@pytest.mark.usefixtures("kernel")
def test_undo_refuses_when_patched_on_top() -> None:
    fused_head.apply()
    trl_utils._ChunkedLogProbFunction = _Stranger
    status = fused_head.status()
    assert not status.applied
    assert "since replaced by" in status.reason
    with pytest.raises(RuntimeError, match=r"since replaced by .*_Stranger; undo that first"):
        fused_head.undo()
    assert trl_utils._ChunkedLogProbFunction is _Stranger


@pytest.mark.parametrize("found", ["1.14.9", "1.16.0", "2.0.0", "1.150.0"])
def test_another_trl_is_refused_by_its_version(kernel: Any, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_head, "version", lambda _: found)
    with pytest.raises(RuntimeError, match=f"written for trl 1.15.x and this is trl {found}"):
        fused_head.apply()
    assert trl_utils._ChunkedLogProbFunction is kernel


def test_trls_kernel_and_its_call_are_those_that_are_replaced() -> None:
    """Read from the sources, as trl.kernels cannot be imported without triton."""
    folder = Path(trl.__file__).parent
    source = (folder / "kernels" / "chunked_logprob.py").read_text()
    kernel = parameters_by_function(source)["ChunkedLogProbFunction.forward"]
    ours = list(inspect.signature(FusedLogProbFunction.apply).parameters)
    assert kernel == ["ctx", *ours]
    tree = ast.parse((folder / "trainer" / "utils.py").read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    applied = [node for node in calls if ast.unparse(node.func) == f"{fused_head.KERNEL}.apply"]
    assert [len(node.args) + len(node.keywords) for node in applied] == [len(ours)]


def llama() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, pad_token_id=0
    )
    return LlamaForCausalLM(config)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("masked", ["some", "all"])
def test_trls_fused_head_equals_the_models_logits(masked: str) -> None:
    fused_head.apply()
    model = llama()
    model.lm_head.weight.requires_grad_(False)
    ids = torch.randint(1, 97, (3, 9), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[1, 5:] = -100
    if masked == "all":
        labels[:] = -100
    logits = model(ids).logits[:, :-1] / 0.7
    expected = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1) * (labels[:, 1:] != -100)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    wanted_gradients = torch.autograd.grad(expected.sum(), parameters)

    trl_utils.add_fused_lm_head(model, temperature=0.7, outputs=("log_probs", "entropy"))
    output = model(ids, labels=labels, fused_lm_head=True)
    torch.testing.assert_close(output.log_probs, expected, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(torch.autograd.grad(output.log_probs.sum(), parameters), wanted_gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("entropy_coef", [0.0, 0.1])
def test_grpo_trains_on_a_cpu(entropy_coef: float, tiny_model: Path, tmp_path: Path) -> None:
    """One optimizer step of TRL's own trainer, whose per-token log-probabilities are then the model's."""
    step = {"per_device_train_batch_size": 4, "max_completion_length": 6, "max_steps": 1, "learning_rate": 1e-2}
    trainer = grpo_trainer(tiny_model, tmp_path, entropy_coef=entropy_coef, **step)
    model = trainer.model
    before = model.lm_head.weight.detach().clone()
    trainer.train()
    assert not torch.equal(model.lm_head.weight, before)
    logged = trainer.state.log_history[0]
    assert math.isfinite(logged["loss"])
    assert 0 < logged["entropy"] <= math.log(len(before)) + 1e-3

    ids = torch.randint(1, 97, (2, 8), generator=torch.Generator().manual_seed(1))
    log_probs, entropies, _ = trainer._get_per_token_logps_and_entropies(
        model, ids, torch.ones_like(ids), 5, compute_entropy=True
    )
    every = model(ids).logits[:, :-1].log_softmax(-1)
    expected = every.gather(-1, ids[:, 1:, None]).squeeze(-1)
    torch.testing.assert_close(log_probs, expected[:, -5:], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropies, -(every.exp() * every).sum(-1)[:, -5:], rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("kernel")
def test_a_compiled_model_trains_through_the_head() -> None:
    """`torch_compile=True` compiles the model's forward, in which TRL calls the head."""
    fused_head.apply()
    ids = torch.randint(1, 97, (3, 9), generator=torch.Generator().manual_seed(1))
    collected = []
    for compiled in (False, True):
        model = llama()
        trl_utils.add_fused_lm_head(model, outputs=("log_probs", "entropy"))
        # The backend does not matter: it was Dynamo, before any backend, that failed at the head.
        forward = torch.compile(model, backend="eager") if compiled else model
        output = forward(ids, labels=ids, fused_lm_head=True)
        collected.append([output.loss, *torch.autograd.grad(output.loss, list(model.parameters()))])
    for plain, compiled_one in zip(*collected, strict=True):
        torch.testing.assert_close(plain, compiled_one, rtol=1e-6, atol=1e-6)
