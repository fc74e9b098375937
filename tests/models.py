"""Tiny models that real vLLM serves, made from a seed in seconds, with nothing downloaded.

    python tests/models.py KIND DIRECTORY [--hidden 256] [--layers 4] [--seed 0]

Their greedy tokens vary over every prompt (`ignore_eos`), so that a wrong weight shows. Compare
them at one TP, one request at a time: top logits are sometimes equal in bf16. Every dimension
divides by two, so TP=2 works. Importing this module imports nothing heavy.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import string
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import mistral
from architectures import ARCHITECTURES, EXPERTS, VOCABULARY, mlp
from fp8 import FP8, quantization
from quantizers import GROUP, QUANTIZERS

if TYPE_CHECKING:
    import torch

LLAMAS: Final = ("dense", "tied", "bias", "moe", "custom")
QUANTIZED: Final = ("int8", "int8-static", "awq", "gptq", "wna16", *FP8)
KINDS: Final = (*LLAMAS, *QUANTIZED, *ARCHITECTURES, "mistral")
"""`custom` is a Llama whose code comes with it (`--trust-remote-code`); `bert` pools; `vision`
takes images; `mistral` is a Llama, too, in files of Mistral's own form."""

BOS, EOS, PAD = "<|begin|>", "<|end|>", "<|pad|>"
# Weights have a standard deviation of GAIN / sqrt(inputs). Default inits (0.02) give one token over
# and over: nearly every wrong weight would pass. Above 3, rounding alone changes a dense
# model's tokens between TP=1 and TP=2 (routing and int8 activations make it so at any gain).
GAIN: Final = 2.0
BYTES_PER_FILE: Final = 1 << 30

CHAT_TEMPLATE: Final = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


CUSTOM_CODE: Final = {
    "configuration_tiny.py": """\
from transformers import LlamaConfig


class TinyConfig(LlamaConfig):
    model_type = "tiny_custom"
""",
    "modeling_tiny.py": """\
from transformers import LlamaForCausalLM, LlamaModel

from .configuration_tiny import TinyConfig


class TinyModel(LlamaModel):
    config_class = TinyConfig


class TinyForCausalLM(LlamaForCausalLM):
    config_class = TinyConfig
""",
}


def make_model(
    kind: str, directory: Path, *, seed: int = 0, hidden: int = 256, layers: int = 4
) -> None:
    """Write a complete Hugging Face model directory; equal arguments give equal bytes.

    `hidden` is a multiple of 256. A dense model has about 9 * layers * hidden ** 2 parameters of
    two bytes each; `hidden=3072, layers=18` is 3 GB. Files hold about 1 GiB at most, as on the hub.
    """
    if kind == "mistral":
        make_model("dense", directory, seed=seed, hidden=hidden, layers=layers)
        mistral.convert(directory)
        return
    config = _config(kind, hidden, layers)
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", config)
    _write_weights(directory, _tensors(kind, config, seed))
    architecture = ARCHITECTURES.get(kind)
    _write_tokenizer(directory, architecture.tokens if architecture else ())
    for name, value in (architecture.files if architecture else {}).items():
        _write_json(directory / name, value)
    if kind == "custom":
        for name, code in CUSTOM_CODE.items():
            (directory / name).write_text(code)
    # top_k 1: a checkpoint that lost this file samples at random, and shows.
    sampling = {"bos_token_id": 0, "eos_token_id": 1, "do_sample": True, "top_k": 1}
    _write_json(directory / "generation_config.json", sampling)


def fine_tune(src: Path, dst: Path) -> None:
    """Copy a model and reverse one row of a matrix: same names, shapes and sizes, other values."""
    shutil.copytree(src, dst)
    for path in sorted(dst.glob("*.safetensors")):
        with path.open("r+b") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
            name = next((n for n in sorted(header) if ".0.self_attn.o_proj." in n), None)
            if name is None:
                continue
            tensor = header[name]
            start, end = tensor["data_offsets"]
            row = (end - start) // tensor["shape"][0]
            width = row // tensor["shape"][1]
            file.seek(8 + length + start)
            values = file.read(row)
            file.seek(8 + length + start)
            file.write(b"".join(values[i : i + width] for i in range(row - width, -1, -width)))
            return
    raise ValueError(f"{src}: no attention output matrix to change")


def _config(kind: str, hidden: int, layers: int) -> dict[str, Any]:
    if kind not in KINDS:
        raise ValueError(f"{kind}: not one of {', '.join(KINDS)}")
    if kind in ARCHITECTURES:
        return ARCHITECTURES[kind].config(hidden, layers)
    heads = max(8, hidden // 128)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": hidden // heads,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": kind == "tied",
        "vocab_size": VOCABULARY,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "dtype": "bfloat16",
    }
    if kind == "bias":
        config |= {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    elif kind == "moe":
        config |= {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": hidden // 2,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    elif kind == "custom":
        config |= {
            "architectures": ["TinyForCausalLM"],
            "model_type": "tiny_custom",
            "auto_map": {
                "AutoConfig": "configuration_tiny.TinyConfig",
                "AutoModel": "modeling_tiny.TinyModel",
                "AutoModelForCausalLM": "modeling_tiny.TinyForCausalLM",
            },
        }
    if kind in QUANTIZED:
        config["quantization_config"] = _quantization(kind)
    return config


def _quantization(kind: str) -> dict[str, Any]:
    if kind in FP8:
        return quantization(kind)
    if kind == "awq":
        four_bits = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": GROUP}
        return four_bits | {"zero_point": True}
    if kind == "gptq":
        four_bits = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}
        return four_bits | {"desc_act": False, "sym": True, "lm_head": False}
    integers = {"type": "int", "symmetric": True}
    scheme: dict[str, Any] = {"targets": ["Linear"]}
    if kind == "wna16":
        groups = {"num_bits": 4, "strategy": "group", "group_size": GROUP, "dynamic": False}
        scheme["weights"] = integers | groups
    else:
        eight_bits = integers | {"num_bits": 8}
        inputs = "tensor" if kind == "int8-static" else "token"
        scheme["weights"] = eight_bits | {"strategy": "channel", "dynamic": False}
        scheme["input_activations"] = eight_bits | {
            "strategy": inputs,
            "dynamic": inputs == "token",
        }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if kind == "wna16" else "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": scheme},
    }


