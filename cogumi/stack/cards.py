"""Cards that people rent: memory, bf16 peak, bandwidth, architecture, and what follows for dtype and attention.

Peaks are dense bf16 FLOP/s with float32 accumulation. NVIDIA's data sheets print most with sparsity, twice these: H100 SXM
1,979, PCIe 1,513, NVL 1,671; H200 SXM 1,979, NVL 1,671; L4 242; RTX 6000 Ada 728.5; A6000 309.7 TFLOP/s; HGX B200
36 PFLOP/s over 8 cards. Dense as printed: A100 and A800 312, A40 149.7, A30 165, A10 125, L40S 362, L40 181. GeForce from the
white papers of the architectures ("FP16 Tensor TFLOPS with FP32 Accumulate", dense): Ada (4090) 165.2, GA102 (3090) 71,
Blackwell (5090) 209.5. T4 and V100 have no bf16. Bandwidth from the same sheets. Memory is what nvidia-smi calls the
total, in MiB; the driver and the CUDA context keep some of it for themselves.
"""

import re
from dataclasses import dataclass

from cogumi.errors import UsageError

ANOTHER_CARD = frozenset(
    {"MIG", "LAPTOP", "MOBILE", "MAX", "D", "TI", "SUPER"}
)  # a part of one, or a slower or faster one


@dataclass(frozen=True)
class Card:
    """words: those in torch.cuda.get_device_name(), by which the first row that fits is taken. memory: MiB.

    peak: dense bf16 FLOP/s, None without bf16. bandwidth: bytes a second. capability: CUDA's compute capability.
    """

    name: str
    words: frozenset[str]
    memory: int
    peak: float | None
    bandwidth: float
    capability: tuple[int, int]

    @property
    def bytes(self) -> int:
        return self.memory * 2**20

    @property
    def bf16(self) -> bool:
        return self.capability >= (8, 0)

    @property
    def attention(self) -> str:
        """What attention is right for it: flash attention 3 is for Hopper alone, 2 for Ampere and later."""
        if self.capability == (9, 0):
            return "flash_attention_3 or 2 where it works, else sdpa"
        return "flash_attention_2 where it works, else sdpa" if self.bf16 else "sdpa"

    @property
    def dtype(self) -> str:
        return "bfloat16" if self.bf16 else "float16 (it has no bfloat16), and float32 for GSPO"


def row(name: str, words: str, memory: int, peak: float | None, bandwidth: float, capability: tuple[int, int]) -> Card:
    """peak in TFLOP/s, bandwidth in GB/s."""
    return Card(
        name, frozenset(words.split()), memory, None if peak is None else peak * 1e12, bandwidth * 1e9, capability
    )


CARDS = (
    row("B200", "B200", 183359, 2250, 8000, (10, 0)),
    row("H200 NVL", "H200 NVL", 143771, 835.5, 4800, (9, 0)),
    row("H200", "H200", 143771, 989.5, 4800, (9, 0)),
    row("GH200", "GH200", 97871, 989.5, 4000, (9, 0)),
    row("H100 PCIe", "H100 PCIE", 81559, 756.5, 2000, (9, 0)),
    row("H100 NVL", "H100 NVL", 95830, 835.5, 3938, (9, 0)),
    row("H100 SXM", "H100 80GB HBM3", 81559, 989.5, 3350, (9, 0)),
    row("A100 80GB PCIe", "A100 80GB PCIE", 81920, 312, 1935, (8, 0)),
    row("A100 80GB", "A100 80GB", 81920, 312, 2039, (8, 0)),
    row("A100 40GB", "A100 40GB", 40960, 312, 1555, (8, 0)),
    row("A800 80GB", "A800 80GB", 81920, 312, 2039, (8, 0)),
    row("A40", "A40", 46068, 149.7, 696, (8, 6)),
    row("A30", "A30", 24576, 165, 933, (8, 0)),
    row("A10", "A10", 23028, 125, 600, (8, 6)),
    row("L40S", "L40S", 46068, 362, 864, (8, 9)),
    row("L40", "L40", 46068, 181, 864, (8, 9)),
    row("L4", "L4", 23034, 121, 300, (8, 9)),
    row("RTX 6000 Ada", "RTX 6000 ADA", 49140, 364.25, 960, (8, 9)),
    row("RTX A6000", "RTX A6000", 49140, 154.85, 768, (8, 6)),
    row("RTX 5090", "RTX 5090", 32607, 209.5, 1792, (12, 0)),
    row("RTX 4090", "RTX 4090", 24564, 165.2, 1008, (8, 9)),
    row("RTX 3090", "RTX 3090", 24576, 71, 936, (8, 6)),
    row("V100 32GB", "V100 32GB", 32768, None, 900, (7, 0)),
    row("V100 16GB", "V100 16GB", 16384, None, 900, (7, 0)),
    row("T4", "T4", 15360, None, 320, (7, 5)),
)


def words_of(name: str) -> set[str]:
    return set(re.findall("[A-Z0-9]+", name.upper()))


def card_of(device_name: str) -> Card | None:
    """The card by torch's name of it; None for one that is not in the table, rather than a wrong guess."""
    words = words_of(device_name)
    return None if words & ANOTHER_CARD else next((card for card in CARDS if card.words <= words), None)


def card_called(name: str) -> Card:
    """The card that somebody means by "h100" or "A100 80GB". Raises UsageError where it is none, or one of several."""
    words = words_of(name) - {"NVIDIA", "GEFORCE"}
    exact = [card for card in CARDS if words_of(card.name) == words]
    found = exact or [card for card in CARDS if words and words <= words_of(card.name) | card.words]
    if not found:
        raise UsageError(f"card {name!r} is not known", fix=f"there are {', '.join(card.name for card in CARDS)}")
    if len(found) > 1:
        raise UsageError(f"card {name!r} may be {' or '.join(card.name for card in found)}", fix="say which")
    return found[0]
