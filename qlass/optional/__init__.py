"""What a flag or a file opens: LoRA, few bits, adapters, GGUF, other checkpoints, servers."""
