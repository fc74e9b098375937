"""A model as Mistral publishes them: `params.json`, `tekken.json`, and consolidated weights.

vLLM reads config, tokenizer and weights of such a directory in ways of their own, and knows it by
the name of the weights.
"""

from __future__ import annotations

import base64
import json
import string
from pathlib import Path
from typing import Any, Final

SPECIAL: Final = 32

# As in vLLM's `MistralForCausalLM.mistral_mapping`, the other way round.
NAMES: Final = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "model.layers": "layers",
    "lm_head": "output",
    "self_attn": "attention",
    "q_proj": "wq",
    "k_proj": "wk",
    "v_proj": "wv",
    "o_proj": "wo",
    "mlp": "feed_forward",
    "gate_proj": "w1",
    "down_proj": "w2",
    "up_proj": "w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}


def convert(directory: Path) -> None:
    """Make a dense model of `models.make_model` one of Mistral's form, without a `config.json`.

    Its `tokenizer.json` stays, as on the hub: another tokenizer than `tekken.json`.
    """
    from safetensors.torch import load_file, save_file

    tensors = load_file(directory / "model.safetensors")
    path = directory / "consolidated.safetensors"
    save_file({_renamed(name): tensor for name, tensor in tensors.items()}, path)
    path.chmod(0o644)  # safetensors makes files that only their owner can read
    config = json.loads((directory / "config.json").read_text())
    (directory / "params.json").write_text(json.dumps(_params(config), indent=2))
    (directory / "tekken.json").write_text(json.dumps(_tekken(config["vocab_size"])))
    for name in ("model.safetensors", "config.json", "generation_config.json"):
        (directory / name).unlink(missing_ok=True)


def _renamed(name: str) -> str:
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    return name


def _params(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config in Mistral's words; the dtype is known from the weights alone."""
    return {
        "dim": config["hidden_size"],
        "n_layers": config["num_hidden_layers"],
        "head_dim": config["head_dim"],
        "hidden_dim": config["intermediate_size"],
        "n_heads": config["num_attention_heads"],
        "n_kv_heads": config["num_key_value_heads"],
        "norm_eps": config["rms_norm_eps"],
        "vocab_size": config["vocab_size"],
        "rope_theta": config["rope_theta"],
        "max_position_embeddings": config["max_position_embeddings"],
    }


def _tekken(vocabulary: int) -> dict[str, Any]:
    """Return a tokenizer of all bytes and some pairs of small letters, from "z" on."""
    letters = string.ascii_lowercase[::-1].encode()
    pieces = [bytes([byte]) for byte in range(256)]
    pieces += [bytes([a, b]) for a in letters for b in letters]
    known = vocabulary - SPECIAL
    return {
        "config": {
            "pattern": r"\p{L}+|\p{N}|\s|[^\s\p{L}\p{N}]+",
            "num_vocab_tokens": known,
            "default_vocab_size": vocabulary,
            "default_num_special_tokens": SPECIAL,
            "version": "v3",
        },
        "vocab": [
            {
                "rank": rank,
                "token_bytes": base64.b64encode(piece).decode(),
                "token_str": piece.decode() if piece.isascii() else None,
            }
            for rank, piece in enumerate(pieces[:known])
        ],
    }
