"""QNet: a language model with a value head (Eq. 9-11), and the (s, a, q) pairs that it learns."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from qlass import UserError, models
from qlass.chat import Chat, Rendering, State
from qlass.driver import Score
from qlass.fast.cache import reader
from qlass.files import read_object, wrong


class QNet(nn.Module):
    """Q(s, a): a HuggingFace causal LM without its output layer, and an MLP on each token's hidden state (Eq. 8)."""

    def __init__(
        self, backbone: Any, chat: Chat, hidden: int = 1024, readout: str = "last", budget: int = 16_384,
        cache_gb: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.backbone, self.chat, self.readout = backbone, chat, readout
        size = backbone.config.get_text_config().hidden_size
        self.head = nn.Sequential(  # App. A.2: two hidden layers of 1024, ReLU
            nn.Linear(size, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1)
        ).to(backbone.device)  # fmt: skip
        self.budget, self.cache_gb = budget, cache_gb  # as Policy's
        self._known: dict[tuple[State, str], float] = {}

    def forward(self, at: Any = None, **inputs: Any) -> torch.Tensor:
        """Values (B, L) of the tokens of `inputs` (ids, positions, mask as from `tree_inputs`), or, flat, of those
        that `at` (B, L) marks, or at its indices: the head costs a tiny model more than its backbone."""
        hidden = self.backbone(**inputs).last_hidden_state
        hidden = hidden if at is None else hidden[at]
        return self.head(hidden.to(self.head[0].weight.dtype)).squeeze(-1)

    def train(self, mode: bool = True) -> QNet:
        """Training changes the weights: what was computed with the old ones is forgotten."""
        self.reader, self._known = reader(self.backbone, self.cache_gb), {}
        return super().train(mode)

    @property
    def computed(self) -> int:
        """Tokens put through the model so far; padding is not counted."""
        return self.reader.computed

    @torch.inference_mode()
    def score(self, requests: list[Score]) -> list[list[float]]:
        """Q(s, a) of each request's actions: the value at the action's last token, or their mean."""
        if self.training:
            self.eval()
        fresh: dict[State, dict[str, None]] = {}
        for r in requests:
            for action in r.actions:
                if (r.state, action) not in self._known:
                    fresh.setdefault(r.state, {})[action] = None
        states = list(fresh)
        tails = [[self.chat.action(a, s.task) for a in fresh[s]] for s in states]

        def values(inputs: dict, columns: torch.Tensor) -> torch.Tensor:
            return self(at=(slice(None), columns), **inputs).float()

        prompts = [self.chat.prompt_tokens(s) for s in states]
        for n, out, _, paths in self.reader.read(values, self.backbone, self.budget, prompts, tails):
            v = out.cpu().numpy()
            if not math.isfinite(v.sum()):
                raise UserError("QNet's values are not finite, so they rank nothing: its training has diverged")
            for action, at in zip(fresh[states[n]], paths, strict=True):
                self._known[states[n], action] = float(v[at[-1]] if self.readout == "last" else v[at].mean())
        return [[self._known[r.state, action] for action in r.actions] for r in requests]

    def save_pretrained(self, folder: Path) -> None:
        """The backbone by HuggingFace's save_pretrained, tokenizer and rendering, head.safetensors, qnet.json."""
        self.backbone.save_pretrained(folder)
        self.chat.save(folder)
        save_file({k: v.contiguous() for k, v in self.head.state_dict().items()}, folder / "head.safetensors")
        about = {"hidden": self.head[0].out_features, "readout": self.readout}
        (folder / "qnet.json").write_text(json.dumps(about) + "\n", encoding="utf-8")

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, device: str | None = None, readout: str | None = None, load_in: str | None = None,
        plain: bool = False, rendering: Rendering | None = None, **options: Any,
    ) -> QNet:  # fmt: skip
        folder = Path(folder)
        if not (folder / "qnet.json").exists():
            raise UserError(f"{folder}: not a QNet (no qnet.json); train_qnet.py writes one")
        kind = transformers.AutoModel
        backbone, chat = models.load_checkpoint(folder, kind, device, load_in, plain=plain, rendering=rendering)
        about = read_object(folder / "qnet.json")
        kinds = {"hidden": lambda v: type(v) is int and v > 0, "readout": lambda v: v in ("last", "mean")}
        if mistake := wrong(about, kinds, kinds):
            raise UserError(f"{folder / 'qnet.json'}: {mistake}; train_qnet.py writes one")
        try:
            qnet = cls(backbone, chat, about["hidden"], readout or about["readout"], **options)
            qnet.head.load_state_dict(load_file(folder / "head.safetensors"))
        except (OSError, RuntimeError, SafetensorError, ValueError) as error:
            why = str(error).splitlines()[0]
            said = f"no value head that fits its backbone ({why}): are these files of two checkpoints?"
            raise UserError(f"{folder}: {said}") from None
        return qnet.to(backbone.device).eval()


@dataclasses.dataclass(frozen=True)
class Pair:
    """One (s, a) of a tree with its target q; siblings have the same state."""

    state: State
    action: str
    q: float
    own: bool = True  # its node is the agent's; else the demonstrator's, who was the first to act so


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


def pair_values(qnet: QNet, pair: Pair) -> tuple[torch.Tensor, int]:
    """V of each token of (s, a), and how many of them are the prompt's."""
    prompt, action = qnet.chat.prompt(pair.state), qnet.chat.action(pair.action, pair.state.task)
    ids = torch.tensor([[*prompt, *action]], device=qnet.backbone.device)
    return qnet(input_ids=ids, use_cache=False)[0].float(), len(prompt)


def pair_loss(qnet: QNet, pair: Pair, loss_on: str = "all") -> torch.Tensor:
    """Eq. (11) for one pair: 1/n sum_j (V_j - q)^2 over the n tokens of (s, a)."""
    values, n_prompt = pair_values(qnet, pair)
    return (values[loss_tokens(n_prompt, len(values), loss_on)] - pair.q).square().mean()


@torch.no_grad()
def plain_scores(qnet: QNet, pairs: list[Pair]) -> list[float]:
    read = (pair_values(qnet, pair) for pair in pairs)
    return [float(values[-1] if qnet.readout == "last" else values[n_prompt:].mean()) for values, n_prompt in read]


def qnet_scores(qnet: Any, trees: list[list[Pair]]) -> dict[tuple[State, str], float]:
    """Q(s, a) of the trees' pairs as search asks for it."""
    pairs = list(dict.fromkeys((p.state, p.action) for tree in trees for p in tree))
    return dict(zip(pairs, (s[0] for s in qnet.score([Score(s, (a,)) for s, a in pairs])), strict=True))
