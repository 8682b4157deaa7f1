"""Stage 1 with a second loss: what predicts which token of the environment's answer, with what weight."""

import math
from types import SimpleNamespace

import pytest
import torch
from fakes import word_chat
from test_sft import CHAT, ITS_OWN, STATE, shown

import sft
from experiments.clone_answers import Example, example_of, examples_of, loss_of
from qlass.messages import State


@pytest.mark.parametrize("w", [0.0, 0.5])
def test_the_last_word_of_an_action_predicts_its_answer(w):
    whole = example_of(CHAT, STATE, 100, [7], w)
    own = [(i - 1, whole.ids[i], 1.0) for i in ITS_OWN]
    answered = [(13, whole.ids[i], w) for i in range(14, 19)] + [(21, 7, w)]
    assert whole.ids == [*sft.example_of(CHAT, STATE, 100).ids, 7]
    assert sorted(whole.predictions) == sorted([*own, *(answered if w else [])]) and whole.targets == 10 + 6 * w


def test_the_loss_by_hand():
    logits = torch.tensor([[[0.0, 0.0], [math.log(3), 0.0], [0.0, 5.0], [9.0, 9.0]]])

    def loss(*predictions: list[tuple[int, int, float]]) -> float:
        class Model:
            device = "cpu"

            def __call__(self, logits_to_keep, **_):
                return SimpleNamespace(logits=logits.repeat(len(predictions), 1, 1)[:, logits_to_keep])

        return loss_of(Model(), [Example([0, 1, 0, 1], of) for of in predictions]).item()

    assert loss([(0, 1, 0.5), (1, 0, 2.0)]) == pytest.approx(math.log(2) / 2 - 2 * math.log(3 / 4))
    assert loss([(1, 0, 1.0), (1, 1, 1.0)]) == pytest.approx(-math.log(3 / 4) - math.log(1 / 4))  # one position, two
    both = math.log(2) + math.log(1 + math.exp(-5))
    assert loss([(0, 1, 1.0)], [(2, 1, 1.0)]) == pytest.approx(both)  # each row has its own targets


def test_without_a_memory_each_answer_stands_behind_its_action():
    chat = word_chat(markov=True)
    other, last = (sft.example_of(chat, State(STATE.messages[:n]), 100) for n in (4, 6))
    first, second = examples_of(chat, shown(STATE), 100, 0.5)
    answer = last.ids[:5]
    assert (first.ids, second.ids) == (other.ids + answer, last.ids)
    assert first.predictions[-5:] == [(len(other.ids) - 1, token, 0.5) for token in answer]
    assert second.targets == last.targets == 3  # nothing answers the last action
