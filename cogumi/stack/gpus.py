"""GPUs: figures of the cards that people rent, the choice of one, launched processes, and caches for each card.

Peaks are dense bf16 FLOP/s with float32 accumulation. NVIDIA's data sheets print most with sparsity, which is twice
these; dense are those of A100, A800, A40, A30, A10, L40S and L40. GeForce is from the white papers of the architectures
("FP16 Tensor TFLOPS with FP32 Accumulate", dense). T4 and V100 have no bf16. Bandwidth is from the same sheets. Memory
is what nvidia-smi calls the total, in MiB, of which the driver and the CUDA context keep some.

Where torch sees several GPUs, transformers' Trainer would spread a batch over all of them (`nn.DataParallel`), which changes the
batch size.
"""

import ctypes
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import platformdirs

from cogumi.core.errors import UsageError
from cogumi.stack.lanes import installed_versions

# Words in the names of a part of a card, or of a slower or faster variant.
ANOTHER_CARD = frozenset({"MIG", "LAPTOP", "MOBILE", "MAX", "D", "TI", "SUPER"})


@dataclass(frozen=True)
class Card:
    """A row of CARDS: MiB of memory, dense bf16 FLOP/s (None without bf16), bytes a second, CUDA's compute capability.

    words: of torch.cuda.get_device_name(); the first row whose words all occur is taken.
    """

    name: str
    words: str
    memory: int
    peak: float | None
    bandwidth: float
    capability: tuple[int, int]

    @property
    def bytes(self) -> int:
        return self.memory * 2**20


CARDS = (
    Card("B200", "B200", 183359, 2250e12, 8000e9, (10, 0)),
    Card("H200 NVL", "H200 NVL", 143771, 835.5e12, 4800e9, (9, 0)),
    Card("H200", "H200", 143771, 989.5e12, 4800e9, (9, 0)),
    Card("GH200", "GH200", 97871, 989.5e12, 4000e9, (9, 0)),
    Card("H100 PCIe", "H100 PCIE", 81559, 756.5e12, 2000e9, (9, 0)),
    Card("H100 NVL", "H100 NVL", 95830, 835.5e12, 3938e9, (9, 0)),
    Card("H100 SXM", "H100 80GB HBM3", 81559, 989.5e12, 3350e9, (9, 0)),
    Card("A100 80GB PCIe", "A100 80GB PCIE", 81920, 312e12, 1935e9, (8, 0)),
    Card("A100 80GB", "A100 80GB", 81920, 312e12, 2039e9, (8, 0)),
    Card("A100 40GB", "A100 40GB", 40960, 312e12, 1555e9, (8, 0)),
    Card("A800 80GB", "A800 80GB", 81920, 312e12, 2039e9, (8, 0)),
    Card("A40", "A40", 46068, 149.7e12, 696e9, (8, 6)),
    Card("A30", "A30", 24576, 165e12, 933e9, (8, 0)),
    Card("A10", "A10", 23028, 125e12, 600e9, (8, 6)),
    Card("L40S", "L40S", 46068, 362e12, 864e9, (8, 9)),
    Card("L40", "L40", 46068, 181e12, 864e9, (8, 9)),
    Card("L4", "L4", 23034, 121e12, 300e9, (8, 9)),
    Card("RTX 6000 Ada", "RTX 6000 ADA", 49140, 364.25e12, 960e9, (8, 9)),
    Card("RTX A6000", "RTX A6000", 49140, 154.85e12, 768e9, (8, 6)),
    Card("RTX 5090", "RTX 5090", 32607, 209.5e12, 1792e9, (12, 0)),
    Card("RTX 4090", "RTX 4090", 24564, 165.2e12, 1008e9, (8, 9)),
    Card("RTX 3090", "RTX 3090", 24576, 71e12, 936e9, (8, 6)),
    Card("V100 32GB", "V100 32GB", 32768, None, 900e9, (7, 0)),
    Card("V100 16GB", "V100 16GB", 16384, None, 900e9, (7, 0)),
    Card("T4", "T4", 15360, None, 320e9, (7, 5)),
)


def words_in(name: str) -> set[str]:
    return set(re.findall("[A-Z0-9]+", name.upper()))


def find_card(device_name: str) -> Card | None:
    """Return the card with this torch device name, None for one that is not in the table."""
    words = words_in(device_name)
    return None if words & ANOTHER_CARD else next((card for card in CARDS if words_in(card.words) <= words), None)


def parse_card(name: str) -> Card:
    """Return the card for a user's "h100" or "A100 80GB". Raises UsageError for an unknown or ambiguous name."""
    words = words_in(name) - {"NVIDIA", "GEFORCE"}
    exact = [card for card in CARDS if words_in(card.name) == words]
    matches = exact or [card for card in CARDS if words and words <= words_in(f"{card.name} {card.words}")]
    if not matches:
        raise UsageError(f"card {name!r} is not known", fix=f"there are {', '.join(card.name for card in CARDS)}")
    if len(matches) > 1:
        raise UsageError(f"card {name!r} may be {' or '.join(card.name for card in matches)}", fix="say which")
    return matches[0]


