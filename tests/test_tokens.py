"""Every token once: packed trees, remembered prompts, batches and sampling against one plain sequence at a time."""

import functools
import itertools
import math

import numpy as np
import pytest
import torch
from fakes import ACTIONS, FIRST, chat_tokenizer, log_pi, refused, tiny, tiny_lm, word_chat
from hypothesis import given
from hypothesis import strategies as st

from experiments import drive_in_order
from qlass.agent import load_policy
from qlass.batching import LogProb, Request, Sample, Score, drive
from qlass.chat import Chat, Rendering
from qlass.fast import cache, parity
from qlass.fast.cache import PromptCache
from qlass.fast.decode import FastPolicy
from qlass.fast.score import FastQNet
from qlass.fast.token_tree import TokenTree, batches, windows_of
from qlass.messages import react
from qlass.noise import uniforms
from qlass.policy import Policy
from qlass.settings import Sampling
from train_qnet import QNet

CHAT = word_chat(temperature=0.8)
MODEL = tiny_lm(CHAT)


@torch.inference_mode()
def plain(ids, model=MODEL):
    """Logits (T, V) of one sequence by itself."""
    return model(input_ids=torch.tensor([ids])).logits[0].double()


def step(state, *path):
    return state.extended(react("hm", path[-1]), " ".join(("Observation: you stand at start", *path)))


LEFT, RIGHT = step(FIRST, "left"), step(FIRST, "right")
STATES = [FIRST, FIRST.extended("Thought: find", "Observation: nothing happens"), LEFT, RIGHT,
          step(LEFT, "left", "right"), step(RIGHT, "right", "right")]  # fmt: skip
sizes = st.tuples(st.integers(1, 40), st.integers(0, 50))


@given(st.lists(sizes, min_size=1, max_size=15), st.integers(1, 300), st.sampled_from([0, 0.75]))
def test_batches_hold_every_item_once_within_the_budget(items, budget, min_fill):
    """Items of unlike length, and tokens in a cache: all of a group are padded to its longest."""
    every, before = zip(*items, strict=True)
    groups = list(batches(every, budget, before, min_fill))
    assert sorted(itertools.chain(*groups)) == list(range(len(items)))
    for group in groups:
        lengths, cached = zip(*(items[i] for i in group), strict=True)
        assert len(group) == 1 or (max(lengths) + max(cached)) * len(group) <= budget
        assert min(lengths) >= min_fill * max(lengths)


def requests(valid):
    """32 requests of several states, sizes and temperatures."""
    return [
        Sample(STATES[i % 6], 1 + i % 3, ("task", i), (0.8, 1.0, 0.0, 2.0)[i % 4], ACTIONS[: 2 + i % 4] * valid)
        for i in range(32)
    ]


def test_neither_the_batch_nor_what_else_it_holds_matters():
    asked = [*requests(valid=True)[::2], *requests(valid=False)]

    def written(size, seed=0, **settings):
        agent = FastPolicy(MODEL, CHAT, seed)
        vars(agent).update(settings)
        drawn = [agent.sample(asked[start : start + size]) for start in range(0, len(asked), size)]
        return [candidate.text for answers in drawn for answer in answers for candidate in answer]

    alone = written(1)
    small = FastPolicy(MODEL, CHAT, cache_gb=1e-5).cache
    for size, settings in ((64, {}), (7, {}), (64, {"budget": 100}), (64, {"cache": small})):
        assert written(size, **settings) == alone
    assert written(64, seed=1) != alone


def written_plainly(model, chat, request, k):
    """Candidate k of a free request, one token at a time without a cache: its tokens and their log-probability."""
    prompt, ids, total = chat.prompt(request.state), [], 0.0
    stops = chat.rendering.stop
    for u in uniforms(chat.rendering.max_new_tokens, 5, *request.key, k):
        logp = (plain(prompt + ids, model)[-1] / (request.temperature or 1)).log_softmax(-1)
        sums = logp.exp().cumsum(-1)
        token = int(torch.searchsorted(sums, u * sums[-1]) if request.temperature else logp.argmax())
        ids.append(token)
        total += float(logp[token])
        if token == chat.stop_id or any(stop in chat.tokenizer.decode(ids) for stop in stops):
            break
    return ids, total


