"""Stage 1 with a second loss: the agent also learns to predict what its actions lead to.

    python -m experiments.clone_answers --env frozenlake    # in place of python sft.py --env frozenlake

    reads, writes   what sft.py does

The tiny model that was cloned on actions alone tells FrozenLake's moves apart too little for a QNet to rank them. Here
the last token of each action also predicts all tokens of the environment's answer, whatever their order, each with the
weight --observation-loss. The loss of the agent's own tokens is Eq. (5). docs/differences.md has what it changes.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

import envs
import sft
from qlass import demonstrations, models
from qlass.chat import Chat
from qlass.demonstrations import Demonstration
from qlass.files import Inputs
from qlass.messages import State
from qlass.outputs import checkpoint
from qlass.policy import QUESTION, Policy
from qlass.settings import Number, read_settings, run_stage
from qlass.training import Training


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(sft.Config):
    observation_loss: Number = 1.0  # weight of a token of the environment's answers


@dataclasses.dataclass
class Example:
    """Tokens to read, and targets: (the position that predicts, the token, its weight)."""

    ids: list[int]
    predictions: list[tuple[int, int, float]]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def targets(self) -> float:
        """The weight of all that is predicted, which divides the loss."""
        return sum(weight for *_, weight in self.predictions)


def example_of(chat: Chat, state: State, limit: int, answer: list[int], weight: float) -> Example:
    """A trajectory, cut at `limit` tokens; answer: the tokens of what follows its last action."""
    ids: list[int] = []
    predictions = []
    for turn, tokens in enumerate([*chat.message_tokens(state), answer]):
        if turn % 2 == 1:
            predictions += [(len(ids) - 1 + i, token, 1.0) for i, token in enumerate(tokens)]
        elif weight and turn >= chat.fixed_messages(state):
            predictions += [(len(ids) - 1, token, weight) for token in tokens]
        ids += tokens
    return Example(ids[:limit], [target for target in predictions if target[0] < limit - 1])


def examples_of(chat: Chat, expert: list[Demonstration], limit: int, weight: float) -> Iterator[Example]:
    """One example per trajectory; in a Markov environment, one per action. weight: of the answers."""
    for state in (demonstration.state for demonstration in expert):
        for n in chat.aids.example_ends(state):
            answer = []
            if weight and n < len(state.messages):
                answer = chat.message_tokens(state.prefix(n + 1))[-1]
            example = example_of(chat, state.prefix(n), limit, answer, weight)
            if example.predictions:
                yield example


def loss_of(model: Any, examples: list[Example]) -> torch.Tensor:
    """-sum w log pi(x | what stands before it) over the targets x; ()."""
    ids = pad_sequence([torch.tensor(example.ids) for example in examples], batch_first=True)  # (B, T)
    targets = [(row, *target) for row, example in enumerate(examples) for target in example.predictions]
    rows, positions, labels, weights = map(torch.tensor, zip(*targets, strict=True))
    positions, column = positions.unique(return_inverse=True)
    kept = positions.to(model.device)
    logits = model(input_ids=ids.to(model.device), use_cache=False, logits_to_keep=kept).logits  # (B, K, V)
    losses = cross_entropy(logits[rows, column].float(), labels.to(model.device), reduction="none")
    return (weights.to(model.device) * losses).sum()


def main(argv: list[str] | None = None) -> None:
    config = read_settings(Config, __doc__, argv)
    env = envs.from_config(config)
    path = config.expert or demonstrations.collect(env, config, config.n_expert)
    expert = demonstrations.read(path, env, config.n_expert)
    inputs: Inputs = {"expert": path}
    start = None
    if config.model != "tiny":
        start = inputs["model"] = checkpoint(config.model)
    out = config.path
    log = Training(out, config, env.settings, inputs)
    if log.complete:
        return
    model, chat = sft.load(config, env, expert, start)
    limit = int(min(config.max_tokens, chat.context))
    sft.check_answers(expert, chat, limit)
    learned, held_out = sft.hold_out_tasks(expert)
    examples = list(examples_of(chat, learned, limit, config.observation_loss))
    validation = list(sft.examples_of(chat, held_out, limit))
    adapter = models.prepare_training(model, config)
    sft.train(model, examples, validation, config, log, loss_of)
    log.load_best()
    log.finish(
        lambda: models.save(model, chat, out, config, adapter),
        tasks=sorted({line.task_id for line in expert if line.task_id}),
        fingerprint=Policy(model, chat).likelihoods([QUESTION])[0],
    )


if __name__ == "__main__":
    run_stage(main)
