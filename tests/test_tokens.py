"""Every token once: packed trees, remembered prompts, batches and sampling against one plain sequence at a time."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from fakes import ACTIONS, WORLD, FakeEnv, tiny_lm, word_chat
from hypothesis import given
from hypothesis import strategies as st

from experiments import drive_in_order
from qlass import UserError
from qlass.batching import LogProb, Sample, Score, ask, drive
from qlass.chat import Chat
from qlass.fast.cache import PromptCache
from qlass.fast.decode import FastPolicy
from qlass.fast.token_tree import TokenTree, batches
from qlass.messages import State, react, uniforms
from qlass.policy import Policy, truncated
from train_qnet import Pair, policy_ranking

CHAT = word_chat(temperature=0.8)
MODEL = tiny_lm(CHAT)


@torch.inference_mode()
def plain(ids: list[int]) -> np.ndarray:
    """Logits (T, V) of one sequence by itself."""
    return MODEL(input_ids=torch.tensor([ids])).logits[0].double().numpy()


def log_softmax(x: np.ndarray) -> np.ndarray:
    return torch.from_numpy(x).log_softmax(-1).numpy()


def step(state: State, action: str, *path: str) -> State:
    return state.then(react("hm", action), " ".join(("Observation: you stand at start", *path, action)))


FIRST = State((("user", "walk"), ("assistant", "OK"), ("user", "you stand at start")), "find the purse")
LEFT, RIGHT = step(FIRST, "left"), step(FIRST, "right")
STATES = [FIRST, FIRST.then("Thought: find", "Observation: nothing happens"), LEFT, RIGHT,
          step(LEFT, "right", "left"), step(RIGHT, "right", "right")]  # fmt: skip


def test_a_token_tree_by_hand():
    tree = TokenTree()
    assert [tree.add([5, 6, 7]), tree.add([5, 6, 8, 7]), tree.add([6])] == [[0, 1, 2], [0, 1, 3, 4], [5]]
    assert tree.add([5, 6]) == [0, 1] and tree.add([9, 9], after=2) == [6, 7] and tree.depth[-2:] == [3, 4]


sizes = st.tuples(st.integers(1, 40), st.integers(1, 5), st.integers(0, 50))


@given(st.lists(sizes, max_size=15), st.integers(1, 300), st.sampled_from([0, 0.75]))
def test_batches_hold_every_item_once_within_the_budget(items, budget, like):
    """Items of unlike length, rows and tokens in a cache: all of a group are padded to its longest."""
    groups = list(batches(items, lambda i: i[0], budget, lambda i: i[1], before=lambda i: i[2], like=like))
    assert sorted(itertools.chain(*groups)) == list(range(len(items)))
    for group in groups:
        lengths, rows, cached = zip(*(items[i] for i in group), strict=True)
        assert len(group) == 1 or (max(lengths) + max(cached)) * sum(rows) <= budget
        assert min(lengths) >= like * max(lengths)


def requests(valid: bool) -> list[Sample]:
    """32 requests of several states, sizes and temperatures."""
    return [
        Sample(STATES[i % 6], 1 + i % 3, ("task", i), (0.8, 1.0, 0.0, 2.0)[i % 4], ACTIONS[: 2 + i % 4] * valid)
        for i in range(32)
    ]


def in_chunks(asked: list[Sample], size: int, seed: int = 0, **settings: Any) -> list:
    agent = FastPolicy(MODEL, CHAT, seed)
    vars(agent).update(settings)
    return [a for start in range(0, len(asked), size) for a in agent.sample(asked[start : start + size])]


def texts(answers: list) -> list:
    return [[(c.text, c.tokens) for c in answer] for answer in answers]


def test_neither_the_batch_nor_what_else_it_holds_matters():
    asked = [r for pair in zip(requests(True), requests(False), strict=True) for r in pair]
    one = in_chunks(asked, 1)
    for size, settings in ((64, {}), (7, {}), (64, {"budget": 100}), (64, {"cache": PromptCache(10_000)})):
        some = in_chunks(asked, size, **settings)
        assert texts(some) == texts(one)
        np.testing.assert_allclose([c.logprob for a in some for c in a], [c.logprob for a in one for c in a], atol=1e-4)
    assert [len(a) for a in one] == [r.n for r in asked]
    assert texts(in_chunks(asked, 64, seed=1)) != texts(one)


def written_plainly(chat: Chat, request: Sample, k: int, seed: int) -> tuple[list[int], float]:
    """Candidate k of a free request, one token at a time without a cache: its tokens and their log-probability."""
    ids, total = chat.prompt(request.state), 0.0
    start, settings = len(ids), chat.rendering
    for u in uniforms(settings.max_new_tokens, seed, *request.key, k):
        logp = log_softmax(plain(ids)[-1] / (request.temperature or 1))
        p = truncated(torch.from_numpy(np.exp(logp))[None], settings.top_k, settings.top_p)[0].numpy()
        cumulative = p.cumsum()
        token = int(np.searchsorted(cumulative, u * cumulative[-1])) if request.temperature else int(logp.argmax())
        ids, total = [*ids, token], total + logp[token]
        if token == chat.stop_id or any(stop in chat.tokenizer.decode(ids[start:]) for stop in settings.stop):
            break
    return ids[start:], total


@pytest.mark.parametrize("settings", [{}, {"top_k": 5, "top_p": 0.8}, {"stop": ("right", "purse")}])
def test_free_sampling_equals_one_token_at_a_time(settings):
    chat, asked, lengths = word_chat(**settings), requests(valid=False), set()
    for request, answer in zip(asked, FastPolicy(MODEL, chat, 5).sample(asked), strict=True):
        for k, candidate in enumerate(answer):
            ids, logp = written_plainly(chat, request, k, 5)
            assert (candidate.text, candidate.tokens) == (chat.text(ids), len(ids))
            assert candidate.logprob == pytest.approx(logp, abs=1e-4)
            lengths.add(len(ids))
            assert not any(stop in candidate.text for stop in chat.rendering.stop)
    assert min(lengths) < max(lengths) == chat.rendering.max_new_tokens  # some end, some are cut


def logprobs_by_brute_force(state: State, valid: tuple[str, ...], temperature: float) -> list[float]:
    """Token by token, among the tokens with which a valid action can go on."""
    whole, totals = [CHAT.action(a, state.task) for a in valid], []
    for ids in whole:
        totals.append(0.0)
        for t, token in enumerate(ids):
            allowed = sorted({w[t] for w in whole if w[:t] == ids[:t] and len(w) > t})
            logits = plain([*CHAT.prompt(state), *ids[:t]])[-1][allowed] / temperature
            totals[-1] += log_softmax(logits)[allowed.index(token)]
    return totals


def test_logprobs_of_the_valid_actions_equal_brute_force():
    every = itertools.product(STATES, (1, 3, 5), (1.0, 0.5))
    asked = [Sample(state, 1, ("t",), temperature, ACTIONS[:n]) for state, n, temperature in every]
    answers = (kind(MODEL, CHAT).valid_logprobs(asked) for kind in (FastPolicy, Policy))
    for request, logp, plain in zip(asked, *answers, strict=True):
        expected = logprobs_by_brute_force(request.state, request.valid, request.temperature)
        assert logp == pytest.approx(expected, abs=1e-5) and plain == pytest.approx(expected, abs=1e-5)
        assert np.exp(logp).sum() == pytest.approx(1, abs=1e-9)


def test_actions_are_drawn_as_often_as_they_are_likely_and_the_likeliest_by_the_greedy():
    agent = FastPolicy(MODEL, CHAT)
    drawn = [c.text for c in agent.sample([Sample(FIRST, 4000, ("t",), 1.0, ACTIONS)])[0]]
    for action, logp in zip(ACTIONS, logprobs_by_brute_force(FIRST, ACTIONS, 1.0), strict=True):
        assert drawn.count(action) / 4000 == pytest.approx(np.exp(logp), abs=0.03)  # four standard errors
    for state in STATES:
        ((greedy,),) = agent.sample([Sample(state, 1, (), 0.0, ACTIONS)])
        assert greedy.text == ACTIONS[int(np.argmax(logprobs_by_brute_force(state, ACTIONS, 1.0)))]
        for action, logp in zip(ACTIONS, agent.logprobs([(state, a) for a in ACTIONS]), strict=True):  # as free text
            prompt, ids = CHAT.prompt(state), CHAT.action(action, state.task)
            rows = log_softmax(plain([*prompt, *ids]))[len(prompt) - 1 : -1]
            assert logp == pytest.approx(rows[np.arange(len(ids)), ids].sum(), abs=1e-4)


@pytest.mark.parametrize("kind", [Policy, FastPolicy])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_refused(kind, number):
    """In a token that the check at load does not read; greedy would write token 0, sampling the last one."""
    model = tiny_lm(CHAT)
    with torch.no_grad():
        model.get_input_embeddings().weight[CHAT.prompt(FIRST)[1]] = number
    agent = kind(model, CHAT)
    for temperature, valid in itertools.product((0.0, 0.8), ((), ACTIONS)):
        with pytest.raises(UserError, match=r"not finite.*--precision float32") as error:
            agent.sample([Sample(FIRST, 2, ("t",), temperature, valid)])
        assert "--plain" not in str(error.value)
    with pytest.raises(UserError, match="not finite"):
        agent.likelihoods([LogProb(FIRST, ACTIONS)])
    with pytest.raises(UserError, match="not finite"):
        policy_ranking(agent, [[Pair(FIRST, ACTIONS[0], 0.0), Pair(FIRST, ACTIONS[1], 1.0)]])


def test_a_request_is_rendered_as_the_checkpoint_says():
    env = FakeEnv()
    env.reset(options={"task_id": "train0"})
    free, valid = (word_chat(candidates=c, temperature=0.3).rendering for c in ("free", "valid"))
    assert ask(env, STATES[0], 2, ("k",), free) == Sample(STATES[0], 2, ("k",), 0.3, ())
    actions = tuple(f"Action: {action}" for action in WORLD)
    assert ask(env, STATES[0], 2, ("k",), valid, 0.0) == Sample(STATES[0], 2, ("k",), 0.0, actions)


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"top_k": 2}, [[0, 0.4, 0, 0.3], [0.25, 0.25, 0, 0]]),
        ({"top_p": 0.5}, [[0, 0.4, 0, 0.3], [0.25, 0.25, 0, 0]]),
        ({"top_p": 0.4}, [[0, 0.4, 0, 0], [0.25, 0.25, 0, 0]]),
        ({"top_k": 1, "top_p": 0.9}, [[0, 0.4, 0, 0], [0.25, 0, 0, 0]]),
        ({"top_k": 2, "top_p": 0.55}, [[0, 0.4, 0, 0], [0.25, 0.25, 0, 0]]),  # of what top-k leaves, .4 is .57
    ],
)
def test_top_k_and_top_p_by_hand(settings, kept):
    p = torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.25, 0.25, 0.25, 0.25]], dtype=torch.float64)
    assert truncated(p) is p and truncated(p, **settings).tolist() == kept


def countdown(i: int, rounds: int):
    """An episode of so many requests, each its own number."""
    answered = []
    for _ in range(rounds):
        answered.append((yield i))
    assert answered == [i] * rounds
    return i


ECHO = {int: lambda asked: asked}


def test_episodes_come_as_they_finish_or_in_their_order():
    rounds = [9, 2, 1, 0, 5]
    assert list(drive(itertools.starmap(countdown, enumerate(rounds)), ECHO)) == [3, 2, 1, 4, 0]
    for width in (1, 2, 100):
        assert list(drive_in_order(itertools.starmap(countdown, enumerate(rounds)), ECHO, width)) == [*range(5)]
    slow_first = drive(itertools.starmap(countdown, enumerate([50, *[1] * 20])), ECHO, 3)
    assert [next(slow_first) for _ in range(20)] == list(range(1, 21)) and list(slow_first) == [0]


def test_many_requests_and_lists_of_them_are_answered_in_one_call():
    def episode(i):
        one = yield i
        if i % 2:
            yield Score(STATES[0], (f"a{i}",))
        two = yield [10 * i, 10 * i + 1]
        return one, two

    calls = []

    def double(asked):
        calls.append(asked)
        return [2 * n for n in asked]

    answers = {int: double, Score: lambda asked: calls.append(len(asked)) or asked}
    assert sorted(drive(map(episode, range(3)), answers, 3)) == [(2 * i, [20 * i, 20 * i + 2]) for i in range(3)]
    assert calls == [[0, 1, 2], [0, 1, 20, 21], 1, [10, 11]]  # the most frequent kind first
