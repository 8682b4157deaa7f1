"""The weights that QLASS's authors published, as checkpoints of this project (format: Rafa-zy/QLASS at 6f2cdf4).

    python -m integrations.qlass_release QNET --sft AGENT --out RUN/qnet    # writes RUN/qnet and, beside it, RUN/sft

QNET and AGENT: huggingface.co/qlass/qlass-Llama-2-7b-chat-hf-alfworld-Q and -sft, downloaded.
"""

import dataclasses
from pathlib import Path

import torch
import transformers as hf
from tyro.conf import Positional

from qlass import UserError
from qlass.chat import Chat, Rendering
from qlass.files import atomic
from qlass.records import as_user_error
from qlass.settings import parse, run_stage
from train_qnet import QNet

LLAMA_2 = (  # an answer has no space before it, and one after it
    "{% for m in messages %}{% if m.role == 'user' %}{{ (BEGIN if loop.first else bos_token) + '[INST] ' + m.content"
    " + ' [/INST]' }}{% else %}{{ m.content + ' ' + eos_token }}{% endif %}{% endfor %}"
)
LLAMA_3 = (
    "{% for m in messages %}{{ (BEGIN if loop.first else '') + '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n'"
    " + m.content + '<|eot_id|>' }}{% endfor %}"
)


def chat_of(folder: Path, qnet: bool = False) -> Chat:
    """A folder's tokenizer with the release's rendering as its chat template.

    It reads Q at the last token but one: of Llama-2's `</s><s>` this is `</s>`, of Llama-3 the one before `<|eot_id|>`.
    """
    with as_user_error(folder):
        tokenizer = hf.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        llama_3 = "<|eot_id|>" in tokenizer.get_vocab()
        in_text = tokenizer(tokenizer.bos_token + "[INST]", add_special_tokens=False).input_ids
        in_front = tokenizer("[INST]").input_ids  # the release's; some tokenizers then begin the text with a space
        begin = "bos_token" if in_text == in_front else "bos_token + ' '"
        tokenizer.chat_template = (LLAMA_3 if llama_3 else LLAMA_2).replace("BEGIN", begin)
        return Chat(tokenizer, Rendering(max_new_tokens=512, stop=(), q_at_end=not (qnet and llama_3)))


def qnet_of(folder: Path) -> QNet:
    """The QNet in pytorch_model.bin: a Llama and a head whose last layer has no bias. UserError names other weights."""
    with as_user_error(folder), torch.device("meta"):  # without weights
        llama = hf.AutoModelForCausalLM.from_config(hf.AutoConfig.from_pretrained(folder, trust_remote_code=False))
        qnet = QNet(llama.base_model, chat_of(folder, qnet=True))
    file = folder / "pytorch_model.bin"
    release = torch.nn.ModuleDict({"llama": llama, "mlp": qnet.head})
    with as_user_error(file):
        weights = torch.load(file, mmap=True, weights_only=True)
        release.load_state_dict({"mlp.4.bias": torch.zeros(1), **weights}, assign=True)
    qnet.head.float()
    return qnet


@dataclasses.dataclass(frozen=True)
class Config:
    qnet: Positional[Path]  # folder of the published QNet
    sft: Path  # folder of the published agent
    out: Path  # folder of our QNet; our agent is sft beside it


def main(argv: list[str] | None = None) -> None:
    config = parse(Config, __doc__, argv)
    agent = config.out.with_name("sft")
    for folder in (config.out, agent):
        if folder.exists():
            raise UserError(f"{folder}: is there: name a new folder")
    qnet = qnet_of(config.qnet)
    with as_user_error(config.sft):
        weights = hf.AutoModelForCausalLM.from_pretrained(config.sft, dtype="auto", trust_remote_code=False)
    with atomic(config.out) as draft, atomic(agent) as other:  # one alone would be refused at the next start
        qnet.save_pretrained(draft)
        weights.save_pretrained(other)
        chat_of(config.sft).save(other)


if __name__ == "__main__":
    run_stage(main)