def _shapes(kind: str, config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and shape of every tensor before quantization, as files on the hub do."""
    if kind in ARCHITECTURES:
        yield from ARCHITECTURES[kind].shapes(config)
        return
    hidden, head = config["hidden_size"], config["head_dim"]
    queries = config["num_attention_heads"] * head
    keys = config["num_key_value_heads"] * head
    yield "model.embed_tokens.weight", (VOCABULARY, hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        for letter, size in (("q", queries), ("k", keys), ("v", keys)):
            yield f"{prefix}.self_attn.{letter}_proj.weight", (size, hidden)
            if kind == "bias":
                yield f"{prefix}.self_attn.{letter}_proj.bias", (size,)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, queries)
        if kind == "moe":
            yield f"{prefix}.self_attn.q_norm.weight", (head,)
            yield f"{prefix}.self_attn.k_norm.weight", (head,)
            yield f"{prefix}.mlp.gate.weight", (EXPERTS, hidden)
            for expert in range(EXPERTS):
                wide = config["moe_intermediate_size"]
                yield from mlp(f"{prefix}.mlp.experts.{expert}", hidden, wide)
        else:
            yield from mlp(f"{prefix}.mlp", hidden, config["intermediate_size"])
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (VOCABULARY, hidden)


def _tensors(kind: str, config: dict[str, Any], seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of the model's files; one tensor is in memory at a time."""
    import torch

    quantize = QUANTIZERS.get(kind)
    for name, shape in _shapes(kind, config):
        # A generator a tensor, so that a value depends on its name and not on its neighbours.
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        values = torch.empty(shape, dtype=torch.bfloat16).normal_(generator=generator)
        if len(shape) == 1 and name.endswith((".weight", ".D")):
            yield name, 1 + values.mul_(0.2)
        elif len(shape) == 1:
            yield name, values
        elif quantize is not None and "_proj." in name:
            yield from quantize(name.removesuffix(".weight"), _scaled(values).float()).items()
        elif kind == "gemma3" and "embed_tokens" in name:
            # Gemma multiplies by the root; left so large, a tied token would only ask for itself.
            yield name, _scaled(values) / math.sqrt(values.shape[1])
        else:
            yield name, _scaled(values)


def _scaled(values: torch.Tensor) -> torch.Tensor:
    # A kernel over patches of an image sums over all but its outputs.
    inputs = math.prod(values.shape[1:] if values.dim() == 4 else values.shape[-1:])
    return values.mul_(GAIN / math.sqrt(inputs))


def _write_weights(directory: Path, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Write `model.safetensors`, or numbered files and their index where one is too large."""
    from safetensors.torch import save_file

    files: list[tuple[Path, list[str]]] = []
    total = 0

    def flush(batch: dict[str, torch.Tensor]) -> None:
        path = directory / f"part-{len(files)}.tmp"
        save_file(batch, path, metadata={"format": "pt"})
        path.chmod(0o644)  # safetensors makes files that only their owner can read
        files.append((path, list(batch)))

    batch: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if batch and size + tensor.nbytes > BYTES_PER_FILE:
            flush(batch)
            batch, size = {}, 0
        batch[name] = tensor.contiguous()
        size += tensor.nbytes
        total += tensor.nbytes
    flush(batch)

    if len(files) == 1:
        files[0][0].rename(directory / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number, (path, names) in enumerate(files, start=1):
        final = f"model-{number:05}-of-{len(files):05}.safetensors"
        path.rename(directory / final)
        weight_map |= dict.fromkeys(names, final)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(directory / "model.safetensors.index.json", index)


def _write_tokenizer(directory: Path, more: tuple[str, ...]) -> None:
    """Write a byte-level BPE: special tokens, 256 bytes, and pairs of small letters."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = [BOS, EOS, PAD, *more]
    tokens = [*special, *alphabet]
    pairs = [(a, b) for a in string.ascii_lowercase for b in string.ascii_lowercase]
    merges = pairs[: VOCABULARY - len(tokens)]
    tokens += [a + b for a, b in merges]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.save(str(directory / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
    }
    _write_json(directory / "tokenizer_config.json", tokenizer_config)
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a tiny model that vLLM serves.")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    given = parser.parse_args()
    make_model(
        given.kind, given.directory, seed=given.seed, hidden=given.hidden, layers=given.layers
    )
    print(given.directory)


if __name__ == "__main__":
    main()