LETTERS = Chat(chat_tokenizer("chatml"), Rendering(max_new_tokens=12, stop=("e", "ab")))


PADDED = tiny_lm(CHAT, pad_token_id=CHAT.prompt(FIRST)[1])  # with a word of the prompts


@pytest.mark.parametrize(("model", "chat"), [(MODEL, CHAT), (tiny_lm(LETTERS), LETTERS), (PADDED, CHAT)])
def test_free_sampling_equals_one_token_at_a_time(model, chat):
    """Up to the end of the turn, or to a stop text."""
    asked, lengths = requests(valid=False)[:12], set()
    answers = [kind(model, chat, 5).sample(asked) for kind in (FastPolicy, Policy)]
    for request, *both in zip(asked, *answers, strict=True):
        for k, candidates in enumerate(zip(*both, strict=True)):
            ids, logp = written_plainly(model, chat, request, k)
            lengths.add(len(ids))
            for candidate in candidates:
                assert (candidate.text, candidate.tokens) == (chat.text(ids), len(ids))
                assert candidate.logprob == pytest.approx(logp, abs=1e-4)
    assert min(lengths) < max(lengths) == chat.rendering.max_new_tokens  # some end, some are cut


def logprobs_by_brute_force(state, valid, temperature):
    prompt, whole = CHAT.prompt(state), [CHAT.action_tokens(a, state.task) for a in valid]
    return [log_pi(lambda ids: plain([*prompt, *ids])[-1] / temperature, ids, whole).item() for ids in whole]


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


def test_the_log_probability_of_a_text_by_brute_force():
    pairs = [(state, action) for state in STATES for action in ACTIONS]
    asked = [LogProb(state, ACTIONS) for state in STATES]
    answers = [np.concatenate(kind(MODEL, CHAT).likelihoods(asked)) for kind in (FastPolicy, Policy)]
    for (state, action), *both in zip(pairs, *answers, strict=True):
        prompt, ids = CHAT.prompt(state), CHAT.action_tokens(action, state.task)
        rows = plain(prompt + ids).log_softmax(-1)[len(prompt) - 1 : -1]
        assert both == pytest.approx([float(rows[range(len(ids)), ids].sum())] * 2, abs=1e-4)


@pytest.mark.parametrize("kind", [Policy, FastPolicy])
def test_logits_that_are_not_finite_are_refused(kind):
    """In a token that the check at load does not read; greedy would write token 0, sampling the last one."""
    model = tiny_lm(CHAT)
    with torch.no_grad():
        model.get_input_embeddings().weight[CHAT.prompt(FIRST)[1]] = float("nan")
    agent = kind(model, CHAT)
    asked = [Sample(FIRST, 2, ("t",), heat, valid) for heat in (0.0, 0.8) for valid in ((), ACTIONS)]
    calls = [functools.partial(agent.sample, [request]) for request in asked]
    calls += [lambda: agent.likelihoods([LogProb(FIRST, ACTIONS)]), lambda: agent.valid_logprobs(asked[1:2])]
    for call in calls:
        with refused(r"not finite"):
            call()


@pytest.fixture
def write(monkeypatch):
    """Draws a text from an agent of random weights, as far as the agent goes on with it."""

    def candidate(kind, chat, text):
        ids = iter(chat.tokenizer.encode(text, add_special_tokens=False))
        monkeypatch.setattr(kind, "draw", lambda *_: (torch.tensor([next(ids)]), torch.zeros(1)))
        return kind(tiny_lm(chat), chat).sample([Sample(FIRST, 1, ("t",), 1.0)])[0][0]

    return candidate


@pytest.mark.parametrize("kind", [Policy, FastPolicy])
def test_a_stop_text_that_the_prompt_begins_ends_no_answer(kind, write):
    """The prompt ends with a line break, and the agent writes the rest of "\\nObservation:"."""
    chat = Chat(chat_tokenizer("chatml"), Rendering(max_new_tokens=20))
    candidate = write(kind, chat, "Observation: a\nTask: b")
    assert candidate.text == "Observation: a" and chat.tokenizer.decode(candidate.ids).endswith("a\nTask:")


