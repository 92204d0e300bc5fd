"""Errors of the API: a UserError becomes a status and a body in OpenAI's form, with our code, what, where and fix."""

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from trimaran.core import UserError

# Every other code is a wrong request.
STATUS_OF_CODE = {
    "U002": 404,
    "U005": 401,
    "U006": 403,
    "U007": 413,
    "U008": 429,
    "U009": 503,
    "U010": 500,
    "U016": 404,
    "U017": 405,
    "U018": 408,
    "U021": 431,
    "U022": 408,
    "U023": 503,
    "M022": 500,
}
TYPE_OF_STATUS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}
RETRY_STATUSES = (429, 503)
JSON_TYPE = "application/json"
ENCODER = json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":"))


def status_of(error: UserError) -> int:
    return STATUS_OF_CODE.get(error.code, 400)


def error_body(error: UserError) -> dict[str, Any]:
    kind = TYPE_OF_STATUS.get(status_of(error), "invalid_request_error")
    message = f"{error.what}. {error.fix[:1].upper()}{error.fix[1:]}."
    openai_fields = {"message": message, "type": kind, "param": error.where, "code": error.code}
    return {"error": openai_fields | {"what": error.what, "where": error.where, "fix": error.fix}}


def error_response(error: UserError, retry_seconds: int = 1) -> Response:
    status, headers = status_of(error), {}
    if status in RETRY_STATUSES:
        headers = {"retry-after": str(retry_seconds)}
    elif status == 401:
        headers = {"www-authenticate": "Bearer"}
    return json_response(error_body(error), status=status, headers=headers)


def json_response(body: Mapping[str, Any], *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a JSON body. What is not a number in JSON (NaN, Inf) is null."""
    return Response(dump_json(body), status_code=status, media_type=JSON_TYPE, headers=headers)


def dump_json(body: Mapping[str, Any]) -> bytes:
    try:
        text = ENCODER.encode(body)
    except ValueError:
        text = ENCODER.encode(_finite(body))
    return text.encode("utf-8", "replace")


def _finite(value: Any) -> Any:
    """Return the value with None in place of numbers that JSON does not have."""
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not -float("inf") < value < float("inf") else value


def stopping() -> UserError:
    return UserError("U009.server-stopping-takes", where="the server")
