"""Log-probabilities of chosen next tokens from an endpoint that lists what it likes.

Endpoints differ in what they show. The first request finds out, and the best way is taken:

* the label tokens by id (vLLM's `logprob_token_ids`): exact;
* the likeliest tokens, and more of them as long as a label is missing: exact;
* where the list is too short, the labels' ratios from an answer restricted to them (vLLM's
  `structured_outputs`), put on scale by a label that the list does hold: exact. Where it holds
  none, the ratios alone, with unknown mass;
* else the missing labels are bounded by what the list leaves for them.
"""

import collections
import functools
from typing import Any, NamedTuple

from scorecal.judging.endpoint import Endpoint, Malformed, Refused, choices, listed
from scorecal.judging.labels import unlisted_bound

_WIDTHS = (200, 100, 50, 20, 10, 5)  # tokens to list; 20 is vLLM's and OpenAI's limit
_AGREE = 0.1  # nats by which a list and restricted answers may differ, in bfloat16
_RULED_OUT = -1000.0  # vLLM writes -9999 for a token that can't be chosen

_List = dict[int | str, float]  # what is listed for the next token, by id or text


class Line(NamedTuple):
    """What the model reads, and the tokens whose log-probabilities after it are needed."""

    text: list[int] | str
    """Token ids, or the user turn of a chat."""
    tokens: list[int]
    spelled: dict[int, str]
    """Texts of the tokens, by which they are listed in a chat; their ids are then only names."""
    complete: bool
    """Whether each token is a whole label."""
    where: str


class Steps(NamedTuple):
    """Log-probabilities of a line's tokens."""

    logprobs: dict[int, float]
    bounded: frozenset[int] = frozenset()
    """Tokens that are at most this likely."""
    on_scale: bool = True
    """False where all may be off by the same unknown constant."""


class Way(NamedTuple):
    """How the endpoint is asked."""

    width: int
    exact: bool = False
    ids: bool = False
    full: bool = False
    """The endpoint lists no more than `width`."""
    choices: bool = True
    """It may be able to restrict an answer to the labels."""

    def __str__(self) -> str:
        if self.exact:
            return "gives the label tokens' log-probabilities, exact"
        if not self.full:
            return f"lists the {self.width} likeliest tokens, more where a label is missing"
        rest = "come from answers restricted to the labels" if self.choices else "are censored"
        return f"lists the {self.width} likeliest tokens; labels that are missing there {rest}"


