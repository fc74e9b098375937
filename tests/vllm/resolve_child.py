"""Many answers of `resolve.py` from one import of vLLM: JSON lists of words in, answers out.

python -P resolve_child.py RESULT < [["MODEL"], ["--model", "MODEL"]]
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

RESOLVE = Path(__file__).parents[2] / "entrypoint" / "vllm_plugin" / "resolve.py"


def main() -> None:
    result = Path(sys.argv[1])  # resolve.py puts vLLM's own words there
    spec = importlib.util.spec_from_file_location("resolve", RESOLVE)
    assert spec is not None
    assert spec.loader is not None
    resolve = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(resolve)
    answers = [resolve.answer(words) for words in json.load(sys.stdin)]
    result.write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
