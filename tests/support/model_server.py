"""A loopback model that answers from a script in each wire, and keeps what it was asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Reply:
    """One scripted answer; `status` other than 200 makes it an API error with `text` as message."""

    text: str = ""
    thinking: str = ""
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    cut: bool = False
    status: int = 200


@dataclass(kw_only=True)
class ModelServer:
    """`script` is answered in order, the last entry again and again."""

    base_url: str
    script: list[Reply]
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)


@contextmanager
def serve(*script: Reply) -> Iterator[ModelServer]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self._send(404, b"", "text/plain")

        do_GET = do_HEAD

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            turn = len(server.requests)
            server.requests.append(body)
            server.headers.append({key.lower(): value for key, value in self.headers.items()})
            reply = script[min(turn, len(script) - 1)]
            if reply.status != 200:
                error = {"type": "error", "error": {"type": "invalid_request_error", "message": reply.text}}
                if "too long" in reply.text and not self.path.startswith("/v1/messages"):
                    error["error"]["code"] = "context_length_exceeded"
                self._send(reply.status, json.dumps(error).encode(), "application/json")
                return
            if self.path.startswith("/v1/messages"):
                events = _anthropic(reply, turn)
            elif self.path.startswith("/v1/responses"):
                events = _responses(reply, turn)
            elif not body.get("stream"):
                self._send(200, json.dumps(_chat_whole(reply, turn)).encode(), "application/json")
                return
            else:
                events = _chat(reply, turn)
            self._send(200, "".join(events).encode(), "text/event-stream")

        def _send(self, status: int, body: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        server = ModelServer(base_url=f"http://127.0.0.1:{http.server_port}", script=list(script))
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            http.shutdown()
            thread.join()


def _chat(reply: Reply, turn: int) -> Iterator[str]:
    def chunk(choices: list[dict[str, Any]], **more: Any) -> str:
        body = {"id": f"chatcmpl-{turn}", "object": "chat.completion.chunk", "created": 1, "model": "policy"}
        return f"data: {json.dumps({**body, 'choices': choices, **more})}\n\n"

    def delta(value: dict[str, Any], finish: str | None = None) -> str:
        return chunk([{"index": 0, "delta": value, "finish_reason": finish}])

    if reply.thinking:
        yield delta({"role": "assistant", "reasoning_content": reply.thinking})
    yield delta({"role": "assistant", "content": reply.text or None})
    for index, (name, arguments) in enumerate(reply.calls):
        function = {"name": name, "arguments": json.dumps(arguments)}
        call = {"index": index, "id": f"call_{turn}_{index}", "type": "function", "function": function}
        yield delta({"tool_calls": [call]})
    yield delta({}, "length" if reply.cut else "tool_calls" if reply.calls else "stop")
    yield chunk([], usage={"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110})
    yield "data: [DONE]\n\n"


def _chat_whole(reply: Reply, turn: int) -> dict[str, Any]:
    calls = [
        {"id": f"call_{turn}_{index}", "type": "function", "function": {"name": name, "arguments": json.dumps(given)}}
        for index, (name, given) in enumerate(reply.calls)
    ]
    message: dict[str, Any] = {"role": "assistant", "content": reply.text or None}
    if reply.thinking:
        message["reasoning_content"] = reply.thinking
    if calls:
        message["tool_calls"] = calls
    finish = "length" if reply.cut else "tool_calls" if calls else "stop"
    return {
        "id": f"chatcmpl-{turn}",
        "object": "chat.completion",
        "created": 1,
        "model": "policy",
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
        "usage": {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110},
    }


def _responses(reply: Reply, turn: int) -> Iterator[str]:
    def event(kind: str, **fields: Any) -> str:
        return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n"

    output: list[dict[str, Any]] = []
    if reply.thinking:
        summary = [{"type": "summary_text", "text": reply.thinking}]
        output.append({"type": "reasoning", "id": f"rs_{turn}", "summary": summary, "encrypted_content": f"sig_{turn}"})
    if reply.text:
        text = {"type": "output_text", "text": reply.text, "annotations": []}
        message = {"type": "message", "id": f"msg_{turn}", "role": "assistant", "status": "completed"}
        output.append({**message, "content": [text]})
    for index, (name, arguments) in enumerate(reply.calls):
        call = {"id": f"fc_{turn}_{index}", "call_id": f"call_{turn}_{index}", "name": name, "status": "completed"}
        if set(arguments) == {"patch"}:
            output.append({**call, "type": "custom_tool_call", "input": arguments["patch"]})
        else:
            output.append({**call, "type": "function_call", "arguments": json.dumps(arguments)})
    body = {"id": f"resp_{turn}", "object": "response", "created_at": 1, "model": "policy"}
    yield event("response.created", response={**body, "status": "in_progress", "output": []})
    for index, item in enumerate(output):
        yield event("response.output_item.done", output_index=index, item=item)
    usage = {"input_tokens": 100, "output_tokens": 10, "total_tokens": 110}
    end = {**body, "output": output, "usage": usage}
    if reply.cut:
        cut = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        yield event("response.incomplete", response={**end, **cut})
    else:
        yield event("response.completed", response={**end, "status": "completed"})


def _anthropic(reply: Reply, turn: int) -> Iterator[str]:
    def event(kind: str, **fields: Any) -> str:
        return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n"

    def block(index: int, start: dict[str, Any], *deltas: dict[str, Any]) -> Iterator[str]:
        yield event("content_block_start", index=index, content_block=start)
        for value in deltas:
            yield event("content_block_delta", index=index, delta=value)
        yield event("content_block_stop", index=index)

    message = {"id": f"msg_{turn}", "type": "message", "role": "assistant", "model": "policy", "content": []}
    usage = {"input_tokens": 100, "output_tokens": 0}
    yield event("message_start", message={**message, "stop_reason": None, "stop_sequence": None, "usage": usage})
    index = 0
    if reply.thinking:
        thought = {"type": "thinking_delta", "thinking": reply.thinking}
        signature = {"type": "signature_delta", "signature": f"sig_{turn}"}
        yield from block(index, {"type": "thinking", "thinking": "", "signature": ""}, thought, signature)
        index += 1
    if reply.text:
        yield from block(index, {"type": "text", "text": ""}, {"type": "text_delta", "text": reply.text})
        index += 1
    for number, (name, arguments) in enumerate(reply.calls):
        start = {"type": "tool_use", "id": f"toolu_{turn}_{number}", "name": name, "input": {}}
        yield from block(index, start, {"type": "input_json_delta", "partial_json": json.dumps(arguments)})
        index += 1
    stop = "max_tokens" if reply.cut else "tool_use" if reply.calls else "end_turn"
    yield event("message_delta", delta={"stop_reason": stop, "stop_sequence": None}, usage={"output_tokens": 10})
    yield event("message_stop")
