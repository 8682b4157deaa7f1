"""A chat model in a GGUF file, as a folder in safetensors that the stages load.

    python -m integrations.gguf FILE FOLDER

For models such as SmolLM2, whose positions are not scaled: transformers drops a scaling (RoPE) that a file has, so name
the checkpoint that such a file was made from instead.
"""

import dataclasses
import re
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from tyro.conf import Positional

from qlass import UserError
from qlass.files import atomic
from qlass.records import as_user_error
from qlass.settings import parse, run_stage


@dataclasses.dataclass(frozen=True)
class Config:
    file: Positional[Path]  # FILE.gguf
    folder: Positional[Path]  # of the model to write


def main(argv: list[str] | None = None) -> None:
    config = parse(Config, __doc__, argv)
    if config.folder.exists():
        raise UserError(f"{config.folder}: is there: name a new folder")
    source: dict[str, Any] = {"gguf_file": config.file.name, "trust_remote_code": False}
    if re.search(r"-\d+-of-\d+$", config.file.stem):
        raise UserError(f"{config.file}: one of several files of a model: llama-gguf-split --merge joins them")
    width = {"quantization_config": hf.GgufConfig(dequantize=True), "dtype": torch.float32}  # few bits can't be trained
    with as_user_error(config.file):
        tokenizer = hf.AutoTokenizer.from_pretrained(config.file.parent, **source)
        model = hf.AutoModelForCausalLM.from_pretrained(config.file.parent, **source, **width)
    with atomic(config.folder) as draft:
        model.save_pretrained(draft)
        tokenizer.save_pretrained(draft)


if __name__ == "__main__":
    run_stage(main)