@pytest.mark.parametrize(("kind", "limit"), [(Policy, 31), (FastPolicy, 32)])
def test_a_thought_beyond_the_limit_gets_a_warning(kind, limit, write, capsys):
    chat, warning = Chat(chat_tokenizer("chatml"), Rendering(max_new_tokens=limit)), "an action is cut at"
    write(kind, chat, "Action: left<|im_end|>")
    assert warning not in capsys.readouterr().err
    write(kind, chat, "<think>" + "and on " * limit)
    assert f"{warning} --max-new-tokens {limit}" in capsys.readouterr().err


@pytest.mark.parametrize("stop", ["\nObservation:", "\n观察：", "🙂"])
@pytest.mark.parametrize("name", ["chatml", "llama-2"])
def test_a_stop_text_of_any_letters_ends_a_turn_where_it_stands(name, stop):
    """A letter may be several tokens."""
    chat = Chat(chat_tokenizer(name), Rendering(stop=(stop,)))
    ids = chat.tokenizer.encode(f"Action: left{stop} and on and on", add_special_tokens=False)
    end = next(end for end in range(1, len(ids)) if chat.ended(ids[:end]))
    written = chat.tokenizer.decode(ids[:end])
    assert stop in written and "and on and" not in written
    assert chat.text(ids[:end]) == "Action: left"


class Number(int, Request):
    """A request whose answer is it itself."""


class Digit(Number):
    pass


async def countdown(i, rounds):
    """An episode of so many requests."""
    for _ in range(rounds):
        assert await Number(i) == i
    return i


def test_episodes_come_as_they_finish_or_in_their_order():
    def episodes(*rounds):
        return itertools.starmap(countdown, enumerate(rounds))

    models = {Number: list}
    assert list(drive(episodes(9, 2, 1, 0, 5), models)) == [3, 2, 1, 4, 0]
    for width in (1, 2, 100):
        assert list(drive_in_order(episodes(9, 2, 1, 0, 5), models, width)) == [*range(5)]
    slow_first = drive(episodes(50, *[1] * 20), models, 3)
    assert list(slow_first) == [*range(1, 21), 0]


def test_requests_of_one_type_are_answered_in_one_call():
    calls = []

    async def episode(i):
        first = await Number(i)
        if i % 2:
            await Digit(i)
        return first + await Number(10 * i)

    def answer(asked):
        calls.append(asked)
        return [2 * number for number in asked]

    assert sorted(drive(map(episode, range(3)), dict.fromkeys((Number, Digit), answer), 3)) == [0, 22, 44]
    assert calls == [[0, 1, 2], [0, 20], [1], [10]]  # the most frequent kind first


def test_scores_that_are_not_finite_stop_whoever_gives_them():
    async def episode(request):
        return await request

    for kind, value in ((Score, math.nan), (LogProb, -math.inf)):
        with refused("scores are not finite"):
            list(drive([episode(kind(FIRST, ACTIONS))], {kind: lambda asked, value=value: [[0.5, value]]}))


PATHS = [path for depth in (3, 0, 2, 1) for path in itertools.product(ACTIONS[:3], repeat=depth)]
FAMILY = [functools.reduce(lambda s, a: s.extended(a, "nothing happens"), path, FIRST) for path in PATHS]


@pytest.mark.parametrize(("room", "row"), [(1 << 30, 2048), (1 << 30, 60), (40_000, 2048), (0, 60)])
@pytest.mark.parametrize("budget", [10_000, 150, 1])
def test_values_behind_remembered_prompts_are_the_plain_ones(room, row, budget, monkeypatch):
    """Each state three times, children before their parents too; in one row, or in several."""
    monkeypatch.setattr(PromptCache, "ROW", row)
    qnet, states = QNet(MODEL.model, CHAT), FAMILY[-13:]
    fast = FastQNet(qnet, room / (1 << 30))
    fast.cache.budget = budget
    plain = qnet.score([Score(state, ACTIONS) for state in states])
    order = np.random.default_rng(0).permutation(len(states) * 3) % len(states)
    for some in np.array_split(order, 6):
        fast.memory.clear()
        values = fast.score([Score(states[i], ACTIONS) for i in some])
        assert values == [pytest.approx(plain[i], abs=1e-5) for i in some]
        assert fast.cache.used <= room
    assert (fast.cache.used == 0) == (room == 0)


