"""QNet in the real vLLM of a CPU: an environment of its own, with this project's plug-in (requirements-vllm.txt)."""

import shutil

import pytest
import torch
from fakes import served, word_chat
from transformers import AutoModel, GemmaConfig, HeliumConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from qlass.batching import Score
from qlass.messages import State
from qlass.optional.served_qnet import ServedQNet
from qlass.optional.server import Server
from train_qnet import QNet

VLLM = shutil.which("vllm")
KINDS = [LlamaConfig, Qwen2Config, Qwen3Config, MistralConfig, GemmaConfig, HeliumConfig]  # the last by transformers
SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 2, "head_dim": 32, "initializer_range": 0.3, "pad_token_id": 0}


@pytest.mark.slow
@pytest.mark.skipif(not VLLM, reason="no vllm on the PATH")
@pytest.mark.parametrize("kind", KINDS)
def test_vllm_reads_a_qnets_folder_and_gives_its_values(tmp_path, monkeypatch, kind):
    torch.manual_seed(0)
    chat, state = word_chat(), State((("user", "walk"), ("assistant", "OK"), ("user", "you stand at start")), "")
    net = QNet(AutoModel.from_config(kind(vocab_size=len(chat.tokenizer), **SIZES)), chat, hidden=8).eval()
    net.save_pretrained(tmp_path)
    serve = [VLLM, "serve", str(tmp_path), "--hf-overrides", '{"architectures": ["QNet"]}']
    serve += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "512"]
    env = dict(VLLM_TARGET_DEVICE="cpu", VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # with "" vLLM believes in Triton
    with served(serve, tmp_path / "log", **env) as url:
        there = ServedQNet(Server(f"{url}/v1"), chat)
        asked = [Score(s, ("Action: left", "Action: right")) for s in (state, state.then("Action: left", "you"))]
        for mine, local in zip(there.score(asked), net.score(asked), strict=True):
            assert mine == pytest.approx(local, abs=1e-4)
