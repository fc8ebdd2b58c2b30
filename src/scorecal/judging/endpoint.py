"""An OpenAI-compatible endpoint: requests with retries, checked answers, errors in one line."""

import functools
import math
import os
import time
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

_T = TypeVar("_T")
_FIRST_WAIT = 0.5  # seconds before a senseless answer is asked for again; doubled each time


class Refused(ValueError):
    """The endpoint rejects what a request asks for."""


class Malformed(ValueError):
    """An answer that can't be right; asking again may help."""


class Endpoint:
    """Requests to one model behind one URL; connects on first use.

    Args:
        url: base URL; empty takes the environment's OPENAI_BASE_URL.
        model: the model's name there.
        retries: how often a request is repeated.
        timeout: seconds for one answer.
    """

    def __init__(self, url: str, model: str, retries: int, timeout: float) -> None:
        self._url = url
        self.model = model
        self.retries = retries
        self.timeout = timeout
        self.served = ""
        """The model's name as the last answer gave it."""

    def __getstate__(self) -> dict[str, Any]:
        # The client holds the key, which stays in this process.
        return {name: value for name, value in self.__dict__.items() if name != "_client"}

    @property
    def url(self) -> str:
        """The base URL.

        Raises:
            ValueError: none is set, or it holds a secret.
        """
        url = (self._url or os.environ.get("OPENAI_BASE_URL", "")).rstrip("/")
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ValueError(
                f"a server's URL begins with http:// or https://, got {url!r}. "
                "Set `data.judge.init_args.url` or OPENAI_BASE_URL, as http://localhost:8000/v1."
            )
        if "@" in parts.netloc or parts.query:
            # The URL is recorded with the judgements. It isn't repeated here either.
            raise ValueError(
                "a server's URL holds no password and no query. Give the key in OPENAI_API_KEY."
            )
        return url

    @property
    def _key(self) -> str:
        return os.environ.get("OPENAI_API_KEY", "").strip()

    @functools.cached_property
    def _client(self) -> Any:
        try:
            import openai
        except ImportError:
            raise ValueError(
                "a judge behind a server needs the package `openai`. "
                "Run `pip install 'scorecal[server]'`."
            ) from None
        return openai.OpenAI(
            base_url=self.url,
            api_key=self._key or "none",  # a server of one's own asks for none
            max_retries=self.retries,  # with exponential backoff; it honours Retry-After
            timeout=self.timeout,
        )

    def names(self) -> set[str]:
        """The models that the endpoint lists; empty if it lists none. Fails at once when down."""
        quick = self._client.with_options(max_retries=0)
        try:
            answer = self._call(lambda: quick.get("/models", cast_to=object))
        except (Refused, Malformed, _Missing):
            return set()
        listed = answer.get("data") if isinstance(answer, dict) else None
        entries = [entry for entry in listed or [] if isinstance(entry, dict)]
        return {
            name for entry in entries for name in (entry.get("id"), *(entry.get("aliases") or []))
        }

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer to one request, which the client repeats where the transport fails."""
        try:
            answer = self._call(
                lambda: self._client.post(path, body={"model": self.model, **body}, cast_to=object)
            )
        except _Missing as error:
            names = ", ".join(sorted(self.names()))
            advice = (
                f"It serves {names}: set `--data.judge.model`."
                if names
                else "Check `data.judge.init_args.url`: does it end in /v1?"
            )
            raise ValueError(
                f"{self.url} has no model {self.model!r} under {path}: {error} {advice}"
            ) from None
        if not isinstance(answer, dict):
            raise Malformed("the answer is no JSON object.")
        self.served = str(answer.get("model", ""))
        return answer

    def count(self, path: str, body: dict[str, Any]) -> int:
        """How many prompt tokens the endpoint counts."""
        usage = self.ask(path, {**body, "max_tokens": 1}, lambda answer: answer.get("usage"))
        return int((usage or {}).get("prompt_tokens", 0))

    def tokens(self, text: str) -> list[int] | None:
        """A text's tokens by the service that vLLM, SGLang and llama.cpp have beside /v1."""
        body = {
            **{"prompt": text, "add_special_tokens": False},  # vLLM, SGLang
            **{"content": text, "add_special": False, "parse_special": True},  # llama.cpp
        }
        try:
            tokens = self.post(f"{self.url.removesuffix('/v1')}/tokenize", body).get("tokens")
        except ValueError:
            return None
        return tokens if isinstance(tokens, list) else None

    def ask(self, path: str, body: dict[str, Any], read: Callable[[dict[str, Any]], _T]) -> _T:
        """What `read` makes of the answer, asked for again while it raises `Malformed`."""
        attempt = 0
        while True:
            try:
                return read(self.post(path, body))
            except Malformed as error:
                if attempt == self.retries:
                    raise ValueError(
                        f"{self.url} gave no usable answer in {attempt + 1} tries: {error} "
                        "Run the same command to go on."
                    ) from None
            time.sleep(min(_FIRST_WAIT * 2**attempt, 8))
            attempt += 1

    def _call(self, request: Callable[[], Any]) -> Any:
        # `from None` throughout: the client's exceptions carry the request, and that the key.
        import openai

        try:
            return request()
        except openai.APITimeoutError:
            raise ValueError(
                f"{self.url} gave no answer within {self.timeout:g} s. Raise "
                "`data.judge.init_args.timeout`, or lower `concurrency` or `prompts_per_request`."
            ) from None
        except openai.APIConnectionError as error:
            cause = self._words(str(error.__cause__ or error))
            raise ValueError(
                f"can't reach the server {self.url}: {cause}. Start it, or set "
                "`data.judge.init_args.url`."
            ) from None
        except openai.APIStatusError as error:
            body = error.body
            words = str(body["message"]) if isinstance(body, dict) and "message" in body else ""
            raise self._failure(error.status_code, self._words(words or error.message)) from None
        except ValueError as error:  # not JSON
            raise Malformed(f"the answer is no JSON ({self._words(str(error))}).") from None

    def _failure(self, status: int, words: str) -> ValueError:
        if status in (400, 413, 422):
            return Refused(words)
        if status in (404, 405):
            return _Missing(words)
        if status in (401, 403):
            return ValueError(
                f"{self.url} refuses the API key ({status}): {words} Set OPENAI_API_KEY."
            )
        advice = "Lower `data.judge.init_args.concurrency`. " if status == 429 else ""
        return ValueError(
            f"{self.url} failed {self.retries + 1} times ({status}): {words} {advice}"
            "Run the same command to go on."
        )

    def _words(self, text: str) -> str:
        """A server's words in one line, free of the key."""
        text = " ".join(text.split())
        if self._key:
            text = text.replace(self._key, "***")
        return text if len(text) <= 300 else text[:300] + "…"