def test_the_values_that_are_kept_are_bounded(monkeypatch):
    monkeypatch.setattr("qlass.fast.score.REMEMBERED", 1)
    fast = FastQNet(QNet(MODEL.model, CHAT))
    values = [fast.score([Score(state, ACTIONS)]) for state in FAMILY[:2] * 2]
    assert np.allclose(values[:2], values[2:], atol=1e-5) and len(fast.memory) == len(ACTIONS)


def test_a_step_costs_its_last_turn_and_the_actions():
    second = FIRST.extended("Action: left", "Observation: you stand")
    third = second.extended("Action: left", "Observation: nothing happens")
    fast, costs = FastQNet(QNet(MODEL.model, CHAT)), []
    actions = TokenTree().growth(*(CHAT.action_tokens(action, "") for action in ACTIONS))
    for state in (FIRST, second, third, third):
        fast.memory.clear()
        fast.cache.computed = 0
        fast.score([Score(state, ACTIONS)])
        costs.append(fast.cache.computed - actions)
    # "Action: left <end>" and "<user> Observation: you stand <agent>", then "... nothing happens ..."
    assert costs == [len(CHAT.prompt(FIRST)), 3 + 5, 3 + 5, 3 + 5]  # the last turn is always fresh


def test_a_tree_costs_its_unique_tokens():
    size = TokenTree().growth(*(CHAT.pair(state, action) for state in FAMILY for action in ACTIONS[:2]))
    policy, net = FastPolicy(MODEL, CHAT), FastQNet(QNet(MODEL.model, CHAT))
    policy.likelihoods([LogProb(s, ACTIONS[:2]) for s in FAMILY])
    net.score([Score(s, ACTIONS[:2]) for s in FAMILY])
    assert net.cache.computed == policy.cache.computed == size


def test_a_trie_is_read_down_to_its_last_branching():
    policy = FastPolicy(MODEL, CHAT)
    policy.sample([Sample(FIRST, 3, ("t",), 1.0, ("Action: left",))])
    assert policy.cache.computed == 0  # there is nothing to choose
    policy.sample([Sample(FIRST, 3, ("t",), 1.0, ("Action: left left left", "Action: right walk"))])
    assert policy.cache.computed == len(CHAT.prompt(FIRST)) + 1  # "Action:", behind which they part


# ----------------------------------------------------------------------- models of several kinds, and what is refused


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss"])
def test_a_mask_without_its_windows_is_found(name, dtype, monkeypatch):
    model = tiny(name).to(dtype)
    for part in (model, model.model):  # a backbone too, as QNet has
        parity.check(part)
    windows = windows_of(model.config)
    if any(windows.values()):
        monkeypatch.setattr("qlass.fast.token_tree.windows_of", lambda config: dict.fromkeys(windows, 0))
        with refused("differ from plain ones"):
            parity.check(model)


def test_few_bits_round_in_a_backbone_too(monkeypatch):
    backbone = tiny("llama").model
    monkeypatch.setattr(parity, "differences", lambda model, sequences, plain: torch.full((3,), 0.02))
    with refused("differ from plain ones"):
        parity.check(backbone)
    backbone.config._is_quantized = True  # as transformers marks it
    parity.check(backbone)


@pytest.mark.parametrize(("name", "layers"), [("llama", 4), ("gemma4_text", 2)])
def test_keys_and_values_are_measured_in_a_filled_cache(name, layers):
    """Two heads of 16 numbers of 4 bytes. Gemma 4's last two layers read the keys of those before."""
    assert cache.token_bytes(tiny(name)) == layers * 2 * (2 * 16 * 4)


@pytest.mark.parametrize("name", ["mamba2", "bloom", "gpt_neo", "llama4_text"])
def test_what_cannot_read_token_trees_is_refused(name, tmp_path):
    tiny(name).save_pretrained(tmp_path)
    CHAT.save(tmp_path)
    with refused("--plain reads it"):
        load_policy(tmp_path, Sampling())
    assert load_policy(tmp_path, Sampling(plain=True)).sample([Sample(FIRST, 2, ("t",), 0.0)])
