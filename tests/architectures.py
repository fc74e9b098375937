"""Tiny models that are no Llama: their configs, and the names and shapes of their files.

The values come from `models`. Names are those of files on the hub, before vLLM fuses anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

VOCABULARY: Final = 512
EXPERTS: Final = 8

Shapes = Iterator[tuple[str, tuple[int, ...]]]


class Architecture(NamedTuple):
    """What makes a model of this kind: its config, from hidden size and layers, and its tensors.

    `tokens` are the special ones of its own, after those of every model; `files` are JSON, by name.
    """

    config: Callable[[int, int], dict[str, Any]]
    shapes: Callable[[dict[str, Any]], Shapes]
    tokens: tuple[str, ...] = ()
    files: Mapping[str, Any] = MappingProxyType({})


def mlp(prefix: str, hidden: int, wide: int) -> Shapes:
    yield f"{prefix}.gate_proj.weight", (wide, hidden)
    yield f"{prefix}.up_proj.weight", (wide, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, wide)


def _common(name: str, model_type: str, hidden: int, layers: int) -> dict[str, Any]:
    return {
        "architectures": [name],
        "model_type": model_type,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "vocab_size": VOCABULARY,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "dtype": "bfloat16",
    }


def _mla_config(hidden: int, layers: int) -> dict[str, Any]:
    return _common("DeepseekV2ForCausalLM", "deepseek_v2", hidden, layers) | {
        "hidden_act": "silu",
        "intermediate_size": 2 * hidden,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "q_lora_rank": hidden // 2,
        # The CPU's attention takes the real model's 512 + 64 only.
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": hidden // 2,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
    }


def _mla_shapes(config: dict[str, Any]) -> Shapes:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    rope, nope, value = (
        config[name] for name in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    )
    queries, keys = config["q_lora_rank"], config["kv_lora_rank"]
    wide = config["moe_intermediate_size"]
    yield "model.embed_tokens.weight", (VOCABULARY, hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        yield f"{prefix}.self_attn.q_a_proj.weight", (queries, hidden)
        yield f"{prefix}.self_attn.q_a_layernorm.weight", (queries,)
        yield f"{prefix}.self_attn.q_b_proj.weight", (heads * (nope + rope), queries)
        yield f"{prefix}.self_attn.kv_a_proj_with_mqa.weight", (keys + rope, hidden)
        yield f"{prefix}.self_attn.kv_a_layernorm.weight", (keys,)
        yield f"{prefix}.self_attn.kv_b_proj.weight", (heads * (nope + value), keys)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, heads * value)
        if layer < config["first_k_dense_replace"]:
            yield from mlp(f"{prefix}.mlp", hidden, config["intermediate_size"])
            continue
        yield f"{prefix}.mlp.gate.weight", (EXPERTS, hidden)
        yield from mlp(f"{prefix}.mlp.shared_experts", hidden, config["n_shared_experts"] * wide)
        for expert in range(EXPERTS):
            yield from mlp(f"{prefix}.mlp.experts.{expert}", hidden, wide)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (VOCABULARY, hidden)


def _gemma3_config(hidden: int, layers: int) -> dict[str, Any]:
    return _common("Gemma3ForCausalLM", "gemma3_text", hidden, layers) | {
        "hidden_activation": "gelu_pytorch_tanh",
        "intermediate_size": 2 * hidden,
        "num_key_value_heads": 4,
        "head_dim": hidden // 8,
        "query_pre_attn_scalar": hidden // 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "sliding_window": 64,
        "layer_types": ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)],
        "tie_word_embeddings": True,
    }


def _gemma3_shapes(config: dict[str, Any]) -> Shapes:
    hidden, head = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    yield "model.embed_tokens.weight", (VOCABULARY, hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for place in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            yield f"{prefix}.{place}_layernorm.weight", (hidden,)
        for letter, size in (("q", queries), ("k", keys), ("v", keys)):
            yield f"{prefix}.self_attn.{letter}_proj.weight", (size, hidden)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, queries)
        yield f"{prefix}.self_attn.q_norm.weight", (head,)
        yield f"{prefix}.self_attn.k_norm.weight", (head,)
        yield from mlp(f"{prefix}.mlp", hidden, config["intermediate_size"])
    yield "model.norm.weight", (hidden,)


def _mamba2_config(hidden: int, layers: int) -> dict[str, Any]:
    return _common("Mamba2ForCausalLM", "mamba2", hidden, layers) | {
        "hidden_act": "silu",
        "num_heads": hidden // 16,
        "head_dim": 32,
        "state_size": 64,
        "n_groups": 2,
        "expand": 2,
        "conv_kernel": 4,
        "chunk_size": 64,
        "use_bias": False,
        "use_conv_bias": True,
        "layer_norm_epsilon": 1e-5,
        "rms_norm": True,
        "residual_in_fp32": False,
    }


def _mamba2_shapes(config: dict[str, Any]) -> Shapes:
    hidden = config["hidden_size"]
    yield "backbone.embeddings.weight", (VOCABULARY, hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"backbone.layers.{layer}"
        yield f"{prefix}.norm.weight", (hidden,)
        yield from _mixer(
            f"{prefix}.mixer",
            hidden,
            heads=config["num_heads"],
            head=config["head_dim"],
            groups=config["n_groups"],
            state=config["state_size"],
        )
    yield "backbone.norm_f.weight", (hidden,)
    yield "lm_head.weight", (VOCABULARY, hidden)


def _mixer(prefix: str, hidden: int, *, heads: int, head: int, groups: int, state: int) -> Shapes:
    inner = heads * head
    convolved = inner + 2 * groups * state
    yield f"{prefix}.in_proj.weight", (inner + convolved + heads, hidden)
    yield f"{prefix}.conv1d.weight", (convolved, 1, 4)
    yield f"{prefix}.conv1d.bias", (convolved,)
    yield f"{prefix}.dt_bias", (heads,)
    yield f"{prefix}.A_log", (heads,)
    yield f"{prefix}.D", (heads,)
    yield f"{prefix}.norm.weight", (inner,)
    yield f"{prefix}.out_proj.weight", (hidden, inner)


def _hybrid_config(hidden: int, layers: int) -> dict[str, Any]:
    return _common("GraniteMoeHybridForCausalLM", "granitemoehybrid", hidden, layers) | {
        "hidden_act": "silu",
        "intermediate_size": hidden // 2,
        "shared_intermediate_size": hidden,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "position_embedding_type": "rope",
        "attention_multiplier": (hidden // 8) ** -0.5,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "layer_types": ["attention" if i % 2 else "mamba" for i in range(layers)],
        "mamba_n_heads": hidden // 16,
        "mamba_d_head": 32,
        "mamba_n_groups": 2,
        "mamba_d_state": 64,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_chunk_size": 64,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
    }


def _hybrid_shapes(config: dict[str, Any]) -> Shapes:
    hidden = config["hidden_size"]
    wide, shared = config["intermediate_size"], config["shared_intermediate_size"]
    yield "model.embed_tokens.weight", (VOCABULARY, hidden)
    for layer, kind in enumerate(config["layer_types"]):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        if kind == "mamba":
            yield from _mixer(
                f"{prefix}.mamba",
                hidden,
                heads=config["mamba_n_heads"],
                head=config["mamba_d_head"],
                groups=config["mamba_n_groups"],
                state=config["mamba_d_state"],
            )
        else:
            for letter, size in (("q", hidden), ("k", hidden // 2), ("v", hidden // 2)):
                yield f"{prefix}.self_attn.{letter}_proj.weight", (size, hidden)
            yield f"{prefix}.self_attn.o_proj.weight", (hidden, hidden)
        yield f"{prefix}.block_sparse_moe.input_linear.weight", (EXPERTS, 2 * wide, hidden)
        yield f"{prefix}.block_sparse_moe.output_linear.weight", (EXPERTS, hidden, wide)
        yield f"{prefix}.block_sparse_moe.router.layer.weight", (EXPERTS, hidden)
        yield f"{prefix}.shared_mlp.input_linear.weight", (2 * shared, hidden)
        yield f"{prefix}.shared_mlp.output_linear.weight", (hidden, shared)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (VOCABULARY, hidden)


def _bert_config(hidden: int, layers: int) -> dict[str, Any]:
    return _common("BertModel", "bert", hidden, layers) | {
        "hidden_act": "gelu",
        "intermediate_size": 2 * hidden,
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": 512,
        "position_embedding_type": "absolute",
        "type_vocab_size": 2,
    }


def _bert_shapes(config: dict[str, Any]) -> Shapes:
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    yield "embeddings.word_embeddings.weight", (VOCABULARY, hidden)
    yield "embeddings.position_embeddings.weight", (config["max_position_embeddings"], hidden)
    yield "embeddings.token_type_embeddings.weight", (config["type_vocab_size"], hidden)
    yield from _with_bias("embeddings.LayerNorm", (hidden,))
    for layer in range(config["num_hidden_layers"]):
        prefix = f"encoder.layer.{layer}"
        for part in ("query", "key", "value"):
            yield from _with_bias(f"{prefix}.attention.self.{part}", (hidden, hidden))
        yield from _with_bias(f"{prefix}.attention.output.dense", (hidden, hidden))
        yield from _with_bias(f"{prefix}.attention.output.LayerNorm", (hidden,))
        yield from _with_bias(f"{prefix}.intermediate.dense", (wide, hidden))
        yield from _with_bias(f"{prefix}.output.dense", (hidden, wide))
        yield from _with_bias(f"{prefix}.output.LayerNorm", (hidden,))


def _with_bias(prefix: str, shape: tuple[int, ...]) -> Shapes:
    yield f"{prefix}.weight", shape
    yield f"{prefix}.bias", shape[:1]


IMAGE_TOKENS: Final = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
IMAGE_PIXELS: Final = 56
PATCH_PIXELS: Final = 14
SHUFFLE: Final = 2
"""So many patches, across and down, become one token."""


def _vision_config(hidden: int, layers: int) -> dict[str, Any]:
    text = _common("LlamaForCausalLM", "llama", hidden, layers) | {
        "hidden_act": "silu",
        "intermediate_size": 2 * hidden,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
    }
    vision = {
        "model_type": "idefics3_vision",
        "hidden_size": hidden // 2,
        "intermediate_size": hidden,
        "num_attention_heads": 4,
        "num_hidden_layers": layers,
        "image_size": IMAGE_PIXELS,
        "patch_size": PATCH_PIXELS,
    }
    return {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "model_type": "idefics3",
        "text_config": text,
        "vision_config": vision,
        "scale_factor": SHUFFLE,
        "image_token_id": 3,
        "pad_token_id": 2,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def _vision_shapes(config: dict[str, Any]) -> Shapes:
    text, vision = config["text_config"], config["vision_config"]
    yield from _tower_shapes("model.vision_model", vision)
    hidden, seen = text["hidden_size"], vision["hidden_size"] * SHUFFLE**2
    yield "model.connector.modality_projection.proj.weight", (hidden, seen)
    yield "model.text_model.embed_tokens.weight", (VOCABULARY, hidden)
    for layer in range(text["num_hidden_layers"]):
        prefix = f"model.text_model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        for letter, size in (("q", hidden), ("k", hidden // 2), ("v", hidden // 2)):
            yield f"{prefix}.self_attn.{letter}_proj.weight", (size, hidden)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, hidden)
        yield from mlp(f"{prefix}.mlp", hidden, text["intermediate_size"])
    yield "model.text_model.norm.weight", (hidden,)
    yield "lm_head.weight", (VOCABULARY, hidden)


def _tower_shapes(prefix: str, config: dict[str, Any]) -> Shapes:
    hidden, wide, patch = (
        config[name] for name in ("hidden_size", "intermediate_size", "patch_size")
    )
    yield from _with_bias(f"{prefix}.embeddings.patch_embedding", (hidden, 3, patch, patch))
    patches = (config["image_size"] // patch) ** 2
    yield f"{prefix}.embeddings.position_embedding.weight", (patches, hidden)
    for layer in range(config["num_hidden_layers"]):
        inner = f"{prefix}.encoder.layers.{layer}"
        for letter in ("q", "k", "v", "out"):
            yield from _with_bias(f"{inner}.self_attn.{letter}_proj", (hidden, hidden))
        yield from _with_bias(f"{inner}.layer_norm1", (hidden,))
        yield from _with_bias(f"{inner}.mlp.fc1", (wide, hidden))
        yield from _with_bias(f"{inner}.mlp.fc2", (hidden, wide))
        yield from _with_bias(f"{inner}.layer_norm2", (hidden,))
    yield from _with_bias(f"{prefix}.post_layernorm", (hidden,))


_VISION_FILES: Final = MappingProxyType(
    {
        "preprocessor_config.json": {
            "image_processor_type": "Idefics3ImageProcessor",
            "size": {"longest_edge": IMAGE_PIXELS},
            "max_image_size": {"longest_edge": IMAGE_PIXELS},
        },
        "processor_config.json": {
            "processor_class": "Idefics3Processor",
            "image_seq_len": (IMAGE_PIXELS // PATCH_PIXELS // SHUFFLE) ** 2,
        },
    }
)


ARCHITECTURES: Final = {
    "mla": Architecture(_mla_config, _mla_shapes),
    "gemma3": Architecture(_gemma3_config, _gemma3_shapes),
    "mamba2": Architecture(_mamba2_config, _mamba2_shapes),
    "hybrid": Architecture(_hybrid_config, _hybrid_shapes),
    "bert": Architecture(_bert_config, _bert_shapes),
    "vision": Architecture(_vision_config, _vision_shapes, IMAGE_TOKENS, _VISION_FILES),
}
