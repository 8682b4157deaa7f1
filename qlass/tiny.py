"""The tiny model, a small Llama trained from scratch, and the aids it reads and writes with."""

import functools
import re
from collections.abc import Iterable
from typing import Any

from qlass.messages import State

Message = tuple[str, str]  # role and content
MARK = "✓"
SAME_PAGE = "(same page)"
# The scripts without blanks, from Thai to Chinese.
_UNSPACED = "\u0e00-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff"
# A word, or a price with its place on the page: "3 $9.50"; of a script without blanks a letter.
_WORD = re.compile(
    rf" ?(?:\d+ (?=\$))?([{_UNSPACED}]|\$?[^\W_{_UNSPACED}]+(?:[.'-][^\W_{_UNSPACED}]+)*)"
)
_PRICE = re.compile(r"\$(\d+\.\d+)")
_LIMIT = re.compile(r"price lower than (\d+\.\d+) dollars")
_STOP_WORDS = (
    "a an and are as at be by for from i in is it me my of on or than that the to with you"
)


@functools.lru_cache(maxsize=4096)
def task_words(task: str) -> frozenset[str]:
    words = {word.lower() for word in _WORD.findall(task)}
    return frozenset(words - set(_STOP_WORDS.split()))


@functools.lru_cache(maxsize=100_000)
def mark(text: str, task: str) -> str:
    """A mark before each word of the task, and before each price within the task's limit.

    "red cotton shirt" for the task "a red shirt" -> "✓red cotton✓ shirt". An agent that chooses
    token by token is to see a price's mark first, so that it stands before its place on the page.
    """
    words = task_words(task)
    limit = _LIMIT.search(task)

    def with_mark(match: re.Match) -> str:
        price = _PRICE.fullmatch(match[1])
        cheap = limit and price and float(price[1]) <= float(limit[1])
        return MARK + match[0] if cheap or match[1].lower() in words else match[0]

    return _WORD.sub(with_mark, text)


@functools.lru_cache(maxsize=4096)
def sentence(task: str) -> re.Pattern:
    """Finds the task's sentence in pages, as a whole: not "buy it" in "buy items". A task of one
    word is found nowhere, as pages may say that word of something else."""
    words = task.strip()
    return re.compile(rf"(?<!\w){re.escape(words)}(?!\w)" if " " in words else r"(?!)")


class Aids:
    """Help for a model too small to compare texts and to remember; a rendering switches it on.

    mark_matches: `mark` in actions, and in all shown messages but the first. markov: the model
    reads the last observation alone. compact: no instruction turn; a page, but for the first, has
    neither the task again nor what another one has shown.
    """

    def __init__(self, rendering: Any) -> None:
        self.rendering = rendering
        self.keep_instruction = not (rendering.compact or rendering.markov)

    def show(self, messages: list[Message], state: State) -> list[Message]:
        """The messages of a state as the model reads them."""
        task, compact = state.task, self.rendering.compact
        if compact:
            messages = messages[state.opening :]
        if self.rendering.markov:
            role, _ = messages[-1]
            messages = messages[-2:] if role == "assistant" else messages[-1:]
        again = sentence(task)
        shown: list[Message] = []
        pages = set()
        for role, content in messages:
            text = content
            if compact and shown and role == "user":
                text = SAME_PAGE if content in pages else again.sub("", content)
                pages.add(content)
            if self.rendering.mark_matches and (shown or role == "assistant"):
                text = mark(text, task)
            shown.append((role, text))
        return shown

    def example_ends(self, state: State) -> list[int]:
        """The lengths of the examples that a trajectory gives: the whole; Markov: up to each action
        after the agreement."""
        length = len(state.messages)
        return list(range(state.opening + 2, length + 1, 2)) if self.rendering.markov else [length]


# What its checkpoint's Rendering says.
AIDS: Any = dict(
    mark_matches=True, compact=True, candidates="valid", stop=(), temperature=1.0, max_new_tokens=48
)
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<user>' + m.content + '\n' }}"
    "{% else %}{{ m.content + '<end>' }}{% endif %}{% endfor %}"
)


def tiny_model(texts: Iterable[str], layers: int = 3, heads: int = 2) -> tuple[Any, Any]:
    """A small Llama with random weights, and a byte-level BPE trained on these texts. heads: of
    attention, of 64 numbers each."""
    import transformers
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, trainers
    from tokenizers.models import BPE

    bpe = Tokenizer(BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        min_frequency=2,
        special_tokens=["<pad>", "<end>", "<user>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.add_tokens([MARK, AddedToken("[SEP]", lstrip=True)])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<pad>", eos_token="<end>"
    )
    tokenizer.chat_template = TEMPLATE
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        hidden_size=64 * heads,
        intermediate_size=128 * heads,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        initializer_range=0.06,
    )
    return transformers.LlamaForCausalLM(config), tokenizer
