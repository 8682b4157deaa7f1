"""Decisions packed into token trees have the probabilities of the policy that made them."""

import numpy as np
import pytest
import torch
from fakes import tiny_lm, word_chat

from experiments.decisions import Decision, pack_decisions
from qlass.batching import Sample
from qlass.fast.decode import FastPolicy
from qlass.messages import State

STATE = State((("user", "walk"), ("assistant", "OK"), ("user", "you stand at start")), "find")


@pytest.mark.parametrize(("limit", "valid"), [(4, ()), (200, ()), (200, ("Action: left", "Action: right", "hm"))])
def test_probabilities_are_those_of_the_tokens_that_were_sampled(limit, valid):
    """Free text cut short lacks the token that ends the turn, and special tokens are not in its text."""
    chat = word_chat(max_new_tokens=limit)
    model = tiny_lm(chat, initializer_range=0.05)
    (drawn,) = FastPolicy(model, chat).sample([Sample(STATE, 20, ("k",), 1.0, valid)])
    (p,) = pack_decisions(chat, [Decision(STATE, c.text, valid, c.ids) for c in drawn], 10**6)
    logp, entropy = p.logprobs(model)
    total = torch.zeros(20).index_add(0, torch.tensor(p.owner), logp)
    np.testing.assert_allclose(total.tolist(), [c.logprob for c in drawn], rtol=1e-4)
    assert len(set(total.tolist())) > 1
    assert entropy.min() > 0 and entropy.max() < np.log(len(valid) or len(chat.tokenizer))
    assert valid or any(len(c.ids) != len(chat.action(c.text, "find")) for c in drawn)  # read anew they would be others
