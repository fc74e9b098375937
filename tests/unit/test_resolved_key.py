from __future__ import annotations

from types import SimpleNamespace

from entrypoint.vllm_plugin import resolved_key


def test_a_layer_that_normalizes_on_the_device_makes_another_model() -> None:
    found = [
        resolved_key._multimodal(SimpleNamespace(mm_device_do_normalize=does))
        for does in (True, False)
    ]
    assert found[0] != found[1]
    # Of a vLLM that has no such layer.
    assert resolved_key._multimodal(SimpleNamespace()) == found[1]
