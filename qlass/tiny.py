"""The tiny model: a small Llama trained from scratch, and the aids that it reads with.

torch is imported where a model is made: `qlass/chat.py` needs the aids alone, and --help no model.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

MARK = "✓"
_WORD = re.compile(r" ?(?:\d+ (?=\$))?(\$?[^\W_]+(?:[.'-][^\W_]+)*)")  # a price with its place on the page: "3 $9.50"
_LIMIT = re.compile(r"price lower than (\d+\.\d+) dollars")
_STOP_WORDS = frozenset("a an and are as at be by for from i in is it me my of on or than that the to with you".split())  # noqa: SIM905


@functools.lru_cache(maxsize=4096)
def task_words(task: str) -> frozenset[str]:
    return frozenset(word.lower() for word in _WORD.findall(task)) - _STOP_WORDS


@functools.lru_cache(maxsize=100_000)
def mark(text: str, task: str) -> str:
    """ "red cotton shirt" for the task "a red shirt" -> "✓red cotton✓ shirt"; so a price within its limit too.

    The mark stands in front, of a price with its place before the place: an agent that chooses token by token sees it
    before it has chosen.
    """
    words, limit = task_words(task), _LIMIT.search(task)

    def marked(match: re.Match) -> str:
        within = limit and re.fullmatch(r"\$\d+\.\d+", match[1]) and float(match[1][1:]) <= float(limit[1])
        return MARK + match[0] if within or match[1].lower() in words else match[0]

    return _WORD.sub(marked, text)


def unmark(text: str) -> str:
    return text.replace(MARK, "")


SAME_PAGE = "(same page)"


def with_aids(messages: list[tuple[str, str]], task: str, rendering: Any) -> list[tuple[str, str]]:
    """Messages (role, content) as a checkpoint with aids reads them.

    compact: no instruction turn; in a page neither the task again nor a page shown before. markov: the last observation
    alone. mark_matches: a mark before each word of the task, but in the first message.
    """
    if rendering.compact and messages[1:2] == [("assistant", rendering.agreement or "OK")]:
        messages = messages[2:]
    if rendering.markov:
        messages = messages[-1 - (messages[-1][0] == "assistant") :]
    shown: list[tuple[str, str]] = []
    pages: set[str] = set()
    for i, (role, content) in enumerate(messages):
        text = content
        if rendering.compact and i and role == "user":
            text = SAME_PAGE if content in pages else content.replace(task, "")
            pages.add(content)
        if rendering.mark_matches and (i or role == "assistant"):
            text = mark(text, task)
        shown.append((role, text))
    return shown


# What its checkpoint's Rendering says.
AIDS = dict(temperature=1.0, max_new_tokens=48, candidates="valid", mark_matches=True, compact=True, stop=())


def tiny_model(texts: Iterable[str], vocabulary: int = 4096) -> tuple[Any, Any]:
    """A small Llama with random weights and a byte-level BPE trained on the demonstrations' own text."""
    import transformers
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, trainers
    from tokenizers.models import BPE

    bpe = Tokenizer(BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<pad>", "<end>", "<user>"]
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocabulary, min_frequency=2, special_tokens=special, show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )  # fmt: skip
    bpe.add_tokens([MARK, AddedToken("[SEP]", lstrip=True)])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", eos_token="<end>")
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ '<user>' + m.content + '\n' }}"
        "{% else %}{{ m.content + '<end>' }}{% endif %}{% endfor %}"
    )
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=2,
        max_position_embeddings=4096, tie_word_embeddings=True, initializer_range=0.06,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), tokenizer


def answers(wrote: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Which tokens answer an action: what is read after the first that the agent wrote; all masks are (B, T)."""
    return ~wrote & (wrote.cumsum(1) > 0) & real


def observation_loss(
    logits: torch.Tensor, kept: torch.Tensor, ids: torch.Tensor, wrote: torch.Tensor, real: torch.Tensor
) -> torch.Tensor:
    """-sum_j log p(o_j | s, a): tokens o_j of the next observation, each predicted where a ends.

    logits (B, K, V) of the positions `kept` (K,), which hold all these ends; ids, wrote, real (not padding) (B, T).
    """
    import torch

    end = wrote.mul(torch.arange(ids.shape[1], device=ids.device)).cummax(1).values  # of the last action so far
    row, at = answers(wrote, real).nonzero(as_tuple=True)
    k = torch.searchsorted(kept, end[row, at])
    return -logits.float().log_softmax(-1)[row, k, ids[row, at]].sum()