VARIABLE = "CUDA_VISIBLE_DEVICES"
QUERY = ("--query-gpu=index,uuid,memory.free,name", "--format=csv,noheader,nounits")
LIMIT = 60.0  # seconds; without persistence mode the driver is loaded first


def choose_gpu(text: str) -> tuple[str, str] | None:
    """Choose the GPU with the most free memory, from the output of `nvidia-smi` with QUERY.

    Returns the value for CUDA_VISIBLE_DEVICES and the reason; None if there are fewer than two GPUs.
    """
    gpus = list_gpus(text)
    if len(gpus) < 2:
        return None
    # Unknown free memory counts as none.
    index, uuid, free, name = max(gpus, key=lambda row: int(row[2]) if row[2].isdigit() else -1)
    room = f", {int(free) / 1024:.1f} GiB," if free.isdigit() else ""
    reason = f"GPU {index} ({name}) has the most free memory{room} of {len(gpus)}, and a run trains on one"
    return (uuid if uuid.startswith("MIG") else index), reason  # vLLM has failed on UUIDs; a MIG instance has no index


def list_gpus(text: str) -> list[list[str]]:
    """Parse (index, uuid, free MiB, name) of each GPU from the output of `nvidia-smi` with QUERY."""
    rows = [[cell.strip() for cell in line.split(",", 3)] for line in text.splitlines()]
    return [row for row in rows if len(row) == 4 and row[0].isdigit()]


def ask_driver() -> str:
    """Return the output of `nvidia-smi` with QUERY; "" without a working driver, which the doctor reports."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    try:
        return subprocess.run([tool, *QUERY], capture_output=True, text=True, timeout=LIMIT, check=False).stdout
    except (subprocess.TimeoutExpired, OSError):
        return ""


@cache
def use_one_gpu() -> tuple[str, str] | None:
    """Choose one of several GPUs for this process, once, unless the user has chosen. Call it before CUDA starts."""
    if VARIABLE in os.environ or count_launched(os.environ) > 1 or cuda_has_started():
        return None
    chosen = choose_gpu(ask_driver())
    if chosen is not None:
        os.environ[VARIABLE], _ = chosen
        os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # as in nvidia-smi; CUDA's default is the fastest first
    return chosen


def without_chosen_gpu(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for another process without this one's choice, so that it chooses for itself."""
    chosen = use_one_gpu() if use_one_gpu.cache_info().currsize else None
    return {name: value for name, value in environment.items() if chosen is None or name != VARIABLE}


CUDNN_DEFECTS = {9: "NaN gradients under a mask", 10: "corrupt decoding"}  # by capability; pytorch #196678, #193893
CUDNN_VARIABLE = "TORCH_CUDNN_SDPA_DEPRIORITIZED"  # read once, at the first attention on a card


def cudnn_attention_choice(capability: tuple[int, int] | None, version: int | None) -> str:
    """Return why a card must not run the attention of this cuDNN (91900 is 9.19); "" where it may, or torch prefers others."""
    defect = CUDNN_DEFECTS.get(capability[0]) if capability else None
    if defect is None or version is None or version >= 92600:
        return ""
    return f"cuDNN {version // 10000}.{version // 100 % 100}: {defect}, and a plan for each new shape; 9.26 is fixed"


def disable_cudnn_attention(capability: tuple[int, int] | None = (9, 0)) -> str:
    """Disable cuDNN's attention where it is defective, here and in child processes. Returns the reason, "" where it stays.

    Call it again once CUDA is initialized: a flag set before has been reported lost. The user's own variable "0" is obeyed.
    """
    import torch

    reason = cudnn_attention_choice(capability, torch.backends.cudnn.version())
    if not reason or os.environ.setdefault(CUDNN_VARIABLE, "1") == "0":
        return ""
    torch.backends.cuda.enable_cudnn_sdp(False)
    return reason


def cuda_has_started() -> bool:
    """Return True if CUDA is initialized here (`torch.cuda.is_available()` is enough): it reads the variable once."""
    if "torch" not in sys.modules:
        return False
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == 0  # 3 before cuInit: CUDA_ERROR_NOT_INITIALIZED


def refuse_several_gpus(count: int) -> None:
    """Raise UsageError if torch sees several GPUs: CUDA had started, or nvidia-smi did not list them."""
    if count > 1:
        fix = f"set {VARIABLE} to one of them before Python or the kernel starts, or use cogumi start"
        raise UsageError(f"torch sees {count} GPUs, and a run trains on one", fix=fix)


