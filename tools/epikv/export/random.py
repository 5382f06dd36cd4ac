"""`python -m epikv.export.random`: a random-weight model, for tests and benches."""

import sys
import tempfile
from pathlib import Path

import click

from epikv.export.errors import ExportError
from epikv.export.exporter import DTYPES, export
from epikv.export.reference import prompts_of
from epikv.export.reference import write as write_reference
from epikv.export.synthetic import write_directory


@click.command()
@click.option("--hidden", default=64, help="Width of the residual stream.")
@click.option("--layers", default=4)
@click.option("--heads", default=4)
@click.option("--kv-heads", default=2)
@click.option("--head-dim", type=int, help="Default: hidden / heads.")
@click.option("--ffn", default=128)
@click.option("--vocab", default=97)
@click.option("--context", default=4096, help="max_position_embeddings.")
@click.option("--tied", is_flag=True, help="lm_head shares the embedding.")
@click.option("--biases", is_flag=True, help="Biases on all projections.")
@click.option("--rope-theta", default=10000.0)
@click.option("--eos", type=int, help="End-of-sequence token. Default: none.")
@click.option("--tokenizer", type=click.Choice(["words", "bytes"]), default="words")
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="fp32")
@click.option("--quantize", type=click.Choice(["int8", "int4"]), help="As epikv export has it.")
@click.option("--compile", is_flag=True, help="As epikv export has it.")
@click.option("--seed", default=0)
@click.option("--draw-on", default="cpu", help="Device on which the weights are drawn.")
@click.option("--name", default="random")
@click.option("--calibration", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--check/--no-check", default=True, help="Compare with transformers first.")
@click.option("--out", required=True, type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--reference",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write logits and greedy tokens of transformers, in float32.",
)
@click.option("--reference-ids", multiple=True, help='A prompt, as "1 2 3". Default: random ones.')
@click.option("--reference-steps", default=16, help="Greedy tokens a prompt.")
def main(
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int | None,
    ffn: int,
    vocab: int,
    context: int,
    tied: bool,
    biases: bool,
    rope_theta: float,
    eos: int | None,
    tokenizer: str,
    dtype: str,
    quantize: str | None,
    compile: bool,
    seed: int,
    draw_on: str,
    name: str,
    calibration: Path | None,
    check: bool,
    out: Path,
    reference: Path | None,
    reference_ids: tuple[str, ...],
    reference_steps: int,
) -> None:
    """Write a Llama-architecture model with random weights, through the exporter."""
    config = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "tie_word_embeddings": tied,
        "attention_bias": biases,
        "mlp_bias": biases,
        "rope_theta": rope_theta,
        "eos_token_id": eos,
    }
    stored = DTYPES[dtype]
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        try:
            write_directory(config, directory, stored, seed, tokenizer, device=draw_on)
            report = export(
                directory,
                out,
                dtype=stored,
                quantization=quantize,
                compile=compile,
                name=name,
                calibration=calibration,
                check=check,
            )
        except (ExportError, ValueError) as error:
            sys.exit(f"epikv.export.random: {error}")
        if reference is not None:
            prompts = prompts_of(reference_ids, vocab, context - reference_steps)
            write_reference(directory, reference, stored, prompts, reference_steps)
    click.echo(f"{out}: {report or 'not compared with transformers'}")


if __name__ == "__main__":
    main()
