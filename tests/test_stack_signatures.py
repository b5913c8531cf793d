"""Failure signatures: each against its real message in tests/signatures/NAME.txt, whose first line says where it is from."""

import json
import re
import re._constants as opcodes
import re._parser as parser
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any

import pytest

from cogumi.diagnostics import signatures as module
from cogumi.diagnostics.signatures import explain, explain_text, signatures

HERE = Path(__file__).parent
FIXTURES = {path.stem: path.read_text(encoding="utf-8") for path in sorted((HERE / "signatures").glob("*.txt"))}
WRITTEN = tomllib.loads(Path(module.__file__).with_name("signatures.toml").read_text(encoding="utf-8"))
EVERY_PATTERN = [(name, pattern) for name, entry in WRITTEN.items() for pattern in entry["patterns"]]


def message(name: str) -> str:
    return FIXTURES[name].split("\n", 1)[1]


def names(text: str) -> list[str]:
    return [diagnosis.name for diagnosis in explain(text)]


def misread(messages: Iterable[tuple[str, str]]) -> list[tuple[str, list[str], str]]:
    """Which of the messages are not known by the signature given with them, and by no other."""
    return [(name, names(text), text[:100]) for name, text in messages if names(text) != [name]]


# --- the table --------------------------------------------------------------------------------------------------------


def test_there_is_a_real_message_for_every_signature_and_none_too_many() -> None:
    assert set(FIXTURES) == {signature.name for signature in signatures()}


def test_a_real_message_is_known_by_its_own_signature_and_by_no_other() -> None:
    assert misread((name, message(name)) for name in FIXTURES) == []


def test_a_fixture_says_where_it_is_from() -> None:
    origins = {name: text.split("\n", 1)[0] for name, text in FIXTURES.items()}
    known = re.compile(r"# (https://github\.com/\S+/(issues|pull)/\d+|produced here with \S)")
    assert [name for name, origin in origins.items() if not known.match(origin)] == []


def test_the_table_is_complete_and_repeats_nothing() -> None:
    assert len({pattern for _, pattern in EVERY_PATTERN}) == len(EVERY_PATTERN)
    for signature in signatures():
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", signature.name)
        assert signature.cause.endswith(".")
        assert signature.fix
        assert signature.source
        assert set(signature.follows) <= set(FIXTURES) - {signature.name}
    assert len({signature.fix for signature in signatures()}) == len(signatures())


def test_every_command_of_ours_that_a_fix_names_exists() -> None:
    from typer.main import get_command

    from cogumi.cli.app import app

    root: Any = get_command(app)
    named = re.findall(r"`cogumi ([a-z-]+)(?: ([a-z-]+))?", " ".join(signature.fix for signature in signatures()))
    assert named
    for command, below in named:
        assert command in root.commands
        assert not below or below in root.commands[command].commands
    assert (HERE.parent / "requirements" / "install.sh").is_file()
    assert (HERE.parent / "docs" / "stack.md").is_file()


def test_every_setting_that_a_fix_names_is_one() -> None:
    from cogumi.config.schema import load_config

    fixes = " ".join(signature.fix for signature in signatures())
    settings = set(re.findall(r"`?(model|train)((?:\.(?!resize)[a-z_0-9]+)+)(?:=([\w./@-]+))?", fixes))
    assert settings
    for section, rest, value in settings:
        # One refused by TRL or transformers raises; what the fix only names is set to a number.
        smoke = "smoke/gspo" if "vllm" in rest else "smoke/sft"
        name = f"{section}{rest}".replace(".", "__")
        typed = {"true": True, "false": False, "0": 0, "": 1}.get(value, value)
        load_config(HERE.parent / "cogumi" / "configs" / f"{smoke}.yaml", **{name: typed})


def test_the_table_is_in_the_wheel(tmp_path: Path) -> None:
    source = tmp_path / "source"  # a copy: building leaves its own files behind
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(HERE.parent / name, source)
    shutil.copytree(HERE.parent / "cogumi", source / "cogumi", ignore=shutil.ignore_patterns("__pycache__"))
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "-w", str(tmp_path), str(source)], check=True, timeout=120)
    with zipfile.ZipFile(next(tmp_path.glob("cogumi-*.whl"))) as wheel:
        assert "cogumi/diagnostics/signatures.toml" in wheel.namelist()


