"""Prompts as token ids: the judge's chat template round text in which nothing is a command."""

import functools
import json
import re
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

from scorecal.judging.judge import Prompt
from scorecal.judging.labels import LabelTree

_SENTINEL = "\ue000scorecal\ue000"  # private-use characters: no template and no item holds them
_BATCH = 1000  # prompts tokenised at once


class PromptTokenizer:
    """A fast tokenizer and its chat template.

    Args:
        tokenizer: of transformers, fast.
        model: the judge's name, for messages.
        limit: tokens that the judge can read, if it says.
        plain: continue the text without any template.
    """

    def __init__(self, tokenizer: Any, model: str, limit: int | None, *, plain: bool) -> None:
        self._tokenizer = tokenizer
        self._model = model
        self._limit = limit
        self._plain = plain

    @functools.cached_property
    def _control(self) -> re.Pattern[str]:
        tokens = [str(token) for token in self._tokenizer.added_tokens_decoder.values()]
        tokens += self._tokenizer.all_special_tokens
        longest_first = sorted({token for token in tokens if token.strip()}, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    @functools.cached_property
    def _text_only(self) -> Any:
        """The tokenizer without its control tokens, for text that spells one."""
        from tokenizers import Tokenizer

        settings = json.loads(self._tokenizer.backend_tokenizer.to_str())
        return Tokenizer.from_str(
            json.dumps({**settings, "added_tokens": [], "post_processor": None})
        )

    @functools.cached_property
    def frame(self) -> tuple[str, str]:
        """The chat template's text before and after the user's words."""
        if self._plain:
            return "", ""
        import jinja2

        try:
            return self._rendered_frame()
        except jinja2.TemplateError as error:
            raise ValueError(
                f"the chat template of judge {self._model!r} can't be rendered: {error}. "
                "Set `data.judge.init_args.chat_template`."
            ) from None

    def _rendered_frame(self) -> tuple[str, str]:
        text = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": _SENTINEL}],
            # A template that prints today's date or starts to think would make another judge.
            # A function can't be passed (transformers turns it into text): a macro takes its place.
            chat_template="{% macro strftime_now(form) %}2025-01-01{% endmacro +%}"
            + self._tokenizer.get_chat_template(),
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=False,
        )
        head, found, foot = text.partition(_SENTINEL)
        if not found or _SENTINEL in foot:
            raise ValueError(
                f"the chat template of judge {self._model!r} doesn't show the user's text once. "
                "Set `data.judge.init_args.chat_template`."
            )
        return head, foot

    def ids(self, text: Any) -> Any:
        """Token ids of a text, or of each of a list, that may hold control tokens."""
        return self._tokenizer(text, add_special_tokens=self._plain)["input_ids"]

    def _segments(self, head: str, user: str, foot: str) -> list[int]:
        """Tokenise with the user's words between hard borders, so that they stay text."""
        marks = list(self._control.finditer(head))
        start = marks[-1].end() if marks else 0
        mark = self._control.search(foot)
        end = mark.start() if mark else len(foot)
        middle = head[start:] + user + foot[:end]
        ids = self.ids(head[:start])  # in plain mode this is the beginning-of-text token alone
        ids += self._text_only.encode(middle, add_special_tokens=False).ids
        if end < len(foot):
            ids += self._tokenizer(foot[end:], add_special_tokens=False)["input_ids"]
        return ids

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Token ids of one prompt, the user's words free of control tokens."""
        head, foot = self.frame
        foot += prompt.cue
        user = prompt.before + prompt.item + prompt.after
        if not self._control.search(user):
            return self.ids(head + user + foot)
        probe = "a plain question"
        ids = self._segments(head, user, foot)
        control = set(self._tokenizer.added_tokens_decoder)
        inside = [index for index in ids if index in control]
        outside = [index for index in self.ids(head + probe + foot) if index in control]
        same = self._segments(head, probe, foot) == self.ids(head + probe + foot)
        if not same or inside != outside:
            found = self._control.search(user)
            raise ValueError(
                f"{prompt.where or 'a prompt'} holds the control token "
                f"{found and found[0]!r}, which this tokenizer can't read as plain text. "
                "Remove it from the data."
            )
        return ids

    def rows(self, prompts: Sequence[Prompt], *, truncate: bool = False) -> list["array[int]"]:
        """Token ids of prompts; see `Judge.encode`."""
        limit = self._limit or 1 << 30
        rows = []
        for prompt, ids in zip(prompts, self._all_ids(prompts), strict=True):
            longest_label = max(len(form) for level in self.label_ids(prompt) for form in level)
            room = limit - longest_label
            if len(ids) > room:
                ids = self._cut(prompt, ids, room, truncate=truncate)
            # Lists of Python numbers would take nine times the memory.
            rows.append(array("i", ids))
        return rows

    def _all_ids(self, prompts: Sequence[Prompt]) -> Iterator[list[int]]:
        """Token ids of each prompt; those without control tokens go through in batches."""
        head, foot = self.frame
        for start in range(0, len(prompts), _BATCH):
            batch = prompts[start : start + _BATCH]
            plain = [
                at
                for at, prompt in enumerate(batch)
                if not self._control.search(prompt.before + prompt.item + prompt.after)
            ]
            texts = [
                head + batch[at].before + batch[at].item + batch[at].after + foot + batch[at].cue
                for at in plain
            ]
            ids = dict(zip(plain, self.ids(texts) if texts else [], strict=True))
            for at, prompt in enumerate(batch):
                yield ids[at] if at in ids else self.prompt_ids(prompt)

    def _cut(self, prompt: Prompt, ids: list[int], room: int, *, truncate: bool) -> list[int]:
        if not truncate:
            raise ValueError(
                f"{prompt.where or 'a prompt'} has {len(ids)} tokens, but judge "
                f"{self._model!r} reads {room} before a label. Shorten the text, or set "
                "`--data.truncate true` to cut the item's end."
            )
        while len(ids) > room:
            if not prompt.item:
                raise ValueError(
                    f"the question of {prompt.where or 'a prompt'} alone has {len(ids)} "
                    f"tokens; judge {self._model!r} reads {room}. Shorten the template."
                )
            keep = int(len(prompt.item) * min(room / len(ids), 1 - 1 / len(prompt.item)))
            prompt = prompt._replace(item=prompt.item[:keep])
            ids = self.prompt_ids(prompt)
        return ids

    @functools.cached_property
    def _label_cache(self) -> dict[tuple[str, tuple[tuple[str, ...], ...]], list[list[list[int]]]]:
        return {}

    def label_ids(self, prompt: Prompt) -> list[list[list[int]]]:
        """Token ids of every surface form of every level; see `Judge.label_ids`."""
        foot = self.frame[1] + prompt.cue
        # Past a control token the item can't reach a label, so one answer serves all prompts.
        alone = bool(self._control.search(foot))
        user = "" if alone else prompt.before + prompt.item + prompt.after
        key = (user + foot, prompt.labels)
        if key not in self._label_cache:
            text = self.frame[0] + user + foot
            self._label_cache[key] = [
                [self._form_ids(text, form) for form in level] for level in prompt.labels
            ]
        return self._label_cache[key]

    def label_tree(self, prompt: Prompt) -> LabelTree:
        """The labels of a prompt as disjoint events; prompts with the same labels share one."""
        ids = self.label_ids(prompt)
        # `_label_cache` keeps the list, so no other list has its id.
        if id(ids) not in self._trees:
            self._trees[id(ids)] = LabelTree(ids)
        return self._trees[id(ids)]

    @functools.cached_property
    def _trees(self) -> dict[int, LabelTree]:
        return {}

    @functools.cached_property
    def _frame_lengths(self) -> tuple[int, int]:
        head, foot = self.frame
        return len(self.ids(head)), len(self.ids(foot)) if foot else 0

    def turn(self, text: str) -> tuple["array[int]", range]:
        """Token ids of a text as a user turn, and which of them are its own and have a prediction.

        The first token has none where nothing stands before it.
        """
        head, foot = self._frame_lengths
        ids = array("i", self.prompt_ids(Prompt(text, "", "", "", ())))
        return ids, range(max(head, 1), len(ids) - foot)

    # Texts that the judge writes

    def rows_to_continue(self, texts: Sequence[str], max_tokens: int) -> list["array[int]"]:
        """Token ids of user turns after which an answer has room.

        Raises:
            ValueError: one and its answer are longer than the context.
        """
        rows = [self.turn(text)[0] for text in texts]
        longest = max(map(len, rows), default=0)
        if self._limit is not None and longest + max_tokens > self._limit:
            raise ValueError(
                f"a text of {longest} tokens leaves no room for an answer of {max_tokens}: judge "
                f"{self._model!r} reads {self._limit}. Shorten the text, or lower "
                "`--data.task.reasoning`."
            )
        return rows

    def room(self, ids: Sequence[int], max_tokens: int) -> int:
        """How many of `max_tokens` tokens the context holds after a prompt."""
        return max_tokens if self._limit is None else min(max_tokens, self._limit - len(ids))

    @functools.cached_property
    def _borders(self) -> re.Pattern[str]:
        """Tokens that can end a turn or begin one; `<think>`, say, is not among them."""
        frame = "".join(self.frame)
        borders = set(self._tokenizer.all_special_tokens) | {
            str(token)
            for token in self._tokenizer.added_tokens_decoder.values()
            if token.special or str(token) in frame
        }
        return re.compile("|".join(map(re.escape, sorted(filter(str.strip, borders)))) or r"(?!)")

    def answer(self, ids: Sequence[int]) -> str:
        """The text of generated tokens, within one turn."""
        return self.within_turn(
            self._tokenizer.decode(
                list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    def within_turn(self, text: str) -> str:
        """A generated text up to where it spells the border of a turn.

        It may come to begin the judge's own answer, where a control token would be a command.
        """
        border = self._borders.search(text)
        return text[: border.start()] if border else text

    def _form_ids(self, text: str, form: str) -> list[int]:
        prompt_ids, ids = self.ids(text), self.ids(text + form)
        label = ids[len(prompt_ids) :]
        if ids[: len(prompt_ids)] != prompt_ids or not label:
            raise ValueError(
                f"the tokenizer of judge {self._model!r} can't write the label {form!r} after "
                f"{text[-20:]!r} without changing the prompt's own tokens. "
                "Change the template's cue (a trailing space?) or `data.task.scale`."
            )
        if self._tokenizer.unk_token_id in label:
            raise ValueError(
                f"the tokenizer of judge {self._model!r} has no token for the label {form!r}. "
                "Change `data.task.scale`."
            )
        return label
