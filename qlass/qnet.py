"""QNet: a language model with a value head (Eq. 9-11), and the (s, a, q) pairs that it learns.

Everything here reads one sequence at a time. `qlass/fast/` gives the same values and the same loss, each token computed
once; it is on by default and off with `fast=False` (--plain).
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from qlass import UserError, models
from qlass.batching import Score
from qlass.chat import Chat, Rendering, State
from qlass.records import read_object


class QNet(nn.Module):
    """Q(s, a): a HuggingFace causal LM without its output layer, and an MLP on the hidden state of each token."""

    def __init__(
        self, backbone: Any, chat: Chat, hidden: int = 1024, readout: str = "last", fast: bool = True, **room: Any
    ) -> None:
        """readout: Q is the value at the action's "last" token, or the "mean" over the action's tokens. room: `budget`
        (tokens of a batch) and `cache_gb` of the fast way."""
        super().__init__()
        self.backbone, self.chat, self.readout = backbone, chat, readout
        size = backbone.config.get_text_config().hidden_size
        self.head = nn.Sequential(  # Eq. (10); App. A.2: two hidden layers of 1024, ReLU
            nn.Linear(size, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1)
        ).to(backbone.device)  # fmt: skip
        self.fast = None
        self.room = room if fast else None  # None: --plain
        self.plain_tokens = 0

    def forward(self, at: Any = None, **inputs: Any) -> torch.Tensor:
        """Values V of tokens: (B, L) of all of `inputs` (ids, mask, positions: (B, L)), or those that `at` selects."""
        hidden = self.backbone(**inputs).last_hidden_state  # Eq. (9): h_1 .. h_L, (B, L, D)
        hidden = hidden if at is None else hidden[at]  # the head costs a tiny model more than its backbone
        with torch.autocast(hidden.device.type, enabled=False):  # in bf16 siblings would tie
            return self.head(hidden.to(self.head[0].weight.dtype)).squeeze(-1)  # Eq. (10)

    @property
    def _no_split_modules(self) -> Any:
        """What FSDP divides, layer by layer."""
        return self.backbone._no_split_modules

    def values(self, state: State, action: str) -> tuple[torch.Tensor, int]:
        """V of each token of (s, a), (L,), and how many of them are the prompt's."""
        prompt = self.chat.prompt(state)
        ids = self.chat.action(action, state.task, len(prompt))
        tokens = torch.tensor([[*prompt, *ids]], device=self.backbone.device)
        self.plain_tokens += tokens.numel()
        return self(input_ids=tokens, use_cache=False)[0].float(), len(prompt)

    def score(self, requests: list[Score]) -> list[list[float]]:
        """Q(s, a) of each request's actions."""
        if self.training:
            self.eval()
        scores = self.fast.score(requests) if self.fast else [[self.q(r.state, a) for a in r.actions] for r in requests]
        if not all(math.isfinite(q) for values in scores for q in values):
            raise UserError("QNet's values are not finite, so they rank nothing: its training has diverged")
        return scores

    @torch.inference_mode()
    def q(self, state: State, action: str) -> float:
        values, n_prompt = self.values(state, action)
        return float(values[-1] if self.readout == "last" else values[n_prompt:].mean())

    @property
    def computed(self) -> int:
        """Tokens put through the model to score, padding aside."""
        return self.fast.cache.computed if self.fast else self.plain_tokens

    def train(self, mode: bool = True) -> QNet:
        """Switch modes. Training changes the weights, so evaluation gets a new fast scorer, whose cache is empty."""
        self.fast = None
        if self.room is not None and not mode:
            from qlass.fast.score import FastQNet

            self.fast = FastQNet(self, **self.room)
        return super().train(mode)

    def save_pretrained(self, folder: Path) -> None:
        """The backbone by HuggingFace's save_pretrained, tokenizer and rendering, head.safetensors, qnet.json."""
        self.backbone.save_pretrained(folder)
        self.chat.save(folder)
        save_file({k: v.contiguous() for k, v in self.head.state_dict().items()}, folder / "head.safetensors")
        settings = {"hidden": self.head[0].out_features, "readout": self.readout}
        (folder / "qnet.json").write_text(json.dumps(settings) + "\n", encoding="utf-8")

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, device: str | None = None, readout: str | None = None, load_in: str | None = None,
        plain: bool = False, rendering: Rendering | None = None, precision: str | None = None, **room: Any,
    ) -> QNet:  # fmt: skip
        folder, kind = Path(folder), transformers.AutoModel
        settings = read_object(folder / "qnet.json")
        backbone, chat = models.load_checkpoint(folder, kind, device, load_in, False, plain, rendering, precision)
        qnet = cls(backbone, chat, settings["hidden"], readout or settings["readout"], not plain, **room)
        qnet.head.load_state_dict(load_file(folder / "head.safetensors"))
        return qnet.to(backbone.device).eval()


# ------------------------------------------------------------------------------------------------------------- pairs


@dataclasses.dataclass(frozen=True)
class Pair:
    """One (s, a) of a tree with its target q; siblings have the same state."""

    state: State
    action: str
    q: float
    own: bool = True  # its node is the agent's; else the expert's, who was the first to act so


def states_of(tree: list[dict]) -> dict[Any, State]:
    """The state that each node of a tree led to, by its id."""
    states = {tree[0]["node_id"]: State.load(tree[0]["messages"], tree[0].get("task", ""))}
    for node in tree[1:]:
        states[node["node_id"]] = states[node["parent_id"]].then(node["action"], node["observation"])
    return states


def pairs_of(tree: list[dict]) -> list[Pair]:
    """All (s, a, q) of a labelled tree, depth first."""
    states = states_of(tree)
    return [Pair(states[n["parent_id"]], n["action"], n["q"], n.get("source") != "expert") for n in tree[1:]]


def loss_tokens(n_prompt: int, n: int, loss_on: str) -> slice:
    """Which of the n tokens of (s, a) carry the loss: all (Eq. 11), the action's, or its last."""
    return slice({"all": 0, "action": n_prompt, "last": n - 1}[loss_on], n)


def pair_loss(qnet: QNet, pair: Pair, loss_on: str = "all") -> torch.Tensor:
    """Eq. (11) for one pair: 1/n sum_j (V_j - q)^2 over the n tokens of (s, a), or those that `loss_on` says."""
    values, n_prompt = qnet.values(pair.state, pair.action)
    return (values[loss_tokens(n_prompt, len(values), loss_on)] - pair.q).square().mean()
