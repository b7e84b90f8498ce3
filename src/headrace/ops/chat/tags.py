"""`{% generation %}` for Jinja: the block's text with a marker before and after."""

from __future__ import annotations

from collections.abc import Callable

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from headrace.ops.chat.template import BEGIN, END


class GenerationTags(Extension):
    """Knows one block."""

    tags = {"generation"}  # noqa: RUF012  how Jinja asks for it

    def parse(self, parser: Parser) -> nodes.Node:
        """The block as a call that marks its text."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return f"{BEGIN}{caller()}{END}"
