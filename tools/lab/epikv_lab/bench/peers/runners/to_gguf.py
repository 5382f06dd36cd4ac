"""Runs llama.cpp's converter, whose list of known pre-tokenizers our tokenizer is not on: it is
GPT-2's.

    python to_gguf.py SOURCES CHECKPOINT OUT f32|bf16|q8_0
"""

import runpy
import sys

sources, checkpoint, out, precision = sys.argv[1:]
sys.path[:0] = [sources, f"{sources}/gguf-py"]

from conversion.base import TextModel  # noqa: E402

TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
sys.argv = ["convert_hf_to_gguf.py", checkpoint, "--outfile", out, "--outtype", precision]
runpy.run_path(f"{sources}/convert_hf_to_gguf.py", run_name="__main__")
