"""Problems in the form that all OpenAI wires share."""

from __future__ import annotations

from typing import Any

from rollwright.dialects import Problem, ProblemKind

__all__ = ["openai_error"]

_ERRORS: dict[ProblemKind, tuple[int, str, str | None]] = {
    "unauthorized": (401, "invalid_request_error", "invalid_api_key"),
    "malformed": (400, "invalid_request_error", None),
    "too_long": (400, "invalid_request_error", "context_length_exceeded"),
    "too_large": (413, "invalid_request_error", "request_too_large"),
    "coding": (415, "invalid_request_error", "unsupported_content_encoding"),
    "closed": (400, "invalid_request_error", "session_closed"),
    "limit": (400, "invalid_request_error", "session_limit"),
    "not_found": (404, "invalid_request_error", "not_found"),
    "unavailable": (500, "server_error", None),
}


def openai_error(problem: Problem) -> tuple[int, dict[str, Any]]:
    """HTTP status and body."""
    status, kind, code = _ERRORS[problem.kind]
    message = problem.message
    if problem.kind == "too_long":
        message = (
            f"This model's maximum context length is {problem.maximum} tokens. However, your messages "
            f"resulted in {problem.tokens} tokens. Please reduce the length of the messages."
        )
    error = {"message": message, "type": kind, "param": problem.field or None, "code": code}
    return status, {"error": error}