def test_importing_and_explaining_loads_no_torch() -> None:
    code = (
        "import sys; from cogumi.diagnostics.signatures import explain_text; print(explain_text('CUDA error: out of memory')); "
        "print([name for name in ('torch', 'numpy', 'transformers', 'pydantic') if name in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert output.stdout.splitlines()[-1] == "[]"


# The same failures in other words, for the patterns that no fixture is for.
OTHER_WORDS = [
    # https://github.com/pytorch/pytorch/issues/35710
    ("driver-not-ready", "RuntimeError: cuda runtime error (802) : system not yet initialized at aten/src/THC/THCGeneral.cpp:50"),
    # https://github.com/ZQPei/deep_sort_pytorch/issues/189
    ("torchvision-pair", "RuntimeError: No such operator torchvision::nms"),
    # https://github.com/pytorch/ao/issues/1095
    ("torchao-too-new", "AttributeError: module 'torch' has no attribute 'float8_e4m3fn'"),
    # https://github.com/infiniflow/ragflow/issues/4466
    ("nvjitlink", "nvidia/cusparse/lib/libcusparse.so.12: undefined symbol: __nvJitLinkAddData_12_1, version libnvJitLink.so.12"),
    # https://github.com/scikit-image/scikit-image/issues/5270
    ("numpy-abi", "ValueError: numpy.ndarray size changed, may indicate binary incompatibility. Expected 88 from C header"),
    # bitsandbytes/cextension.py of bitsandbytes 0.50.2
    ("bitsandbytes-no-binary", "RuntimeError: No compatible CUDA binary found at bitsandbytes/libbitsandbytes_cuda999.so"),
    # https://github.com/TianHuiLab/Falcon/issues/11
    (
        "flash-attn-build-without-torch",
        """        File "/tmp/pip-install-v_8s9w7i/flash-attn_67edd227d98e40fdb7686c3e3a516548/setup.py", line 19, in <module>
          import torch
      ModuleNotFoundError: No module named 'torch'
      [end of output]""",
    ),
    # pip before 25.3 ends otherwise: https://github.com/Dao-AILab/flash-attention/issues/1920
    (
        "flash-attn-build-without-torch",
        """        File "<string>", line 22, in <module>
      ModuleNotFoundError: No module named 'torch'
      [end of output]""",
    ),
    # torch's CUDA runtime outside its allocator; no thread at hand
    ("cuda-out-of-memory", "RuntimeError: CUDA error: out of memory"),
    # https://github.com/vllm-project/vllm/issues/2248
    ("vllm-memory-taken", "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`"),
    # https://github.com/NVIDIA/nccl/issues/525
    ("shared-memory-too-small", "NCCL WARN Error while creating shared memory segment nccl-shm-recv-1462445a6f01cbfc-1-2-3"),
    # https://github.com/hongsukchoi/TCMR_RELEASE/issues/24
    (
        "shared-memory-too-small",
        "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).",
    ),
    (
        "shared-memory-too-small",
        "RuntimeError: DataLoader worker (pid 2991) is killed by signal: Bus error. It is possible that dataloader's workers",
    ),
    # Python's form with a file name; no thread at hand
    ("shared-memory-too-small", "OSError: [Errno 28] No space left on device: '/dev/shm/psm_4d1f'"),
    # https://github.com/databrickslabs/dolly/issues/139
    ("disk-full", "OSError: [Errno 28] No space left on device"),
    # https://github.com/hiyouga/LlamaFactory/issues/5155
    ("disk-full", 'IoError(Os { code: 28, kind: StorageFull, message: "No space left on device" })'),
    # https://github.com/xorbitsai/inference/issues/1734
    ("gated-not-logged-in", "Access to model meta-llama/Meta-Llama-3-8B is restricted. You must be authenticated to access it."),
    # https://github.com/kyegomez/NeoSapiens/issues/3
    ("gated-not-logged-in", "Repo model meta-llama/Llama-2-7b is gated. You must be authenticated to access it."),
    # safetensors 0.8.0 on the first half of a file, and on its first 20 bytes
    ("safetensors-incomplete", "SafetensorError: Error while deserializing header: incomplete metadata, file not fully covered"),
    ("safetensors-incomplete", "SafetensorError: Error while deserializing header: invalid header length"),
    # https://github.com/lm-sys/FastChat/issues/1664
    ("flash-attn-missing", "ModuleNotFoundError: No module named 'flash_attn'"),
    # https://github.com/hiyouga/EasyR1/issues/384
    (
        "flash-attn-missing",
        "ImportError: FlashAttention2 has been toggled on, but it cannot be used due to the following error: the package "
        "flash_attn seems to be not installed.",
    ),
    # https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1213
    ("bitsandbytes-missing", "ImportError: Using `bitsandbytes` 8-bit quantization requires Accelerate"),
    # https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1614
    ("bitsandbytes-cuda-setup", "CUDA Setup failed despite CUDA being available. Please run the following command to get more"),
    # docker, and a shell that prints the status; no thread at hand
    ("killed", "the container exited with code 137\n"),
    # cut after its first sentence: https://github.com/rendeirolab/LazySlide/issues/52
    (
        "gated-not-logged-in",
        """GatedRepoError: 401 Client Error. (Request ID: Root=1-6800c1a8-69511c6166fc8c3076cf474d;b91c310c)

Cannot access gated repo for url https://huggingface.co/MahmoodLab/uni/resolve/main/config.json.
""",
    ),
    ("gated-not-logged-in", "Cannot access gated repo for url https://huggingface.co/briaai/RMBG-1.4/resolve/main/pytorch_model.bin."),
    # https://github.com/ariG23498/gemma3-object-detection/issues/5
    (
        "gated-no-access",
        """403 Client Error. (Request ID: Root=1-6824e511-0a1d60376d4eefac56a9c456;85e8458c-a7d7-452d-b8fe-576bb259b500)

Cannot access gated repo for url https://huggingface.co/google/gemma-3-4b-pt/resolve/main/config.json.
Access to model google/gemma-3-4b-pt is restricted and you are not in the authorized list.""",
    ),
    # https://github.com/QwenLM/Qwen/issues/120
    ("cublas-not-created", "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    # https://github.com/NVIDIA/nccl/issues/697
    ("nccl-system-error", "ProcessGroupNCCL.cpp:1229, unhandled system error, NCCL version 2.12.10"),
    # https://github.com/ADLab-AutoDrive/BEVHeight/issues/13
    ("nccl-cuda-error", "ProcessGroupNCCL.cpp:38, unhandled cuda error, NCCL version 2.7.8"),
    # https://github.com/LambdaLabsML/examples/issues/41
    ("killed", "Summoning checkpoint.\nKilled\n"),
    ("killed", "Killed"),
    # tqdm's form for steps that take longer than a second; no thread at hand
    ("killed", " 31%|███       | 331/1063 [01:06<03:59,  3.06s/it]Killed\n"),
    # https://github.com/vacancy/NSCL-PyTorch-Release/issues/23 (paths shortened)
    ("killed", "jac-crun: line 6:  3305 Killed                  $JACROOT/bin/jac-run \"$@\""),
    # https://github.com/2U1/Qwen-VL-Series-Finetune/issues/135
    ("killed", "[856341.770960] Out of memory: Killed process 410126 (python) total-vm:79905000kB, anon-rss:22957108kB"),
    # https://github.com/amdegroot/ssd.pytorch/issues/151
    ("killed", "Process finished with exit code 137 (interrupted by signal 9: SIGKILL)"),
    # https://github.com/meta-llama/llama/issues/856
    ("killed", "torch.distributed.elastic.multiprocessing.api: [ERROR] failed (exitcode: -9) local_rank: 0 (pid: 62498)"),
    # https://github.com/bmaltais/kohya_ss/issues/1065
    ("killed", "died with <Signals.SIGKILL: 9>"),
    # https://github.com/HRNet/HigherHRNet-Human-Pose-Estimation/issues/47
    ("killed", "Exception: process 1 terminated with signal SIGKILL"),
    # https://github.com/hezhangsprinter/DCPDN/issues/12
    ("killed", "RuntimeError: DataLoader worker (pid 19597) is killed by signal: Killed."),
    # pip 26.3, of six==1.16.0 without a hash
    ("hashes-incomplete", "ERROR: Hashes are required in --require-hashes mode, but they are missing from some requirements."),
    # python -m cogumi doctor, with another Python
    ("cogumi-missing", "/usr/bin/python3: No module named cogumi"),
    # https://github.com/Dao-AILab/flash-attention/issues/509
    ("no-nvcc", "UserWarning: flash_attn was requested, but nvcc was not found.  Are you sure your environment has nvcc?"),
    # pip 26.3 with causal-conv1d==1.7.0 and torch==2.13.0+cpu
    ("no-nvcc", "NameError: name 'bare_metal_version' is not defined"),
    # https://github.com/huggingface/nanotron/issues/167
    ("no-nvcc", "FileNotFoundError: [Errno 2] No such file or directory: '/usr/local/cuda/bin/nvcc'"),
    # https://github.com/Dao-AILab/flash-attention/issues/304
    ("flash-attn-build", "ERROR: Could not build wheels for flash-attn, which is required to install"),
    # torch 2.13.0 with bitsandbytes 0.50.2: hasattr of a 4-bit weight, and an expert that may get no rows
    ("four-bit-dynamo", "  Hint: Renaming attribute `__dict__` of type <class 'bitsandbytes.nn.modules.Params4bit'>"),
    ("four-bit-dynamo", "Caused by: if A_numel == 0:  # bitsandbytes/autograd/_functions.py:456 in matmul_4bit"),
    # trl 1.15.0, dpo_trainer.py
    ("unknown-loss", "ValueError: Unknown loss type: gspo. Should be one of ['sigmoid', 'hinge', 'ipo', 'exo_pair', "),
    # trl 1.15.0
    ("trl-argument", "TypeError: SFTConfig.__init__() got an unexpected keyword argument 'max_seq_length'"),
    ("trl-argument", "TypeError: GRPOConfig.__init__() got an unexpected keyword argument 'vllm_device'"),
    # torch 2.13.0: torch.bmm, torch.mm
    ("dtypes-mixed", "RuntimeError: expected scalar type Half but found Float"),
    ("dtypes-mixed", "RuntimeError: expected m1 and m2 to have the same dtype, but got: c10::Half != float"),
    # https://github.com/unslothai/unsloth/issues/1914
    ("wandb-no-key", "wandb: ERROR api_key not configured (no-tty). call wandb.login(key=[your_api_key])"),
    # https://github.com/huggingface/transformers/issues/30445
    ("data-parallel", "AttributeError: 'DataParallel' object has no attribute 'device'"),
    # https://github.com/huggingface/transformers/issues/14128
    ("data-parallel", "UserWarning: Was asked to gather along dimension 0, but all input tensors were scalars; will instead"),
    # https://github.com/unslothai/unsloth/issues/3553
    ("unsloth-no-gpu", "NotImplementedError: Unsloth currently only works on NVIDIA GPUs and Intel GPUs."),
    # trl before 1.0
    (
        "rollout-not-whole-groups",
        "ValueError: The global train batch size (8 x 1) must be evenly divisible by the number of generations per prompt (6).",
    ),
    # aten/src/ATen/native/cuda/IndexKernelUtils.cu of torch
    ("token-outside-vocabulary", 'Assertion `ind < ind_dim_size && "vectorized gather kernel index out of bounds"` failed.'),
]  # fmt: skip


def test_other_words_for_a_failure_are_known_too() -> None:
    assert misread(OTHER_WORDS) == []


def test_there_is_a_message_for_every_pattern() -> None:
    def is_met(name: str, pattern: str) -> bool:
        compiled = re.compile(pattern.replace(" ", module.GAP))
        return any(compiled.search(text) for known, text in [*OTHER_WORDS, (name, message(name))] if known == name)

    assert [each for each in EVERY_PATTERN if not is_met(*each)] == []


def paragraphs(name: str) -> list[str]:
    return re.split(r"\n{2,}", message(name).strip())


def test_a_part_of_a_message_is_enough() -> None:
    parts = [("pip-conflict", part) for part in paragraphs("pip-conflict") if not part.startswith("To fix")]
    for word in ("conflicts", "incompatible"):
        parts += [("pip-broke-others", line) for line in message("pip-broke-others").splitlines() if word in line]
    parts += [(name, paragraphs(name)[0]) for name in ("gated-not-logged-in", "gated-no-access")]
    parts += [("gated-no-access", "\n\n".join(paragraphs("gated-no-access")).rsplit("\n", 1)[0])]
    assert misread(parts) == []


@pytest.mark.parametrize(
    "package", ["trl", "transformers", "peft", "accelerate", "datasets", "bitsandbytes", "unsloth"]
)
def test_a_missing_package_of_the_stack_is_known(package: str) -> None:
    code = f"import sys; sys.path.clear(); import {package}"
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, timeout=60)
    assert names(done.stderr) == ["stack-package-missing"]


# --- patterns that cannot be slow -------------------------------------------------------------------------------------


def repeats(parsed: Any) -> list[tuple[int, int, Any]]:
    """(least, most, what) of every repetition in a parsed pattern, those within others too."""
    collected = []
    for operation, argument in parsed:
        if operation in (opcodes.MAX_REPEAT, opcodes.MIN_REPEAT, opcodes.POSSESSIVE_REPEAT):
            collected += [argument, *repeats(argument[2])]
        elif operation is opcodes.SUBPATTERN:
            collected += repeats(argument[3])
        elif operation is opcodes.BRANCH:
            collected += [repeat for branch in argument[1] for repeat in repeats(branch)]
        elif operation in (opcodes.ASSERT, opcodes.ASSERT_NOT):
            collected += repeats(argument[1])
    return collected


def slow(pattern: str) -> str | None:
    """Why a search with this pattern could take longer than the text is long, times a constant; None if it cannot."""
    parsed = list(parser.parse(pattern))
    if [operation for operation, _ in parsed[:3]] != [opcodes.LITERAL] * 3:
        return "does not begin with three plain letters"
    result = repeats(parsed)
    if any(most is opcodes.MAXREPEAT for _, most, _ in result):
        return "repeats without a bound"
    if prod(int(most) - int(least) + 1 for least, most, _ in result) > 2000:
        return "can be matched at one place in too many ways"
    # A space becomes module.GAP, which takes up to 200 characters of white space: beside it nothing else may take them.
    if re.search(r" (?:\.|\\S|\\D|\\W|\[\^)[^ ]*?\{\d*,\d{2,}\}|(?:\.|\\D|\\W|\[\^[^]]*\])\{\d*,\d{2,}\} ", pattern):
        return "repeats something beside a space that may be a space"
    return None


def test_no_pattern_can_be_slow() -> None:
    assert [(name, pattern, why) for name, pattern in EVERY_PATTERN if (why := slow(pattern))] == []


@pytest.mark.parametrize(
    "pattern", ["abc.*d", "abc(?:x+)+d", ".abc", "a|bcd", r"abc\w{1,50}x\w{1,50}y", "abc .{0,60} def", "abc .{0,60}def"]
)
def test_slow_patterns_are_told_from_others(pattern: str) -> None:
    assert slow(pattern) is not None


def test_what_may_stand_between_words_can_be_read_in_one_way_only() -> None:
    ((_, most, loop),) = [repeat for repeat in repeats(parser.parse(module.GAP)) if repeat[1] == 200]
    # Its alternatives begin with different characters, so that a run of them has one reading.
    ((operation, (_, branches)),) = loop[0][1][3] if loop[0][0] is opcodes.SUBPATTERN else loop
    assert operation is opcodes.BRANCH
    firsts = [re.compile(text) for text in (r"[\s│|>]", r"\[", r"\(", r"\d")]
    assert len(branches) == len(firsts)
    assert all(sum(bool(first.match(character)) for first in firsts) <= 1 for character in " \t\n│|>[(2rpx")
    assert int(most) == 200


# --- what is not known ------------------------------------------------------------------------------------------------

UNRELATED = {
    "user's KeyError": """Traceback (most recent call last):
  File "train.py", line 12, in <module>
    rows = [row["completion"] for row in dataset]
KeyError: 'completion'
""",
    "TRL's ValueError": """Traceback (most recent call last):
  File "site-packages/trl/trainer/grpo_config.py", line 1081, in __post_init__
    raise ValueError(
ValueError: delta must be greater than 1 + epsilon
""",
    "talk of killed processes": "Killed by hand, since it hung.\nWhat was Killed\nA process Killed by exit code 137 ran out.\n",
    "one who only names an exit code": "Does exit code 137 mean that it was killed?\nexit code 1370\n",
    "a model's own module": "ImportError: cannot import name 'Layer' from 'transformers_modules.model'\n",
    "a module that cogumi has not got": "ModuleNotFoundError: No module named 'cogumi.dataset'\n",
    "another module of flash-attn": "ModuleNotFoundError: No module named 'flash_attn.flash_attention'\n",
    "torch missing in the user's own script": """Traceback (most recent call last):
  File "train.py", line 1, in <module>
    import torch
ModuleNotFoundError: No module named 'torch'
""",
    "a healthy log": "{'loss': 1.234, 'grad_norm': 0.5, 'learning_rate': 1e-05, 'epoch': 0.1}\n" * 50,
    "another CUDA error": "RuntimeError: CUDA error: misaligned address\n",
    "another library's undefined symbol": "ImportError: libfoo.so: undefined symbol: _ZN3foo3barEv\n",
    "a full pipe": "BrokenPipeError: [Errno 32] Broken pipe\n",
    "advice about memory": "If you run out of CUDA memory, try a smaller batch. No space is left for the last line.\n",
}


@pytest.mark.parametrize("text", UNRELATED.values(), ids=UNRELATED)
def test_what_is_not_known_is_called_unknown(text: str) -> None:
    explanation = explain_text(text)
    assert explain(text) == ()
    assert explanation.last_line == text.splitlines()[-1]
    assert str(explanation).startswith(f"unknown: none of the {len(signatures())} known failures; the last line is: ")
    assert explanation.as_dict()["known"] is False


def test_what_is_not_known_gets_a_next_step() -> None:
    said = str(explain_text(UNRELATED["another CUDA error"])).splitlines()
    assert said[0].endswith("the last line is: RuntimeError: CUDA error: misaligned address")
    assert said[1:] == [
        "  next: `cogumi doctor` checks this environment; a CUDA error: once more with CUDA_LAUNCH_BLOCKING=1, "
        "which shows where it is"
    ]


def test_the_failed_check_stands_before_the_assert_that_follows() -> None:
    text = message("cublas-not-created") + message("device-side-assert") + message("token-outside-vocabulary")
    assert names(text) == ["token-outside-vocabulary", "cublas-not-created", "device-side-assert"]


@pytest.mark.parametrize("text", ["", "\n\n", " \r\n\t"])
def test_no_text_is_said_to_be_none(text: str) -> None:
    assert str(explain_text(text)) == "unknown: there is no text to explain"


# --- order ------------------------------------------------------------------------------------------------------------


def test_two_causes_stand_in_the_order_of_the_text() -> None:
    one, two = message("glibc-too-old"), message("disk-full")
    assert names(one + two) == ["glibc-too-old", "disk-full"]
    assert names(two + one) == ["disk-full", "glibc-too-old"]


def test_a_cause_is_named_once_with_its_first_line() -> None:
    text = "step 1\n" + message("cuda-out-of-memory") * 3
    (diagnosis,) = explain(text)
    assert diagnosis.line_number == 2
    assert diagnosis.line.startswith("OutOfMemoryError: CUDA out of memory. Tried to allocate 150.00 MiB.")


def test_the_import_that_failed_stands_before_what_followed_from_it() -> None:
    text = message("driver-too-old") + message("bf16-unsupported") + message("triton-no-driver")
    assert names(text) == ["driver-too-old", "bf16-unsupported", "triton-no-driver"]
    # A log whose two streams were collected apart has the consequence first.
    text = message("triton-no-driver") + message("driver-too-old")
    assert names(text) == ["driver-too-old", "triton-no-driver"]


def test_a_warning_stands_after_what_ended_the_run() -> None:
    assert names(message("xformers-build") + message("cuda-out-of-memory")) == ["cuda-out-of-memory", "xformers-build"]


def test_a_cause_deep_in_a_chain_of_exceptions_stands_first() -> None:
    # produced with XFORMERS_MORE_DETAILS=1, xformers==0.0.35 and torch==2.13.0+cpu: the warning is printed before its cause
    text = """WARNING[XFORMERS]: xFormers can't load C++/CUDA extensions. xFormers was built for:
    PyTorch 2.10.0+cu128 with CUDA 1208 (you have 2.13.0+cpu)
Traceback (most recent call last):
  File ".venv/lib/python3.11/site-packages/torch/_ops.py", line 1516, in load_library
    ctypes.CDLL(path)
OSError: libcudart.so.12: cannot open shared object file: No such file or directory

The above exception was the direct cause of the following exception:

xformers._cpp_lib.xFormersInvalidLibException: xFormers can't load C++/CUDA extensions. xFormers was built for:
"""
    assert names(text) == ["cuda12-library-missing", "xformers-build"]


# --- noise ------------------------------------------------------------------------------------------------------------


def coloured(text: str) -> str:
    return re.sub(r"(\w+)(Error|: )", "\x1b[0;31m\\1\\2\x1b[0m", text)


def boxed(text: str) -> str:
    """As rich prints a traceback: wrapped at 96 columns, between borders."""
    lines = []
    for line in text.splitlines():
        words = re.findall(r"\S+\s*", line) or [""]
        row = ""
        for word in words:
            if row and len(row + word) > 96:
                lines.append(row)
                row = ""
            row += word
        lines.append(row)
    return "\n".join(f"│ {line:<100} │" for line in lines)


NOISE = {
    "colours": coloured,
    "colours as a notebook file spells them": lambda text: coloured(text).replace("\x1b", "\\u001b"),
    "ranks": lambda text: "".join(f"[rank0]: {line}\n" for line in text.splitlines()),
    "processes": lambda text: "".join(f"(EngineCore pid=169) {line}\n" for line in text.splitlines()),
    "timestamps": lambda text: "".join(f"2026-11-22 12:00:01,234 ERROR {line}\n" for line in text.splitlines()),
    "times of a collector": lambda text: "".join(
        f"2026-11-22T12:00:01.123456789Z {line}\n" for line in text.splitlines()
    ),
    "CRLF": lambda text: text.replace("\n", "\r\n"),
    "a progress bar": lambda text: "  0%|          | 0/63 [00:00<?, ?it/s]\r  2%|▏  | 1/63 [00:07<07:41]\r" + text,
    "quoted as a reply": lambda text: "".join(f"> {line}\n" for line in text.splitlines()),
    "a box": boxed,
    "ranks in a box": lambda text: "".join(f"[rank0]: {line}\n" for line in boxed(text).splitlines()),
    "a thousand lines around it": lambda text: "step\n" * 1000 + text + "bye\n" * 1000,
}


@pytest.mark.parametrize("noise", NOISE)
def test_noise_hides_no_message(noise: str) -> None:
    assert misread((name, NOISE[noise](message(name))) for name in FIXTURES) == []


def test_a_wrapped_message_is_known_and_shown_in_one_line() -> None:
    (diagnosis,) = explain("RuntimeError: CUDA out of\n    memory. Tried to\r\n    allocate 2.00 GiB\n")
    assert (diagnosis.name, diagnosis.line_number) == ("cuda-out-of-memory", 1)
    assert diagnosis.line == "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB"


def test_a_line_of_source_code_around_a_frame_says_nothing() -> None:
    text = """File site-packages/torch/cuda/__init__.py:319, in _lazy_init()
    308 if not hasattr(torch._C, "_cuda_getDeviceCount"):
    309     raise AssertionError("Torch not compiled with CUDA enabled")
    310 if _cudart is None:
--> 319 torch._C._cuda_init()

RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU
"""
    assert names(text) == ["no-driver"]
    rich = '│   309 │   │   raise AssertionError("Torch not compiled with CUDA enabled")             │\n'
    assert names(rich) == []
    assert names(rich + "AssertionError: Torch not compiled with CUDA enabled\n") == ["torch-without-cuda"]


def test_a_very_long_line_is_shown_around_what_matched_and_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "a-secret-of-the-environment")
    said = " token=a-secret-of-the-environment CUDA out of memory. Tried to allocate "
    text = "x" * 2_000_000 + said + "y " * 1_000_000
    (diagnosis,) = explain(text)
    assert "CUDA out of memory" in diagnosis.line
    assert "token=<redacted>" in diagnosis.line
    assert len(diagnosis.line) <= module.MAX_LINE_CHARS
    assert "a-secret-of" not in json.dumps(explain_text("hf: a-secret-of-the-environment").as_dict())


# --- what is printed --------------------------------------------------------------------------------------------------


def test_an_explanation_names_cause_line_and_fix() -> None:
    explanation = explain_text(message("torchvision-pair"))
    said = str(explanation).splitlines()
    assert said[0].startswith("torchvision-pair: torchvision is of another release than torch")
    assert said[1].endswith(": RuntimeError: operator torchvision::nms does not exist")
    assert said[2].startswith("  fix: Put the lane's pair back: `sh requirements/install.sh`")
    as_dict = json.loads(json.dumps(explanation.as_dict()))
    assert as_dict["known"] is True
    assert as_dict["diagnoses"][0]["name"] == "torchvision-pair"
    assert as_dict["diagnoses"][0]["line_number"] == int(re.findall(r"line (\d+):", said[1])[0])
    line = message("torchvision-pair").splitlines()[as_dict["diagnoses"][0]["line_number"] - 1]
    assert line == "RuntimeError: operator torchvision::nms does not exist"
