"""A page on disk: HTML that needs no other file and no network, Markdown, and the figures."""

import re
from pathlib import Path

from scorecal.evaluation.blocks import Drawing, Heading, Part, markdown
from scorecal.evaluation.drawing import inline_svg, save_figure
from scorecal.judging.records import replacing

_ESTIMATE = re.compile(r"((?:\*\*)?[+-]?\d[\d.,]*(?:\*\*)?|–)( \[[^\]]*\])?")


def html(title: str, parts: list[Part], about: str) -> str:
    """The page: every text escaped, every figure inside it."""
    import jinja2
    from markupsafe import Markup, escape

    def marked(text: str) -> Markup:
        """A sentence of ours: `code`, **bold**, and minus signs before figures."""
        found = re.sub(r"(?<![\w.])-(?=\d)", "−", str(escape(text)))
        found = re.sub(r"`([^`]+)`", r"<code>\1</code>", found)
        return Markup(re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", found))

    def cell(text: str) -> Markup:
        """An estimate and its interval, which are set apart, or any other text."""
        if not (found := _ESTIMATE.fullmatch(text)):
            return marked(text) if text.startswith("`") else escape(text)
        point, interval = (part.replace("-", "−") for part in found.groups(default=""))
        shown = Markup('<span class="interval">{}</span>').format(interval) if interval else ""
        return marked(point) + shown

    def picture(drawing: Drawing) -> Markup:
        return Markup(inline_svg(drawing.figure, drawing.name))

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("scorecal", "evaluation"),
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"marked": marked, "cell": cell, "picture": picture}
    environment.tests["number"] = lambda text: bool(_ESTIMATE.fullmatch(text))
    page = environment.get_template("page.html.j2")
    return page.render(title=title, parts=parts, about=about)


def written(folder: Path, title: str, parts: list[Part], about: str) -> list[Path]:
    """Write the figures, report.md and, last, report.html."""
    page = html(title, parts, about)
    blocks = [block for part in parts for block in part]
    deeper = [b._replace(level=b.level + 1) if isinstance(b, Heading) else b for b in blocks]
    text = markdown([Heading(1, title), *deeper, about])
    paths = []
    for block in blocks:
        if isinstance(block, Drawing):
            paths += save_figure(block.figure, folder / block.name)
    for name, content in (("report.md", text), ("report.html", page)):
        with replacing(folder / name) as partial:
            partial.write_text(content, encoding="utf-8")
        paths.append(folder / name)
    return paths
