"""Words as users spell them, and what they have in common: cases for vLLM's own parser."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from entrypoint.engine.executable import with_plugin

SECRET = "sk-0123-very-secret"  # noqa: S105 - a stand-in
SMALL = "--dtype bfloat16 --max-model-len 256"
PLAIN = f"{{dense}} {SMALL} -tp 2"
EXPERTS = f"{{moe}} {SMALL} -tp 2"

Case = tuple[Sequence[str], Mapping[str, str]]


def case(words: str, **environ: str) -> Case:
    """Return words as a shell cuts them; `{dense}` and the like stand for places of the `Room`."""
    return tuple(shlex.split(words)), environ


# The same engine, spelled differently; and the words that spell the model.
SPELLINGS: dict[str, tuple[Case, str]] = {
    **{
        size: (case(f"{{dense}} {SMALL} {size}"), "{dense}")
        for size in (
            *("-tp 2", "-tp=2", "--tensor-parallel-size 2", "--tensor-parallel-size=2"),
            *("--tensor_parallel_size 2", "--tensor_parallel_size=2", "-tp 1 -tp 2"),
            *("-tp 4 --tensor-parallel-size=2", "--tokenizer {dense} -tp 2"),
        )
    },
    "options before the model": (case(f"{SMALL} -tp 2 {{dense}}"), "{dense}"),
    "--model X": (case(f"--model {{dense}} {SMALL} -tp 2"), "--model {dense}"),
    "--model X last": (case(f"{SMALL} -tp 2 --model {{dense}}"), "--model {dense}"),
    "--model=X": (case(f"{SMALL} --model={{dense}} -tp 2"), "--model={dense}"),
    "--config": (case("{dense} --config {yaml}"), "{dense}"),
    "--config with the model": (case("--config {model_yaml}"), ""),
    "words over --config": (case("{dense} --config {tp4_yaml} -tp 2"), "{dense}"),
    "served name": (case(f"{PLAIN} --served-model-name a b"), "{dense}"),
    "served name =": (case(f"{PLAIN} --served-model-name=a"), "{dense}"),
    "served_name": (case(f"{PLAIN} --served_model_name a"), "{dense}"),
    "the model as served name": (case(f"{PLAIN} --served-model-name {{dense}}"), "{dense}"),
}

# What decides nothing about weights.
NGRAM = '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}'
NEUTRAL: dict[str, Case] = {
    "host and port": case(f"{PLAIN} --host 127.0.0.1 --port 1234"),
    "api key": case(f"{PLAIN} --api-key {SECRET} {SECRET}2"),
    "log options": case(f"{PLAIN} --disable-log-stats --uvicorn-log-level warning"),
    "log level": case(PLAIN, VLLM_LOGGING_LEVEL="ERROR"),
    "context": case("{dense} --dtype bfloat16 --max-model-len 128 -tp 2"),
    "batch": case(f"{PLAIN} --max-num-seqs 3 --seed 7"),
    "eager": case(f"{PLAIN} --enforce-eager"),
    "memory": case(PLAIN, VLLM_CPU_KVCACHE_SPACE="2"),
    "port of vLLM's own": case(PLAIN, VLLM_PORT="4567", VLLM_HOST_IP="127.0.0.1"),
    "ngram": case(f"{PLAIN} --speculative-config '{NGRAM}'"),
    "replicas of a dense model": case(f"{PLAIN} -dp 2"),
}

# What does, and in which fields of the key.
OVERRIDE = """--hf-overrides '{"rope_theta": 20000.0}'"""
ANOTHER: dict[str, tuple[Case, set[str]]] = {
    "tp": (case(f"{{dense}} {SMALL} -tp 1"), {"tp"}),
    "tp by default": (case(f"{{dense}} {SMALL}"), {"tp"}),
    "pp": (case(f"{PLAIN} -pp 2"), {"pp"}),
    "dtype": (case("{dense} -tp 2 --dtype float16"), {"dtype"}),
    "dtype float": (case("{dense} -tp 2 --dtype float32"), {"dtype"}),
    "overrides": (case(f"{PLAIN} {OVERRIDE}"), {"hf_overrides"}),
    "kernel": (case(PLAIN, VLLM_CPU_INT4_W4A8="1"), {"backends"}),
    "layers by stage": (case(f"{PLAIN} -pp 2", VLLM_PP_LAYER_PARTITION="1,3"), {"backends", "pp"}),
    "another architecture": (case(EXPERTS), {"architecture"}),
    "implementation": (case(f"{PLAIN} --model-impl transformers"), {"model_impl"}),
    "pooling": (case(f"{PLAIN} --runner pooling"), {"runner"}),
    # vLLM reads a config file only after a blank; whatever it does, we follow.
    "config that vLLM passes over": (case("{dense} --config={yaml}"), {"tp"}),
}
MOE: dict[str, tuple[Case, set[str]]] = {
    "ep": (case(f"{EXPERTS} --enable-expert-parallel"), {"ep"}),
    "dp": (case(f"{EXPERTS} -dp 2"), {"dp"}),
    "ep and dp": (case(f"{EXPERTS} -dp 2 --enable-expert-parallel"), {"ep", "dp"}),
    "placement": (
        case(f"{EXPERTS} --enable-expert-parallel --expert-placement-strategy round_robin"),
        {"ep", "expert_placement"},
    ),
}

# Two spellings of one JSON.
DRAFT = '{"model": "{draft}", "num_speculative_tokens": 2}'
TWINS: dict[str, tuple[Case, Case]] = {
    "overrides": (
        case(f"{PLAIN} {OVERRIDE}"),
        case(f"{PLAIN} --hf-overrides.rope_theta 20000.0"),
    ),
    "overrides =": (
        case(f"{PLAIN} {OVERRIDE}"),
        case(f"""{PLAIN} '--hf_overrides={{ "rope_theta" :20000.0}}'"""),
    ),
    "draft": (
        case(f"{PLAIN} --speculative-config '{DRAFT}'"),
        case(
            f"{PLAIN} --speculative-config.model {{draft}}"
            " --speculative-config.num_speculative_tokens 2"
        ),
    ),
}

REJECTED: dict[str, Case] = {
    "unknown option": case(f"{PLAIN} --api-keyy={SECRET}"),
    "unknown option with a value": case(f"{PLAIN} --no-such-option {SECRET}"),
    "dtype": case("{dense} --dtype bfloat17"),
    "number": case("{dense} -tp two"),
    "heads": case(f"{{dense}} {SMALL} -tp 3"),
    "no such model": case(f"/none/such/model {SMALL}"),
    "no such config": case("{dense} --config /none/such.yaml"),
    "broken json": case(f"{PLAIN} --hf-overrides '{{'"),
    "zero": case(f"{{dense}} {SMALL} -tp 0"),
}
LOADERS: dict[str, Case] = {
    "auto": case(PLAIN),
    "safetensors": case(f"{PLAIN} --load-format safetensors"),
    "dummy": case(f"{PLAIN} --load-format dummy"),
    "place": case(f"{PLAIN} --download-dir /elsewhere"),
    "extra": case(f"{PLAIN} --model-loader-extra-config '{{\"enable_multithread_load\": true}}'"),
}
REPLICAS = "-dp 2 --data-parallel-size-local 2 --data-parallel-multi-port-external-lb"
SERVERS: dict[str, tuple[Case, dict[str, Any]]] = {
    "defaults": (case(PLAIN), {}),
    "words": (case(f"{PLAIN} --host ::1 --port=1234"), {"host": "::1", "port": 1234}),
    "last word": (case(f"{PLAIN} --port 1 --port 2"), {"port": 2}),
    "cut short": (case(f"{PLAIN} --por 1234"), {"port": 1234}),
    "_ for -": (
        case(f"{PLAIN} --ssl_certfile /c --ssl_keyfile=/k"),
        {"certfile": "/c", "keyfile": "/k"},
    ),
    "socket": (case(f"{PLAIN} --uds /run/v.sock"), {"uds": "/run/v.sock"}),
    "file": (case("{dense} --config {server_yaml}"), {"port": 1234, "mutual": True}),
    "words over a file": (
        case("{dense} --config {server_yaml} --port 2 --ssl-cert-reqs 0"),
        {"port": 2},
    ),
    "no HTTP": (case(f"{PLAIN} --headless"), {"headless": True}),
    "no HTTP servers": (case(f"{PLAIN} --api-server-count 0"), {"headless": True}),
    "another node's rank": (
        case(f"{{dense}} {SMALL} -tp 2 --nnodes 2 --node-rank 1 --headless"),
        {"headless": True},
    ),
    "one port a replica": (case(f"{PLAIN} {REPLICAS} --port 2000"), {"port": 9256}),
}
PLUGINS: dict[str, Case] = {
    "unset": case(PLAIN),
    "theirs only": case(PLAIN, VLLM_PLUGINS="other"),
    "ours added": case(PLAIN, **with_plugin({"VLLM_PLUGINS": "other"})),
    "none": case(PLAIN, VLLM_PLUGINS=""),
}


def all_cases() -> list[Case]:
    return [
        *(spelled for spelled, _ in (*SPELLINGS.values(), *ANOTHER.values(), *MOE.values())),
        *(twin for twins in TWINS.values() for twin in twins),
        *(asked for asked, _ in SERVERS.values()),
        *(*NEUTRAL.values(), *REJECTED.values(), *LOADERS.values(), *PLUGINS.values()),
        case(EXPERTS),
    ]
