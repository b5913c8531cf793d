"""`cogumi export` and `cogumi push`: a trained model for other programs, and for other people."""

from pathlib import Path
from typing import Annotated

import typer

from cogumi.core.output import failures_in_one_line, print_json, print_report, print_text, show_waiting

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def add_to(app: typer.Typer) -> None:
    for command in (export, push):
        app.command()(command)


def export(
    source: Annotated[Path, typer.Argument(help="A run with a merged model, or a merged directory.")],
    out: Annotated[Path, typer.Argument(help="A directory that does not exist yet.")],
    quant: Annotated[str, typer.Option(help="q8_0, q4_k_m (takes llama-quantize), f16 or bf16.")] = "q8_0",
    as_json: AsJson = False,
) -> None:
    """Write a merged model as GGUF with an Ollama Modelfile, by llama.cpp's tools, and check the file."""
    with show_waiting("converting, reading back"), failures_in_one_line():
        from cogumi.merge.export import export_model

        report = export_model(source, out, quant)
    print_report(report, as_json)


def push(
    source: Annotated[Path, typer.Argument(help="A run, a merged directory or an adapter's directory.")],
    name: Annotated[str, typer.Argument(help="The repository on the hub, as in me/my-model.")],
    what: Annotated[
        str | None, typer.Option(help="merged or adapter, of a run that has both; merged if it has.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Only you see the repository.")] = False,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Also a run whose checks failed or whose flags are red.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Upload a model to the hub in one commit, with a model card from its run. Takes a token (HF_TOKEN, hf auth login)."""
    with show_waiting("uploading"):
        from cogumi.hub.upload import push_model

        pushed = push_model(source, name, what, private, anyway)
    print_json(pushed.as_dict()) if as_json else print_text(pushed)