class NextTokens:
    """Next-token log-probabilities of one endpoint.

    Args:
        endpoint: where they come from.
        tokenizer: of the model; None sends chats and reads tokens by their text.
    """

    def __init__(self, endpoint: Endpoint, tokenizer: Any | None) -> None:
        self._endpoint = endpoint
        self._tokenizer = tokenizer
        self.way: Way | None = None

    @property
    def path(self) -> str:
        """Which of the endpoint's services is asked."""
        return "/chat/completions" if self._tokenizer is None else "/completions"

    # The first request

    def connect(self, line: Line) -> Way:
        """Find out what the endpoint can do.

        Raises:
            ValueError: it gives no log-probabilities, or refuses the line.
        """
        ways = [Way(width) for width in _WIDTHS]
        if self._tokenizer is not None:
            with_ids = [way._replace(ids=True) for way in ways]
            ways = [Way(1, exact=True, ids=True), *with_ids, *ways]
        refusal, silent = None, False
        for way in ways:
            try:
                [row] = self._lists([line], way, probing=True)
            except Refused as error:
                refusal = error
                continue
            found = self._found(line, row)
            if row and (not way.exact or len(found) == len(line.tokens)):
                way = way._replace(full=not way.exact and way.width < _WIDTHS[0])
                if way.full and self._restricted(line, found, way) is None:
                    way = way._replace(choices=False)
                self.way = way
                return way
            silent = silent or not row
        if refusal is None or silent:
            raise ValueError(
                f"{self._endpoint.url} answers without log-probabilities, which is all that a "
                "judge is asked for. Use a server and a model that give them."
            )
        raise self._explained(refusal, line)

    def _explained(self, refusal: Refused, line: Line) -> ValueError:
        words = str(refusal)
        if "context" in words or "too long" in words:
            advice = "Shorten the text, or start the server with a longer context."
        elif "template" in words:
            advice = (
                "Set `data.judge.init_args.tokenizer`, and `chat_template` to `plain` or a file."
            )
        else:
            advice = "Check `data.judge.init_args` and what the server can do."
        return ValueError(
            f"{self._endpoint.url} refuses {line.where or 'a prompt'}: {words} {advice}"
        )

    # Every request

    def after(self, batch: list[Line]) -> list[Steps]:
        """What follows each line; `connect` comes first.

        Raises:
            ValueError: the endpoint fails, or refuses a line.
        """
        way = self.way or self.connect(batch[0])
        try:
            lists = self._lists(batch, way)
        except Refused as refusal:
            if len(batch) == 1:
                raise self._explained(refusal, batch[0]) from None
            # One line of several is to blame, or the server takes one at a time.
            return [steps for line in batch for steps in self.after([line])]
        return [self._steps(line, row, way) for line, row in zip(batch, lists, strict=True)]

    def _lists(
        self, batch: list[Line], way: Way, *, probing: bool = False, **options: Any
    ) -> list[_List]:
        """The tokens that the endpoint lists after each line, with log-probabilities."""

        def read(answer: Any) -> list[_List]:
            by_id = self._tokenizer is not None
            rows = [listed(choice, by_id=by_id) for choice in choices(answer, len(batch))]
            for line, row in zip(batch, rows, strict=True):
                lacking = way.exact and len(self._found(line, row)) < len(line.tokens)
                if not probing and (not row or lacking):
                    raise Malformed("log-probabilities are missing that it gave before.")
            return rows

        return self._endpoint.ask(self.path, {**self._body(batch, way), **options}, read)

    def _body(self, batch: list[Line], way: Way) -> dict[str, Any]:
        # Temperature 0: some servers divide by it before they take the logarithm.
        body: dict[str, Any] = {"max_tokens": 1, "temperature": 0}
        if self._tokenizer is None:
            turn = chat(batch[0].text)
            return {**body, **turn, "logprobs": True, "top_logprobs": way.width}
        body |= {"prompt": [line.text for line in batch], "logprobs": way.width}
        if way.ids:
            body["return_tokens_as_token_ids"] = True
        if way.exact:
            body["logprob_token_ids"] = sorted({token for line in batch for token in line.tokens})
        return body

    def _found(self, line: Line, row: _List) -> dict[int, float]:
        """The wanted tokens that a list holds."""
        keys: dict[int, int | str] = {token: token for token in line.tokens}
        if self._tokenizer is None:
            keys = dict(line.spelled)
        elif any(isinstance(key, str) for key in row):
            keys = {token: self._spelling(token) for token in line.tokens}
        return {token: row[key] for token, key in keys.items() if key in row}

    def _spelling(self, token: int) -> str:
        """A token's text, by which alone some servers list it."""
        text = self._decoded([[token]])[0]
        if self._spellings[text] > 1:
            raise ValueError(
                f"{self._endpoint.url} lists tokens by text, and {self._spellings[text]} tokens "
                f"of the judge read {text!r}. Use a server that lists ids (vLLM, llama.cpp)."
            )
        return text

    @functools.cached_property
    def _spellings(self) -> collections.Counter[str]:
        return collections.Counter(
            self._decoded([[token] for token in range(len(self._tokenizer or []))])
        )

    def _decoded(self, rows: list[list[int]]) -> list[str]:
        return self._tokenizer.batch_decode(rows) if self._tokenizer is not None else []

    def _steps(self, line: Line, row: _List, way: Way) -> Steps:
        """Every wanted token's log-probability, or what can be said about it."""
        found = self._found(line, row)
        while len(found) < len(line.tokens) and not way.full:
            wider = way._replace(width=way.width * 10)
            try:
                [longer] = self._lists([line], wider)
            except Refused:
                longer = {}
            if len(longer) <= len(row):
                way = way._replace(full=True)
                self.way = way
                break
            way, row, found = wider, longer, self._found(line, longer)
        if len(found) == len(line.tokens):
            return Steps(found)
        if line.complete and way.choices:
            if (steps := self._restricted(line, found, way)) is not None:
                return steps
            self.way = (self.way or way)._replace(choices=False)
        self._refuse_pieces(line, found, row)
        bound = unlisted_bound(row.values())
        missing = frozenset(line.tokens) - found.keys()
        return Steps({token: found.get(token, bound) for token in line.tokens}, missing)

    def _restricted(self, line: Line, found: dict[int, float], way: Way) -> Steps | None:
        """The labels' ratios where nothing else may be answered, on scale if one is known."""
        texts = [line.spelled[token] for token in line.tokens] if line.spelled else [
            self._decoded([[token]])[0] for token in line.tokens
        ]  # fmt: skip
        try:
            [row] = self._lists([line], way, probing=True, structured_outputs={"choice": texts})
        except Refused:
            return None
        chosen = self._found(line, row)
        if len(chosen) < len(line.tokens) or min(chosen.values()) < _RULED_OUT:
            return None
        if not found:
            return Steps(chosen, on_scale=False)
        best = max(found, key=lambda token: found[token])
        shift = found[best] - chosen[best]
        if any(abs(chosen[token] + shift - value) > _AGREE for token, value in found.items()):
            return None
        return Steps({token: value + shift for token, value in chosen.items()} | found)

    def _refuse_pieces(self, line: Line, found: dict[int, float], row: _List) -> None:
        """A label that is written in pieces may be likelier than its absence from a list says."""
        for token in line.spelled.keys() - found.keys():
            label = line.spelled[token]
            begun = [key for key in row if isinstance(key, str) and key and label.startswith(key)]
            if begun:
                raise ValueError(
                    f"{self._endpoint.url} writes the label {label!r} in several tokens, the "
                    f"first of them {begun[0]!r}, which takes the judge's tokenizer to follow. "
                    "Set `data.judge.init_args.tokenizer`."
                )


def chat(text: Any) -> dict[str, Any]:
    """The part of a request that holds a user turn."""
    return {"messages": [{"role": "user", "content": text}]}
