"""What a flag, a file or a mistake opens: LoRA, few bits, adapters, GGUF, other checkpoints,
servers, an input that is missing, --help."""