def count_launched(environment: Mapping[str, str]) -> int:
    """Return the number of processes that a launcher (cogumi's, torchrun, accelerate) started with this one; 0 without one."""
    count = environment.get("WORLD_SIZE", "")
    return int(count) if count.isdigit() and environment.get("LOCAL_RANK", "-1") != "-1" else 0


# Set by torchrun and by accelerate's and cogumi's launchers for each process.
LAUNCHER_VARIABLES = re.compile(
    r"(RANK|LOCAL_RANK|GROUP_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_\w+|(ACCELERATE|FSDP|TORCHELASTIC)_\w+)"
)


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for a process outside the launched training."""
    return {name: value for name, value in environment.items() if not LAUNCHER_VARIABLES.fullmatch(name)}


def count_processes(setting: int | str, environment: Mapping[str, str]) -> int:
    """Return the number of processes for `cogumi.processes`; "all" means the launcher's, or one for each GPU."""
    if setting != "all":
        return int(setting)
    return count_launched(environment) or max(1, count_gpus(environment))


def count_gpus(environment: Mapping[str, str]) -> int:
    """Return the number of GPUs that a process with these variables sees, without starting CUDA."""
    if (visible := environment.get(VARIABLE)) is not None:
        return len([device for device in visible.split(",") if device.strip() not in ("", "-1")])
    return len(list_gpus(ask_driver()))


# Variables of accelerate's config. Where several processes see one example, their counts must not be summed.
UNSUPPORTED = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed, whose checkpoints are not verified",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "sequence, context or tensor parallelism, which is untested",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM, which is untested",
}


def refuse_ranks(environment: Mapping[str, str], processes: int | str, command: str) -> None:
    """Raise UsageError if a launcher started another number of processes than `cogumi.processes`, or unsupported parallelism.

    command: starts the same run without a launcher.
    """
    for name, feature in UNSUPPORTED.items():
        if environment.get(name) == "true":
            fix = "leave it out; cogumi.sharding: fsdp2 shards the model"
            raise UsageError(f"accelerate's config asks for {feature}", key=name, fix=fix)
    ranks, local = environment.get("WORLD_SIZE", ""), environment.get("LOCAL_RANK", "-1")
    if not (ranks.isdigit() and int(ranks) > 1) and local == "-1":
        return
    if count_launched(environment) != count_processes(processes, environment):
        process = f"process {environment.get('RANK', local)} of {ranks or 'several'}"
        message = (
            f"torchrun or accelerate started {process} (WORLD_SIZE, LOCAL_RANK), and cogumi.processes is {processes}"
        )
        raise UsageError(message, fix=f"set cogumi.processes to {ranks or 'their number'}, or run: {command}")


def refuse_missing_gpus(processes: int, environment: Mapping[str, str]) -> None:
    """Raise UsageError if there are GPUs, but fewer than processes."""
    gpus = count_gpus(environment)
    if 0 < gpus < processes:
        message = f"{processes} processes, and {gpus} GPU{'s' if gpus > 1 else ''}"
        raise UsageError(message, key="cogumi.processes", fix=f"set it to {gpus}, or to all")


# ------------------------------------------------------------------------------------------- caches for card and versions

COMPILED = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
COMPILED |= {"UNSLOTH_COMPILE_LOCATION": "unsloth", "VLLM_CACHE_ROOT": "vllm"}


def place_by_versions(kind: str, card: str, *packages: str) -> Path:
    """Return the cache directory for a card and the installed versions of these packages."""
    versions = installed_versions()
    words = " ".join([card, *(f"{name}-{versions[name]}" for name in packages if name in versions)])
    return Path(platformdirs.user_cache_dir("cogumi")) / kind / re.sub(r"[^\w.+-]+", "-", words.lower())


def keep_compiled_code() -> None:
    """Set the variables of COMPILED that the user has not set. Call it before torch, Triton, unsloth and vLLM are imported."""
    gpus = {index: name for index, _, _, name in list_gpus(ask_driver())}
    card = gpus.get(os.environ.get(VARIABLE, ""), next(iter(gpus.values()), platform.machine()))
    place = place_by_versions("compiled", card, "torch", "triton", "unsloth", "vllm")
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError:  # a read-only home: the defaults of the libraries stay
        return
    for variable, name in COMPILED.items() if os.access(place, os.W_OK) else ():
        os.environ.setdefault(variable, str(place / name))


def share_cores() -> None:
    """Let idle OpenMP threads sleep early, unless the user has set how they wait. Call it before torch is imported.

    GNU OpenMP lets them spin for milliseconds by default, which takes the cores from another run on this machine: two
    small runs at once took twice as long as one after the other. With 2,000 rounds a run alone is not slower.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")
