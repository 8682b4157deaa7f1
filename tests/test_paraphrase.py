"""Wordings of a task: nothing that is asked changes; each candidate under its own; those of a server."""

import re

import pytest
from fakes import FakeEnv, run, serving, word_chat

import envs
import q_search
from experiments.paraphrase import by_server, prompt_tokens, reword, under_wordings
from experiments.rewording import clauses, paraphrase, wordings
from q_search import Method
from qlass import UserError
from qlass.batching import Candidate, Score
from qlass.messages import State
from qlass.results import costs_of

TASK = "i need a red cotton shirt with color: navy, and size: x-large, and price lower than 60.00 dollars"


def test_wordings_by_hand():
    assert clauses(TASK) == ("i need a red cotton shirt", [("color", "navy"), ("size", "x-large")], "60.00")
    every = wordings(TASK)
    assert "under $60.00, find me a red cotton shirt, with color: navy, and size: x-large" in every
    assert "the size should be x-large and the color should be navy, i want to order a red cotton shirt, " \
           "for less than 60 dollars" in every  # fmt: skip
    # 8 frames beside "i need" (one of them), 4 x 2 ways to list the options, 6 prices, 6 orders of the three
    assert len(every) == len(set(every)) == 8 * 8 * 6 * 6
    assert TASK not in every and all("red cotton shirt" in text for text in every)
    assert paraphrase(TASK, 0) == TASK and paraphrase(TASK, 3) == every[2]


def test_nothing_that_is_asked_changes():
    env = envs.make("webshop")
    for task_id in env.task_ids("test")[:25]:
        env.reset(options={"task_id": task_id})
        task, options, limit = (env.goal[name] for name in ("instruction_text", "goal_options", "price_upper"))
        goods = clauses(task)[0].split()[-2:]
        for text in (paraphrase(task, index) for index in range(1, 40)):
            assert " ".join(goods) in text, text
            for name, value in options.items():  # each value still belongs to its name
                assert re.search(rf"\b{re.escape(name)}(: | should be ){re.escape(value)}", text), text
            amounts = re.findall(r"(?:lower than|less than|under|below) \$?([\d.]+)(?: dollars)?\b", text)
            assert not limit or [float(amount) for amount in amounts] == [limit], text


class Shop(FakeEnv):
    """Two pages that both show the task, as WebShop's do, behind candidate "c1"."""

    def _look(self):
        return f"page {TASK} end"

    def _info(self):
        return super()._info() | {"task": TASK}


def guided(method: Method, trial: int, wordings: int):
    """The trajectory, the states that were scored, what the model was asked, call by call."""
    scored, drawn = [], []

    def model(requests):  # it says which wording it read
        drawn.append(requests)
        texts = {paraphrase(TASK, k): f"Action: c{k}" for k in range(5)}
        return [[Candidate(texts[r.state.task], 2, -1.0)] * r.n for r in requests]

    def answer(request):
        if isinstance(request, Score):
            scored.append(request.state)
            return [float("c1" in action) for action in request.actions]  # Q is 1 for candidate "c1"
        return rephrased([request])[0]

    rephrased = under_wordings(model, paraphrase, wordings)
    steps, _ = run(q_search.episode(Shop({"c1": {"c1": 0.5}}), "t", method, trial, word_chat().rendering), answer)
    return steps, scored, drawn


def test_each_candidate_is_drawn_under_its_own_wording_and_scored_under_the_original():
    chat = word_chat()
    steps, scored, drawn = guided(Method("qlass", "q", M=3), 0, 3)
    words = [paraphrase(TASK, k) for k in range(3)]
    assert [[r.state.task for r in step] for step in drawn] == [words, words]
    for r in [r for step in drawn for r in step]:
        assert all(r.state.task in text for role, text in r.state.messages[2:] if role == "user")
    assert [r.key for r in drawn[0]] == [("t", 0, 0), ("t", 0, 0, words[1]), ("t", 0, 0, words[2])]
    assert all(s.task == TASK and TASK in s.messages[-1][1] for s in scored)
    assert [step.action for step in steps] == ["Action: c1"] * 2

    # Tokens, counted by hand: 2 a candidate; under the first wording what the user says, under the others all.
    last = drawn[-1]
    full = [len(chat.prompt(r.state)) for r in last]
    own, ok = (len(chat.action(text, "")) for text in ("Action: c1", "OK"))
    tokens = costs_of(chat, [steps], lambda step: step.candidates)["tokens"]
    assert tokens["generated"] == 2 * 3 * 2
    assert prompt_tokens(chat, [steps]) == full[0] - own - ok + full[1] + full[2]
    assert tokens["scored"] == full[0] - own - ok + 2 * 3 * own


def test_trials_continue_with_further_wordings_and_start_again_after_the_last():
    for trial, indices in enumerate([{0, 1}, {2, 0}, {1, 2}]):
        *_, drawn = guided(Method("qlass", "q", M=2), trial, 3)
        assert {r.state.task for step in drawn for r in step} == {paraphrase(TASK, k) for k in indices}


TOLD = (("user", "Shop. To find a shoe is all."), ("assistant", "OK"), ("user", "Task: find a shoe. All off."))
LATER = "Observation: to find a shoe. Task: find a shoe."


@pytest.mark.parametrize(
    ("messages", "task", "pages"),
    [
        (TOLD[2:], "find a shoe", ["Task: buy \\1. All off.", "Observation: to find a shoe. Task: buy \\1."]),
        (TOLD, "find a shoe", ["Shop. To buy \\1 is all.", "Task: buy \\1. All off.",
                               "Observation: to find a shoe. Task: buy \\1."]),
        (TOLD, "red", None),  # the first messages do not say it
        (TOLD, "hoe", None),
        (TOLD, " ", None),
        (TOLD, "", None),
    ],
)  # fmt: skip
def test_the_task_is_worded_anew_where_it_is_said_or_refused(messages, task, pages):
    state = State(messages, task).then("Action: find a shoe", LATER)
    if pages is None:
        with pytest.raises(UserError, match=f"the task '{task}' does not stand in the first messages"):
            reword(state, "buy \\1")
    else:
        worded = reword(state, "buy \\1")
        assert [text for role, text in worded.messages if role == "user"] == pages
        assert worded.task == "buy \\1" and worded.messages[-2][1] == "Action: find a shoe"
    assert reword(state, task) == state


def test_a_servers_wording_is_one_line_and_the_task_itself_if_it_says_nothing():
    replies, seen = iter([(200, "hello"), (200, ' "one\n line" '), (200, ""), (400, ""), (404, "")]), []

    def answer(body):
        seen.append(body)
        status, content = next(replies)
        return status, {"choices": [{"message": {"content": content}}]}

    with serving(answer) as url:
        ask = by_server(url)
        assert [ask(TASK, n) for n in range(4)] == [TASK, "one line", TASK, TASK]
        assert seen[-1]["model"] == "first" and seen[-1]["messages"][0]["content"].endswith(TASK)
        with pytest.raises(UserError, match=r"--paraphrase-server.*404"):
            ask(TASK, 4)
