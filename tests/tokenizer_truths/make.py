"""Write tokenizers as transformers 4 saves them, with ids and chat text that it makes: python make.py FILE

Run it with transformers 4.57.6 in the environment, or with PYTHONPATH on its unpacked wheel and tokenizers' 0.22.
`python make.py --load DIRECTORY` prints those ids and that text for a tokenizer in a directory.
"""

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import (
    AutoTokenizer,
    GemmaTokenizerFast,
    GPT2TokenizerFast,
    LlamaTokenizerFast,
    PreTrainedTokenizerFast,
    Qwen2TokenizerFast,
    T5TokenizerFast,
)

TEXT = "the cat thinks <s> of x=1</s>\n  and more"
TURNS = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "there"}]
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}{% endfor %}"
END = "<|endoftext|>"
LETTERS = [chr(code) for code in range(33, 127)]


def byte_level() -> Tokenizer:
    pieces = [END, "<pad>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "th", "the"]
    words = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(words, [("t", "h"), ("th", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentence_piece(first: list[str], normalizer: Any) -> Tokenizer:
    pieces = [*first, *(f"<0x{code:02X}>" for code in range(256)), "▁", *LETTERS, "th", "▁t", "▁th", "he", "▁the"]
    words = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    merges = [("t", "h"), ("▁", "t"), ("▁t", "h"), ("h", "e"), ("▁th", "e")]
    tokenizer = Tokenizer(models.BPE(words, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def llama2(**options: bool) -> Any:
    prepend = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return LlamaTokenizerFast(
        tokenizer_object=sentence_piece(["<unk>", "<s>", "</s>"], prepend), legacy=False, **options
    )


def unigram() -> Any:
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), *((letter, -5.0) for letter in LETTERS)]
    tokenizer = Tokenizer(models.Unigram([*pieces, ("▁the", -3.0)], unk_id=2))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return T5TokenizerFast(tokenizer_object=tokenizer, extra_ids=3)


def of_vocabulary(kind: Any, **options: Any) -> Any:
    with TemporaryDirectory() as scratch:
        files = byte_level().model.save(scratch)
        return kind(*sorted(files, reverse=True), **options)


def tokenizers() -> dict[str, tuple[str, Any, bool]]:
    """Return name -> model_type, tokenizer, and whether its template has a file of its own."""
    gemma = sentence_piece(["<pad>", "<eos>", "<bos>", "<unk>"], normalizers.Replace(" ", "▁"))
    gemma.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    ends = {"bos_token": END, "eos_token": END, "model_max_length": 4096}
    turns = ["<start_of_turn>", "<end_of_turn>"]
    qwen = of_vocabulary(Qwen2TokenizerFast, unk_token=None, additional_special_tokens=["<|im_start|>", "<|im_end|>"])
    return {
        "llama3": ("llama", PreTrainedTokenizerFast(tokenizer_object=byte_level(), **ends), False),
        "llama3-file": ("llama", PreTrainedTokenizerFast(tokenizer_object=byte_level(), **ends), True),
        "llama2": ("llama", llama2(), False),
        "llama2-without-start": ("llama", llama2(add_bos_token=False), False),
        "gemma": ("gemma", GemmaTokenizerFast(tokenizer_object=gemma, additional_special_tokens=turns), False),
        "qwen2": ("qwen2", qwen, False),
        "gpt2": ("gpt2", of_vocabulary(GPT2TokenizerFast), False),
        "t5": ("t5", unigram(), True),
    }


def describe(tokenizer: Any) -> dict[str, Any]:
    ids, text = tokenizer(TEXT)["input_ids"], tokenizer.apply_chat_template(TURNS, tokenize=False)
    return {"ids": ids, "chat": text, "end": tokenizer.eos_token, "special": sorted(tokenizer.all_special_tokens)}


def main(file: Path) -> None:
    saved = {"transformers": transformers.__version__}
    for name, (kind, tokenizer, has_file) in tokenizers().items():
        with TemporaryDirectory() as scratch:
            place = Path(scratch)
            tokenizer.chat_template = TEMPLATE
            tokenizer.save_pretrained(place, save_jinja_files=has_file)
            (place / "config.json").write_text(json.dumps({"model_type": kind}))
            files = {path.name: path.read_text(encoding="utf-8") for path in sorted(place.iterdir())}
            saved[name] = {"files": files, "truth": describe(AutoTokenizer.from_pretrained(place))}
    file.write_text(json.dumps(saved, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1] == "--load":
        print(json.dumps(describe(AutoTokenizer.from_pretrained(sys.argv[2]))))
    else:
        main(Path(sys.argv[1]))
