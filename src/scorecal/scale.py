"""The score scale: an ordered list of labels and the values they stand for."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """Ordered score labels and their values.

    >>> Scale.parse("1-3").labels
    ('1', '2', '3')
    >>> Scale.parse("0-1:0.5").values
    (0.0, 0.5, 1.0)
    """

    name: str
    labels: tuple[str, ...]
    values: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> "Scale":
        """Read `low-high` or `low-high:step`, as in `0-5`, `1-10`, `0-100:10`.

        Raises:
            ValueError: the text is not of that form, holds fewer than two labels, or two that
                are written alike.
        """
        try:
            bounds, _, step_text = text.partition(":")
            low, high = (float(part) for part in bounds.split("-"))
            step = float(step_text) if step_text else 1.0
            count = round((high - low) / step) + 1
            if step <= 0 or not 2 <= count <= 1001 or abs(low + step * (count - 1) - high) > 1e-9:
                raise ValueError
        except (ValueError, ZeroDivisionError, OverflowError):
            raise ValueError(
                "a scale is `low-high` or `low-high:step` of 2 to 1001 labels, as 0-5, "
                f"got {text!r}. Set `data.task.scale`."
            ) from None
        values = tuple(round(low + step * index, 9) for index in range(count))
        labels = tuple(f"{value:.10g}" for value in values)
        if len(set(labels)) < len(labels):
            twice = next(label for label in labels if labels.count(label) > 1)
            raise ValueError(
                f"the scale {text!r} writes several values as {twice!r}: labels must differ. "
                "Set `data.task.scale`."
            )
        return cls(text, labels, values)

    @property
    def low(self) -> str:
        """The lowest label, as it is written in a prompt."""
        return self.labels[0]

    @property
    def high(self) -> str:
        """The highest label, as it is written in a prompt."""
        return self.labels[-1]
