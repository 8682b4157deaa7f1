"""Wordings of a task: each candidate under its own, what they cost, where the task stands; those of a server."""

from types import SimpleNamespace

import pytest
from fakes import FakeServer, chat_completion, refused, talk, word_chat

from experiments.paraphrase import by_server, prompt_tokens, reword, under_wordings
from qlass.batching import Candidate, Sample
from qlass.messages import State

TASK = "i need a red cotton shirt"


PAGE = f"page {TASK} end"
STATE = talk("walk", "OK", PAGE, task=TASK)


def wording(task, index):
    return f"{'please ' * index}{task}"


def draw(state, trial):
    """The requests for three candidates, and the candidates; a model says how often it was asked to please."""
    asked = []

    def model(requests):
        asked.extend(requests)
        return [[Candidate(f"Action: c{r.state.task.count('please')}", 2, -1.0)] * r.n for r in requests]

    (candidates,) = under_wordings(model, wording)([Sample(state, 3, ("t", trial, 0), 1.0)])
    return asked, candidates


@pytest.mark.parametrize(("trial", "numbers"), [(0, (0, 1, 2)), (1, (3, 4, 5))])
def test_each_candidate_of_each_trial_is_drawn_under_its_own_wording(trial, numbers):
    asked, candidates = draw(STATE, trial)
    words = [wording(TASK, number) for number in numbers]
    assert [(r.state.task, r.state.observation) for r in asked] == [(text, f"page {text} end") for text in words]
    assert len({r.key for r in asked}) == 3
    texts = [f"Action: c{n}" for n in numbers]
    assert [(c.text, c.wording) for c in candidates] == list(zip(texts, words, strict=True))


def test_tokens_of_all_wordings_by_hand():
    """Under the task's own wording what the user says is read, under the others all, the agent's words too."""
    steps = [SimpleNamespace(state=s, samples=draw(s, 0)[1]) for s in (STATE, STATE.extended("Action: c1", PAGE))]
    # "<user> walk <agent>" 3, "OK <end>" 2, a page of 8 words 10, "Action: c1 <end>" 3; a "please" is one more a page.
    own, other = 3 + 10 + 10, 3 + 2 + 10 + 3 + 10
    assert prompt_tokens(word_chat(), [steps]) == own + (other + 2 * 1) + (other + 2 * 2)


TOLD = talk("Shop. To find a shoe is all.", "OK", "Task: find a shoe. All off.").messages
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
        with refused(f"the task '{task}' does not stand in the first messages"):
            reword(state, "buy \\1")
    else:
        worded = reword(state, "buy \\1")
        assert [text for role, text in worded.messages if role == "user"] == pages
        assert worded.task == "buy \\1" and worded.messages[-2][1] == "Action: find a shoe"
    assert reword(state, task) == state


def test_a_servers_wording_is_one_line_and_the_task_itself_if_it_says_nothing():
    with FakeServer() as server:
        server.script += [chat_completion(' "one\n line" '), chat_completion("<think> a long"), 404]
        ask = by_server(server.url)
        assert [ask(TASK, n) for n in range(3)] == [TASK, "one line", TASK]
        assert server.seen[-1]["messages"][0]["content"].endswith(TASK)
        with refused("404"):
            ask(TASK, 3)
