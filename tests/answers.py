"""What a stub of vLLM answers over HTTP: health, names, completions, and how many requests it has.

Imports little, so that it starts at once.
"""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Callable
from typing import Any, ClassVar

NAME = "tiny"


class Answers(http.server.BaseHTTPRequestHandler):
    """Answers as the rules that hold by then say.

    `health` and `completion` are statuses; `names` those of models; `text` is each token's; `pause`
    the seconds between two of them; `load`, requests that are said to run besides those that do;
    `key`, what must come with each question about models; `looks`, a file that gets a line each
    time somebody asks for that.
    """

    protocol_version = "HTTP/1.1"
    rules: Callable[[], dict[str, Any]]
    running: ClassVar[int] = 0
    lock: ClassVar[threading.Lock] = threading.Lock()

    def do_GET(self) -> None:
        rules = type(self).rules()
        if self._lacks_key(rules):
            self._answer(401, "")
        elif self.path == "/health":
            self._answer(rules.get("health", 200), "")
        elif self.path == "/v1/models":
            names = rules.get("names", [NAME])
            self._answer(200, json.dumps({"data": [{"id": name} for name in names]}))
        elif self.path == "/metrics":
            load = Answers.running + rules.get("load", 0)
            if "looks" in rules:
                with open(rules["looks"], "a") as looks:
                    looks.write("looked\n")
            waiting = 'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 7.0\n'
            running = f'vllm:num_requests_running{{engine="0",model_name="{NAME}"}} {load:.1f}\n'
            zero = f'vllm:num_requests_waiting{{engine="0",model_name="{NAME}"}} 0.0\n'
            self._answer(200, running + zero + waiting)
        else:
            self._answer(404, "")

    def do_POST(self) -> None:
        rules = type(self).rules()
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with Answers.lock:
            Answers.running += 1
        try:
            self._complete(asked, rules)
        finally:
            with Answers.lock:
                Answers.running -= 1

    def _lacks_key(self, rules: dict[str, Any]) -> bool:
        wanted = f"Bearer {rules['key']}" if "key" in rules else None
        return self.path.startswith("/v1/") and wanted not in {None, self.headers["Authorization"]}

    def _complete(self, asked: dict[str, Any], rules: dict[str, Any]) -> None:
        text, tokens = rules.get("text", "word "), asked["max_tokens"]
        status = rules.get("completion", 200)
        if asked["model"] not in rules.get("names", [NAME]):
            status = 404
        if self._lacks_key(rules):
            status = 401
        if status != 200:
            self._answer(status, json.dumps({"error": {"message": "it is\n a stub"}}))
            return
        if not asked.get("stream"):
            time.sleep(rules.get("pause", 0) * tokens)
            self._answer(200, json.dumps({"choices": [choice(text * tokens)]}))
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for _ in range(tokens):
            time.sleep(rules.get("pause", 0))
            self._chunk(f"data: {json.dumps({'choices': [choice(text)]})}\n\n")
        self._chunk("data: [DONE]\n\n")
        self._chunk("")

    def _chunk(self, text: str) -> None:
        self.wfile.write(f"{len(text):x}\r\n{text}\r\n".encode())

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


def choice(text: str) -> dict[str, str]:
    return {"text": text, "finish_reason": "length"}
