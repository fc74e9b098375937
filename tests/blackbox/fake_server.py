"""An instance: `fake_server.py PORT RULES` answers as `answers.py`, by a file's rules."""

from __future__ import annotations

import json
import sys
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from answers import Answers


def main() -> None:
    port, path = int(sys.argv[1]), Path(sys.argv[2])

    def rules() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    if status := rules().get("dies"):
        sys.exit(status)
    Answers.rules = staticmethod(rules)
    ThreadingHTTPServer.request_queue_size = 64
    ThreadingHTTPServer(("127.0.0.1", port), Answers).serve_forever()


if __name__ == "__main__":
    main()
