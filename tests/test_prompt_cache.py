"""What is kept of prompts read before: what goes first, what a small cache still finds, what a tree costs."""

import numpy as np
import pytest
import torch
from fakes import ACTIONS, tiny_lm, word_chat

from qlass.batching import Sample, Score
from qlass.fast.cache import PromptCache
from qlass.fast.decode import FastPolicy
from qlass.fast.score import FastQNet
from qlass.fast.token_tree import TokenTree
from qlass.fast.tries import Trie
from qlass.messages import State
from train_qnet import QNet

CHAT = word_chat()
MODEL = tiny_lm(CHAT)
WORDS = "you stand at start left right walk find the purse hm this way nothing happens".split()  # noqa: SIM905


def episodes(n: int, turns: int, seed: int = 0) -> list[list[State]]:
    """The states of n episodes, each with words of its own from the first observation on."""
    rng = np.random.default_rng(seed)

    def words(k: int) -> str:
        return " ".join(rng.choice(WORDS, k))

    played = []
    for _ in range(n):
        states = [State((("user", "walk"), ("assistant", "OK"), ("user", words(12))))]
        for _ in range(turns - 1):
            states.append(states[-1].then(f"Action: {words(2)}", words(8)))
        played.append(states)
    return played


def read(cache: PromptCache, states: list[State], actions: tuple[str, ...] = (), budget: int = 1 << 14) -> int:
    """Tokens that went through the model for these states; what it gives is checked against plain sequences."""
    cost = 0

    def forward(inputs: dict, columns: torch.Tensor) -> torch.Tensor:
        nonlocal cost
        cost += inputs["input_ids"].numel()
        return MODEL(**inputs, logits_to_keep=columns).logits

    prompts = [CHAT.message_tokens(state) for state in states]
    tails = [CHAT.action(action, "") for action in actions]
    finished = []
    with torch.inference_mode():
        for i, outputs, last, paths in cache.read(forward, MODEL, budget, prompts, [tails] * len(states)):
            finished.append(i)
            prompt = CHAT.prompt(states[i])
            expected = MODEL(input_ids=torch.tensor([prompt])).logits[0, -1]
            torch.testing.assert_close(outputs[last], expected, atol=1e-5, rtol=1e-4)
            for path, tail in zip(paths, tails, strict=True):
                expected = MODEL(input_ids=torch.tensor([prompt + tail])).logits[0, len(prompt) :]
                torch.testing.assert_close(outputs[path], expected, atol=1e-5, rtol=1e-4)
    assert sorted(finished) == list(range(len(states)))
    return cost


@pytest.mark.parametrize("room", [1 << 30, 20_000, 0])
@pytest.mark.parametrize("budget", [10_000, 150, 1])
def test_outputs_behind_remembered_prompts_are_those_of_plain_sequences(room, budget):
    cache = PromptCache(room)
    states = [state for played in episodes(4, 3) for state in played]
    order = np.random.default_rng(0).permutation(len(states) * 3) % len(states)  # each three times, children first too
    for some in np.array_split(order, 6):
        read(cache, [states[i] for i in some], ACTIONS, budget)
        assert cache.used <= room
        assert cache.used == sum(entry.tensor.nbytes for entry in cache._entries.values())
    assert (cache.used == 0) == (room == 0)


def test_a_step_costs_its_last_turn_and_the_actions():
    first = State((("user", "walk"), ("assistant", "OK"), ("user", "you stand at start")))
    second = first.then("Action: left", "Observation: you stand")
    third = second.then("Action: left", "Observation: nothing happens")
    trie = TokenTree()
    for action in ACTIONS:
        trie.add(CHAT.action(action, ""))
    cache = PromptCache()
    costs = [read(cache, [state], ACTIONS) - len(trie) for state in (first, second, third, third)]
    # "Action: left <end>" and "<user> Observation: you stand <agent>", then "... nothing happens ..."
    assert costs == [len(CHAT.prompt(first)), 3 + 5, 3 + 5, 3 + 5]  # the last turn is always fresh


def family(depth: int, width: int) -> list[State]:
    """All states of a tree of this depth, in no order."""
    states = [episodes(1, 1)[0][0]]
    level = states
    for _ in range(depth):
        level = [s.then(f"Action: {WORDS[k]}", " ".join(WORDS[i:])) for s in level for i, k in enumerate(range(width))]
        states = states + level
    return [states[i] for i in np.random.default_rng(0).permutation(len(states))]


@pytest.mark.parametrize("row", [2048, 60])
def test_a_tree_costs_its_unique_tokens(row, monkeypatch):
    """In one row, or in several, where what did not fit in follows behind what has been read."""
    monkeypatch.setattr(PromptCache, "ROW", row)
    pairs = [(s, a) for s in family(3, 3) for a in ("Action: left", "Action: left right")]
    tree = TokenTree()
    for s, a in pairs:
        tree.add([*CHAT.prompt(s), *CHAT.action(a, "")])
    policy, net = FastPolicy(MODEL, CHAT), FastQNet(QNet(MODEL.model, CHAT))
    policy.logprobs(pairs)
    net.score([Score(s, (a,)) for s, a in pairs])
    assert policy.computed <= (1 if row > len(tree) else 1.9) * len(tree)
    assert net.cache.computed == policy.computed
    monkeypatch.undo()
    assert policy.logprobs(pairs) == pytest.approx(FastPolicy(MODEL, CHAT).logprobs(pairs), abs=1e-4)


def test_a_trie_is_read_down_to_its_last_branching():
    trie = Trie([[1, 2, 3, 9], [1, 2, 4, 5, 9], [1, 6, 7, 9]])
    assert trie.tails == [[1, 2], [1, 2], [1]]
    assert trie.branches == [(0, 1, 2), (0, 2, 3), (1, 2, 4), (2, 1, 6)]
    scores = np.log([0.3, 0.2, 0.8, 0.7])
    assert np.exp(trie.logprobs(scores)) == pytest.approx([0.3 * 0.2, 0.3 * 0.8, 0.7])
    assert Trie([[1, 2]]).branches == [] and Trie([[1, 2]]).tails == [[]]
    assert np.exp(Trie([[1, 9], [1, 9], [2, 9]]).logprobs(np.log([0.5, 0.5]))) == pytest.approx([0.5, 0.5, 0.5])
    state, policy = episodes(1, 1)[0][0], FastPolicy(MODEL, CHAT)
    policy.sample([Sample(state, 3, ("t",), 1.0, ("Action: left",))])
    assert policy.computed == 0  # there is nothing to choose
    policy.sample([Sample(state, 3, ("t",), 1.0, ("Action: left left left", "Action: right walk"))])
    assert policy.computed == len(CHAT.prompt(state)) + 1  # "Action:", behind which they part
