"""What a client is told when a request cannot be served, in the shape of OpenAI's interface."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """A request that is answered with a status of 4xx or 503, and one line that says why."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        parameter: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = " ".join(message.split())
        self.parameter = parameter
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """Return the body of the answer."""
        kinds = {401: "authentication_error", 404: "not_found_error"}
        usual = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {
                "message": self.message,
                "type": kinds.get(self.status, usual),
                "param": self.parameter,
                "code": self.code,
            }
        }

    def headers(self) -> dict[str, str]:
        """Return the headers of the answer that belong to the error."""
        found = {}
        if self.retry_after_s is not None:
            found["retry-after"] = str(self.retry_after_s)
        if self.status == 401:
            found["www-authenticate"] = "Bearer"
        return found