class _Missing(ValueError):
    """There is no such path or model."""


def choices(answer: Any, count: int) -> list[dict[str, Any]]:
    """The answers to the `count` prompts of a request, in their order."""
    try:
        found = sorted(answer["choices"], key=lambda choice: choice["index"])
        indices = [choice["index"] for choice in found]
    except (TypeError, KeyError):
        raise Malformed("the answer has no list of choices.") from None
    if indices != list(range(count)):
        raise Malformed(f"{count} prompts were sent, answers {indices} came.")
    return found


def listed(choice: dict[str, Any], *, by_id: bool) -> dict[int | str, float]:
    """Log-probabilities listed for the next token, by token id where the server gives one.

    Empty if the server gives none. Completions, chats and llama.cpp have three layouts.
    """
    logprobs = choice.get("logprobs") or {}
    try:
        if logprobs.get("content"):
            entries = [
                (entry["id"] if by_id and "id" in entry else entry["token"], entry["logprob"])
                for entry in logprobs["content"][0]["top_logprobs"]
            ]
        else:
            entries = list(((logprobs.get("top_logprobs") or [{}])[0] or {}).items())
        result: dict[int | str, float] = {}
        for token, value in entries:
            key = _token_id(token) if by_id else token
            # Two tokens with the same text are disjoint events.
            result[key] = float(value) if key not in result else _log_add(result[key], value)
    except (TypeError, KeyError, IndexError, AttributeError, ValueError):
        raise Malformed("the log-probabilities have an unknown layout.") from None
    total = math.fsum(map(math.exp, result.values()))
    if not total <= 1 + 1e-3:  # NaN too
        raise Malformed(f"the listed probabilities sum to {total:.4g}, more than 1.")
    return result


def _token_id(token: int | str) -> int | str:
    text = str(token)
    return int(text.removeprefix("token_id:")) if text.startswith("token_id:") else token


def _log_add(first: float, second: float) -> float:
    high, low = max(first, second), min(first, second)
    return high + math.log1p(math.exp(low - high))
