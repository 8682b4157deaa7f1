"""QNet in vLLM: a plug-in, which vLLM finds by its entry point (pyproject.toml) in the environment it is installed in.

    pip install --no-deps .        # in vLLM's environment; nothing else of this project is imported there
    vllm serve runs/llama/qnet --hf-overrides '{"architectures": ["QNet"]}' --port 8001
    python q_search.py --run runs/llama --qnet http://localhost:8001/v1#runs/llama/qnet

A prompt is answered by an embedding of one number: Q, the value at its last token. /v1/embeddings is the one way to ask
a pooling model that all servers and routers of OpenAI's protocol pass on.

The backbone is vLLM's own class of its architecture, or its transformers backend. The head is float32 at any --dtype.
"""

from collections.abc import Iterable

import torch
from safetensors.torch import load
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from vllm import ModelRegistry
from vllm.config import VllmConfig
from vllm.model_executor.layers.pooler import DispatchPooler
from vllm.model_executor.layers.pooler.seqwise import EmbeddingPoolerHead, LastPool, SequencePooler
from vllm.model_executor.models.adapters import as_embedding_model
from vllm.model_executor.models.utils import maybe_prefix
from vllm.transformers_utils.repo_utils import get_hf_file_bytes


def register() -> None:
    ModelRegistry.register_model("QNet", "integrations.vllm_qnet:QNet")


class QNet(nn.Module):
    """train_qnet.QNet's folder as vLLM reads it."""

    is_pooling_model = True

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config
        name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.hf_config.model_type]
        inner = vllm_config.with_hf_config(config.hf_config, architectures=[name])
        kind, _ = config.registry.resolve_model_cls([name], inner.model_config)
        backbone = as_embedding_model(kind)  # without the output layer
        self.backbone = backbone(vllm_config=inner, prefix=maybe_prefix(prefix, "backbone"))
        head = get_hf_file_bytes("head.safetensors", config.model, config.revision)
        weights = load(head)
        hidden, size = weights["0.weight"].shape
        layers = [nn.Linear(size, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1)]
        self.head = nn.Sequential(*layers).float()  # in bf16 siblings would tie
        self.head.load_state_dict(weights)
        value = EmbeddingPoolerHead(self.head, torch.float32)  # not divided by its length
        self.pooler = DispatchPooler({"embed": SequencePooler(LastPool(), value)})

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.backbone.embed_input_ids(input_ids)

    def forward(self, *inputs, **options) -> torch.Tensor:
        return self.backbone(*inputs, **options)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Those of the backbone: vLLM offers it those of all files, of the head too, whose names begin with a digit."""
        loaded = self.backbone.load_weights((name, tensor) for name, tensor in weights if not name[0].isdigit())
        return {f"backbone.{name}" for name in loaded} | {f"head.{name}" for name in self.head.state_dict()}
