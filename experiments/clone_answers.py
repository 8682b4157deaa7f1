"""Stage 1 with a second loss: the agent also learns to predict what its actions lead to.

    python -m experiments.clone_answers --env frozenlake    # in place of python sft.py --env frozenlake

    reads, writes   what sft.py does

The tiny model that was cloned on actions alone tells FrozenLake's moves apart too little for a QNet to rank them. Here
the last token of each action also predicts all tokens of the environment's answer, whatever their order, which count
like the agent's own tokens. The loss of these is Eq. (5). docs/differences.md has what it changes.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

import sft
from qlass.chat import Chat
from qlass.demonstrations import Demonstration
from qlass.messages import State
from qlass.settings import read_settings, run_stage
from sft import Config


class Example(sft.Example):
    """Its labels are predictions: (the position that predicts, the token)."""

    labels: list[Any]


def example_of(chat: Chat, state: State, max_tokens: int, answer: list[int]) -> Example:
    """A trajectory, cut at `max_tokens` tokens; answer: the tokens of what follows its last action."""
    ids: list[int] = []
    predictions = []
    for turn, tokens in enumerate([*chat.message_tokens(state), answer]):
        if turn % 2 == 1:
            predictions += [(len(ids) - 1 + i, token) for i, token in enumerate(tokens)]
        elif turn >= chat.fixed_messages(state):
            predictions += [(len(ids) - 1, token) for token in tokens]
        ids += tokens
    return Example(ids[:max_tokens], [target for target in predictions if target[0] < max_tokens - 1])


def examples_of(chat: Chat, expert: list[Demonstration], max_tokens: int) -> Iterator[Example]:
    """One example per trajectory; in a Markov environment, one per action."""
    for state in (demonstration.state for demonstration in expert):
        for n in chat.aids.example_ends(state):
            answer = []
            if n < len(state.messages):
                answer = chat.message_tokens(state.prefix(n + 1))[-1]
            yield example_of(chat, state.prefix(n), max_tokens, answer)


def loss_of_answers(model: Any, examples: list[Example]) -> torch.Tensor:
    """-sum log pi(x | what stands before it) over the tokens x that are predicted; ()."""
    ids = pad_sequence([torch.tensor(example.ids) for example in examples], batch_first=True)  # (B, T)
    targets = [(row, *target) for row, example in enumerate(examples) for target in example.labels]
    rows, positions, labels = map(torch.tensor, zip(*targets, strict=True))
    positions, column = positions.unique(return_inverse=True)
    kept = positions.to(model.device)
    logits = model(input_ids=ids.to(model.device), use_cache=False, logits_to_keep=kept).logits  # (B, K, V)
    return cross_entropy(logits[rows, column].float(), labels.to(model.device), reduction="none").sum()


def main(argv: list[str] | None = None) -> None:
    sft.clone(read_settings(Config, __doc__, argv), examples_of, loss_of_answers)


if __name__ == "__main__":
    run_stage(main)
