"""Which vLLM this is, where its packages are, and what may change how it reads words.

Loaded by path from `resolve.py`: standard library and vLLM only. Everything here is plain JSON.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import sys
from pathlib import Path
from typing import Any

# Options that decide nothing about weights, by argparse dest. A name that a vLLM does not have is
# passed over; an option not listed here counts.
IGNORABLE = frozenset(
    """
    host port uds api_key served_model_name root_path middleware
    uvicorn_log_level disable_uvicorn_access_log disable_access_log_for_endpoints
    allow_credentials allowed_origins allowed_methods allowed_headers
    ssl_keyfile ssl_certfile ssl_ca_certs enable_ssl_refresh ssl_cert_reqs ssl_ciphers
    enable_request_id_headers disable_fastapi_docs enable_offline_docs
    h11_max_incomplete_event_size h11_max_header_count
    disable_log_stats disable_log_requests enable_log_requests enable_log_outputs
    enable_log_deltas log_error_stack max_log_len aggregate_engine_logging
    enable_server_load_tracking enable_force_include_usage enable_prompt_tokens_details
    enable_per_request_metrics sse_keep_alive_interval fingerprint_mode fingerprint_value
    """.split()  # noqa: SIM905 - a paragraph of names reads better
)

CREDENTIALS_AND_ADDRESSES = frozenset(
    "HOST IP PORT ADDR ADDRESS KEY TOKEN SECRET PASSWORD CREDENTIAL CREDENTIALS".split()  # noqa: SIM905
)

# Where a model comes from, or how it is read: vLLM ignores these for its compile cache only.
ALWAYS = ("VLLM_MODEL_REDIRECT_PATH", "VLLM_TEST_FORCE_LOAD_FORMAT", "VLLM_USE_MODELSCOPE")


def engine(parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Say which vLLM this is, where its packages are, and what it reads from the environment."""
    import torch
    from vllm import envs

    listed = set(envs.environment_variables)
    hashed = set(envs.compile_factors()) if hasattr(envs, "compile_factors") else listed
    names = {n for n in listed & hashed if not CREDENTIALS_AND_ADDRESSES & set(n.split("_"))}
    return {
        "vllm": importlib.metadata.version("vllm"),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "site_dirs": [entry for entry in sys.path if _holds_distributions(Path(entry))],
        "env_names": sorted(names | set(ALWAYS)),
        "plugin": _plugin(),
        "ignorable": {
            option: _arity(action)
            for action in parser._actions
            if action.dest in IGNORABLE
            for option in action.option_strings
        },
    }


def _holds_distributions(directory: Path) -> bool:
    if directory.name in ("site-packages", "dist-packages"):
        return True
    return directory.is_dir() and any(directory.glob("*.dist-info"))


def _arity(action: argparse.Action) -> int | str:
    return 1 if action.nargs is None else action.nargs


def _plugin() -> str | None:
    from vllm.model_executor import model_loader

    if "shardboot" not in model_loader._LOAD_FORMAT_TO_MODEL_LOADER:
        return None
    try:
        return importlib.metadata.version("shardboot")
    except importlib.metadata.PackageNotFoundError:
        return None
