"""Wordings of a task: each candidate under its own, what they cost, where the task stands; those of a server."""

import pytest
from fakes import FakeEnv, FakeServer, chat_completion, run, word_chat

import q_search
from experiments.paraphrase import by_server, prompt_tokens, reword, under_wordings
from q_search import Method
from qlass import UserError
from qlass.batching import Candidate, Score
from qlass.messages import State
from qlass.results import costs_of

TASK = "i need a red cotton shirt"


def wording(task: str, index: int) -> str:
    """Of five wordings the index-th."""
    return f"{'please ' * (index % 5)}{task}"


class Shop(FakeEnv):
    """Two pages that both show the task, as WebShop's do, behind candidate "c1"."""

    task = TASK

    def _look(self):
        return f"page {TASK} end"


def guided(method: Method, trial: int):
    """The trajectory, the states that were scored, what the model was asked, call by call."""
    scored, drawn = [], []

    def model(requests):  # it says which wording it read
        drawn.append(requests)
        texts = {wording(TASK, k): f"Action: c{k}" for k in range(5)}
        return [[Candidate(texts[r.state.task], 2, -1.0)] * r.n for r in requests]

    def answer(request):
        if isinstance(request, Score):
            scored.append(request.state)
            return [float("c1" in action) for action in request.actions]  # Q is 1 for candidate "c1"
        return rephrased([request])[0]

    rephrased = under_wordings(model, wording)
    steps, _ = run(q_search.episode(Shop({"c1": {"c1": 0.5}}), "t", method, trial, word_chat().rendering), answer)
    return steps, scored, drawn


def test_each_candidate_is_drawn_under_its_own_wording_and_scored_under_the_original():
    chat = word_chat()
    steps, scored, drawn = guided(Method("qlass", "q", M=3), 0)
    words = [wording(TASK, k) for k in range(3)]
    assert [[r.state.task for r in step] for step in drawn] == [words, words]
    for r in [r for step in drawn for r in step]:
        assert all(r.state.task in text for role, text in r.state.messages[2:] if role == "user")
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


def test_trials_continue_with_further_wordings():
    *_, drawn = guided(Method("qlass", "q", M=2), 1)
    assert {r.state.task for step in drawn for r in step} == {wording(TASK, 2), wording(TASK, 3)}


TOLD = (("user", "Shop. To find a shoe is all."), ("assistant", "OK"), ("user", "Task: find a shoe. All off."))
LATER = "Observation: to find a shoe. Task: find a shoe."
PAGES = ["Task: buy \\1. All off.", "Observation: to buy \\1. Task: buy \\1."]


@pytest.mark.parametrize(
    ("messages", "task", "pages"),
    [
        (TOLD[2:], "find a shoe", PAGES),
        (TOLD, "find a shoe", ["Shop. To buy \\1 is all.", *PAGES]),
        (TOLD, "red", None),  # the first messages do not say it
        (TOLD, "", None),
    ],
)
def test_the_task_is_worded_anew_where_it_is_said_or_refused(messages, task, pages):
    state = State(messages, task, len(messages) - 1).extended("Action: find a shoe", LATER)
    if pages is None:
        with pytest.raises(UserError, match=f"the task '{task}' does not stand in the first messages"):
            reword(state, "buy \\1")
    else:
        worded = reword(state, "buy \\1")
        assert [text for role, text in worded.messages if role == "user"] == pages
        assert worded.task == "buy \\1" and worded.messages[-2][1] == "Action: find a shoe"
    assert reword(state, task) == state


def test_a_servers_wording_is_one_line_and_the_task_itself_if_it_says_nothing():
    with FakeServer() as server:
        server.script += [chat_completion(' "one\n line" '), chat_completion(""), 404]
        ask = by_server(server.url)
        assert [ask(TASK, n) for n in range(3)] == [TASK, "one line", TASK]
        assert server.seen[-1]["messages"][0]["content"].endswith(TASK)
        with pytest.raises(UserError, match="404"):
            ask(TASK, 3)
