"""Requests to the API server with the credentials of a kubeconfig file; errors as messages that a user can act on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from httpx2 import HTTPError, InvalidURL, Response, Timeout
from lightkube.config.client_adapter import Client, ConnectionParams
from lightkube.config.kubeconfig import KubeConfig, SingleConfig
from lightkube.core.exceptions import ConfigError
from yaml import YAMLError

__all__ = ["ApiError", "ApiServer", "CannotStart", "Forbidden", "NotFound", "Unreachable"]

Json = dict[str, Any]


class CannotStart(Exception):
    """The check cannot begin; the message says what to change."""


class ApiError(Exception):
    """The API server refused a request, or did not answer."""


class Unreachable(ApiError):
    """No answer, or one that asks to try again."""


class NotFound(ApiError):
    """Status 404."""


class Forbidden(ApiError):
    """Status 403: a permission is missing, or an admission policy denies the request."""


class ApiServer:
    """The API server of a kubeconfig file's current context.

    Args:
        timeout: seconds for one request.

    Raises:
        CannotStart: the file cannot be used.
    """

    def __init__(self, kubeconfig: Path, *, timeout: float = 30.0) -> None:
        try:
            self._client = Client(_config(kubeconfig), ConnectionParams(timeout=Timeout(timeout)))
        except (ConfigError, YAMLError, InvalidURL, OSError, ValueError, LookupError, TypeError) as error:
            raise CannotStart(f"The kubeconfig file {kubeconfig} cannot be used: {_one_line(error)}.") from error

    def close(self) -> None:
        self._client.close()

    def get(self, path: str) -> Json:
        return self._json(self._send("GET", path))

    def find(self, path: str) -> Json | None:
        """Return an object, or None where there is none."""
        try:
            return self.get(path)
        except NotFound:
            return None

    def items(self, path: str, **selectors: str) -> Sequence[Json]:
        """Return the objects of a list."""
        found: list[Json] = []
        query = {**selectors, "limit": "500"}
        while True:
            page = self._json(self._send("GET", path, query))
            found += page.get("items") or []
            token = (page.get("metadata") or {}).get("continue")
            if not token:
                return found
            query["continue"] = token

    def create(self, path: str, item: Mapping[str, Any]) -> Json:
        return self._json(self._send("POST", path, body=item))

    def delete(self, path: str, **options: Any) -> None:
        """Delete an object; nothing to do where there is none."""
        try:
            self._send("DELETE", path, body={"apiVersion": "v1", "kind": "DeleteOptions", **options})
        except NotFound:
            return

    def log(self, namespace: str, pod: str) -> str:
        """Return what the container of a pod has printed; empty while it has not started, and when the pod is gone."""
        path = f"/api/v1/namespaces/{namespace}/pods/{pod}/log"
        response = self._answer("GET", path, {"container": "main"})
        if response.status_code in (400, 404):
            return ""
        _check(response)
        return response.text

    def _send(self, method: str, path: str, query: Mapping[str, str] | None = None, body: Any = None) -> Response:
        response = self._answer(method, path, query, body)
        _check(response)
        return response

    def _answer(self, method: str, path: str, query: Mapping[str, str] | None = None, body: Any = None) -> Response:
        content = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} if content is not None else {}
        try:
            return self._client.request(method, path, params=dict(query or {}), content=content, headers=headers)
        except (HTTPError, ConfigError, OSError) as error:
            raise Unreachable(f"The API server did not answer: {_one_line(error)}.") from error

    def _json(self, response: Response) -> Json:
        try:
            found = response.json()
        except ValueError as error:
            raise ApiError(f"The API server's answer is not JSON: {_one_line(error)}.") from error
        if not isinstance(found, dict):
            raise ApiError("The API server's answer is not an object.")
        return found


def _check(response: Response) -> None:
    code = response.status_code
    if code < 400:
        return
    try:
        message = str(response.json()["message"])
    except (ValueError, LookupError, TypeError):
        message = response.reason_phrase
    if code == 404:
        raise NotFound(message)
    if code == 403:
        raise Forbidden(message)
    if code == 401:
        raise ApiError(f"The API server rejects the credentials: {message}.")
    if code == 429 or code >= 500:
        raise Unreachable(f"The API server returned {code}: {message}.")
    raise ApiError(f"The API server returned {code}: {message}")


def _config(path: Path) -> SingleConfig:
    config = KubeConfig.from_file(path).get()
    if config is None or config.user is None:
        raise ConfigError("its current context has no user")
    return config


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
