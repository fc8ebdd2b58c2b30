"""A judge's own files: tokenizer, chat template, configuration and what they make of a prompt."""

import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scorecal.judging.judge import Encoded, Prompt
from scorecal.judging.tokens import PromptTokenizer
from scorecal.judging.weights import folder_names, quiet, weights_folder


class Checkpoint:
    """A folder, hub id or GGUF as every engine in this process reads it; loads on first use.

    Args:
        model: as `TransformersJudge` takes it.
        revision: revision of a hub id.
        dtype: of the weights, by torch's name.
        chat_template: a Jinja file instead of the tokenizer's template, or `plain`.
        limit: tokens that the engine reads, where that is less than the model could.
    """

    def __init__(
        self,
        model: str | None,
        revision: str | None,
        dtype: str,
        chat_template: str | None,
        limit: int | None = None,
    ) -> None:
        self.model = model
        self.revision = revision
        self.dtype = dtype
        self.chat_template = chat_template
        self.limit = limit

    @functools.cached_property
    def folder(self) -> str:
        """Folder with safetensors, or a hub id."""
        return weights_folder(self.model, self.dtype)

    def from_pretrained(self, auto: Any, what: str, **options: Any) -> Any:
        """`auto.from_pretrained`, with errors that name the judge."""
        from safetensors import SafetensorError

        quiet()
        try:
            return auto.from_pretrained(self.folder, revision=self.revision or "main", **options)
        except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ValueError(
                f"can't load the {what} of judge {self.model!r}: {reason} "
                "Check `--data.judge.model`."
            ) from error

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The fast tokenizer, with the chat template that was asked for."""
        from transformers import AutoTokenizer

        tokenizer = self.from_pretrained(AutoTokenizer, "tokenizer")
        if not tokenizer.is_fast:
            raise ValueError(f"judge {self.model!r} has no fast tokenizer, which scorecal needs.")
        if self.chat_template and self.chat_template != "plain":
            try:
                tokenizer.chat_template = Path(self.chat_template).read_text(encoding="utf-8")
            except OSError as error:
                raise ValueError(
                    f"can't read the chat template {self.chat_template!r}: {error.strerror}. "
                    "Set `data.judge.init_args.chat_template` to a Jinja file or to `plain`."
                ) from error
        if tokenizer.chat_template is None and self.chat_template is None:
            raise ValueError(
                f"judge {self.model!r} has no chat template (a base model?). Set "
                "`data.judge.init_args.chat_template` to `plain` or to a Jinja file."
            )
        return tokenizer

    @functools.cached_property
    def config(self) -> Any:
        """The configuration of the text model."""
        from transformers import AutoConfig

        return self.from_pretrained(AutoConfig, "configuration").get_text_config()

    def identity(self) -> dict[str, str]:
        """Judge id and revision, dtype, tokenizer and chat template; see `Judge.identity`."""
        folder = Path(self.folder)
        if folder.is_dir():
            names = folder_names(folder)
        else:
            names = {"judge": self.folder, "revision": str(self.config._commit_hash)}
        template = self.tokenizer.chat_template if self.chat_template != "plain" else "plain"
        return {
            **names,
            "dtype": self.dtype,
            "tokenizer": _sha256(self.tokenizer.backend_tokenizer.to_str()),
            "chat_template": _sha256(str(template)),
        }

    @functools.cached_property
    def tokens(self) -> PromptTokenizer:
        """The tokenizer of prompts."""
        limits = [getattr(self.config, "max_position_embeddings", None), self.limit]
        limit = min((int(limit) for limit in limits if limit and int(limit) > 0), default=None)
        return PromptTokenizer(
            self.tokenizer, str(self.model), limit, plain=self.chat_template == "plain"
        )

    def ends(self, own: int | list[int] | None) -> set[int]:
        """Tokens that end an answer: the tokenizer's, and those that the weights come with."""
        given = own if isinstance(own, list) else [own]
        return {token for token in (*given, self.tokenizer.eos_token_id) if token is not None}

    def encode(self, prompts: Sequence[Prompt], *, truncate: bool) -> list[Encoded]:
        """Tokenise prompts as they will be judged; see `Judge.encode`."""
        return [Encoded(ids) for ids in self.tokens.rows(prompts, truncate=truncate)]

    def decode(self, encoded: Encoded) -> str:
        """The text that the model reads; see `Judge.decode`."""
        return self.tokenizer.decode(list(encoded.input_ids), skip_special_tokens=False)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
