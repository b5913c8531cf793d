"""What the tests share: a tiny real model with a real tokenizer, made once a session, and a cache of its own."""

from pathlib import Path

import polars as pl
import pytest
import torch

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def sources() -> list[str]:
    """Source text of a few hundred functions of the standard library."""
    from cogumi.data.sample import sample_path

    return pl.read_parquet(sample_path())["source"].head(400).to_list()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory, sources: list[str]) -> Path:
    """A directory with a random two-layer Llama in bfloat16 and a byte-level tokenizer with FIM tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from cogumi.models.small_base import train_tokenizer

    path = tmp_path_factory.mktemp("tiny-model")
    tokenizer = train_tokenizer(sources)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def code_parquet(tmp_path_factory: pytest.TempPathFactory, sources: list[str]) -> Path:
    path = tmp_path_factory.mktemp("data") / "code.parquet"
    pl.DataFrame({"source": sources}).write_parquet(path)
    return path
